"""Scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, 360 of them for tests."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from bench.data.labelled import LabelledImages

TEST_IMAGES = 360


def read_digits(device: torch.device) -> tuple[LabelledImages, LabelledImages]:
    """Read the training and the test images.

    The split is part of a program, not of a run: it is the same for every seed.

    Returns:
        Images of shape N x 64 from 0 to 1 with their labels, for training and for tests.
    """
    images_NP, labels_N = load_digits(return_X_y=True)
    images = torch.tensor(images_NP, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(labels_N, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return LabelledImages(images[train], labels[train]), LabelledImages(images[test], labels[test])
