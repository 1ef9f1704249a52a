"""Boxes as left, top, right, bottom, in pixels: how they overlap, and how well a detector finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.data.scenes import Scene


@dataclass(frozen=True, slots=True)
class Detections:
    """What a detector found in one image: N boxes (N x 4) with their classes and scores (N each)."""

    boxes: torch.Tensor
    labels: torch.Tensor
    scores: torch.Tensor


def box_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of boxes, of shape ... x 4; the shapes before it are broadcast."""
    top_left = torch.maximum(first[..., :2], second[..., :2])
    bottom_right = torch.minimum(first[..., 2:], second[..., 2:])
    intersection = (bottom_right - top_left).clamp(min=0).prod(-1)
    return intersection / (_area(first) + _area(second) - intersection).clamp(min=1e-6)


def _area(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def nms(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    """Suppress each box that overlaps a better one by more than `threshold`.

    Returns:
        The numbers of the boxes that are left, the best first.
    """
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order, kept = np.argsort(-scores, kind="stable"), []
    while len(order):
        best, rest = order[0], order[1:]
        kept.append(int(best))
        sides = np.minimum(boxes[best, 2:], boxes[rest, 2:]) - np.maximum(boxes[best, :2], boxes[rest, :2])
        intersection = sides.clip(min=0).prod(1)
        union = (areas[best] + areas[rest] - intersection).clip(min=1e-6)
        order = rest[intersection / union <= threshold]
    return kept


def recall(found: Sequence[Detections], scenes: Sequence[Scene], overlap: float = 0.5) -> float:
    """Return the share of the scenes' objects that a detection of their class overlaps by so much or more."""
    hits, objects = 0, 0
    for detections, scene in zip(found, scenes, strict=True):
        objects += len(scene.labels)
        if len(detections.labels):
            overlaps = box_iou(scene.boxes[:, None], detections.boxes.cpu())
            right = overlaps.ge(overlap) & (scene.labels[:, None] == detections.labels.cpu())
            hits += int(right.any(1).sum())
    return hits / objects
