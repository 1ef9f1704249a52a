"""Rotated crops of scikit-learn's two sample photographs, to be told apart.

Each crop is turned by a multiple of 90 degrees; what is to be predicted is the photograph and the angle. That
is learnt from the image's content alone: which way is up.

Source: rotation prediction, Gidaris et al., "Unsupervised Representation Learning by Predicting Image
Rotations" (2018).
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_sample_images

from bench.data.labelled import LabelledImages

CLASSES = 8
"""Two photographs in four orientations."""


def read_photos(size: int, count: int, *, shrink: int, seed: int) -> LabelledImages:
    """Cut square crops at random places.

    Args:
        size: the crops' side, in pixels.
        count: how many.
        shrink: by which whole number the photographs (427 x 640 pixels) are made smaller first.
        seed: of places, photographs and angles.

    Returns:
        Images of shape N x 3 x size x size, about -1 to 1; labels from 0 to `CLASSES` - 1.

    Raises:
        ValueError: if a crop would be larger than a photograph.
    """
    photographs = [photo[::shrink, ::shrink] for photo in load_sample_images().images]
    if size > min(photographs[0].shape[:2]):
        raise ValueError(f"crops of {size} pixels do not fit into photographs shrunk by {shrink}")
    random = np.random.default_rng(seed)
    crops, labels = [], []
    for _ in range(count):
        which, quarter_turns = int(random.integers(2)), int(random.integers(4))
        photo = photographs[which]
        top, left = (int(random.integers(side - size + 1)) for side in photo.shape[:2])
        crops.append(np.rot90(photo[top : top + size, left : left + size], quarter_turns))
        labels.append(4 * which + quarter_turns)
    images = torch.tensor(np.stack(crops), dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
    return LabelledImages(images / 127.5 - 1, torch.tensor(labels))
