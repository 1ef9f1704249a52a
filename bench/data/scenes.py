"""Synthesised detection scenes: squares, disks and triangles of random size and colour on a noisy ground."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

CLASSES = 3
SQUARE, DISK, TRIANGLE = range(CLASSES)


@dataclass(frozen=True, slots=True)
class Scene:
    """An image and what is to be found in it.

    Attributes:
        image: of shape 3 x size x size, about -1 to 1.
        boxes: of shape N x 4: left, top, right, bottom in pixels. At least one.
        labels: of shape N, from 0 to `CLASSES` - 1.
    """

    image: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor


def make_scenes(size: int, count: int, *, most_objects: int, seed: int) -> list[Scene]:
    """Draw scenes.

    Args:
        size: the images' side, in pixels.
        count: how many scenes.
        most_objects: each scene holds 1 to this many objects, which may overlap.
        seed: of everything random.
    """
    random = np.random.default_rng(seed)
    return [_scene(size, int(random.integers(1, most_objects + 1)), random) for _ in range(count)]


def _scene(size: int, objects: int, random: np.random.Generator) -> Scene:
    image = random.normal(0, 0.15, (3, size, size)).astype(np.float32)
    ys, xs = np.mgrid[:size, :size] + 0.5
    boxes, labels = [], []
    for _ in range(objects):
        side = float(random.uniform(0.2, 0.5)) * size
        left, top = (float(random.uniform(0, size - side)) for _ in range(2))
        label = int(random.integers(CLASSES))
        # The channel that is brightest is another one for each class most of the time.
        colour = random.uniform(-0.4, 0.4, 3) + 0.8 * np.eye(3)[label]
        image[:, _covered(label, xs - left, ys - top, side)] = colour[:, None]
        boxes.append([left, top, left + side, top + side])
        labels.append(label)
    return Scene(torch.tensor(image), torch.tensor(boxes), torch.tensor(labels))


def _covered(label: int, xs: np.ndarray, ys: np.ndarray, side: float) -> np.ndarray:
    """Return which pixels a shape covers, at distances `xs` and `ys` from its box's corner."""
    inside = (xs >= 0) & (xs <= side) & (ys >= 0) & (ys <= side)
    if label == DISK:
        covered: np.ndarray = (xs - side / 2) ** 2 + (ys - side / 2) ** 2 <= (side / 2) ** 2
        return covered
    if label == TRIANGLE:
        return inside & (np.abs(xs - side / 2) <= ys / 2)
    return inside
