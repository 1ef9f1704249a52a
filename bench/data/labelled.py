"""Images and what they show."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Images of equal size.

    Attributes:
        images: of shape N x the shape of one.
        labels: numbers of classes, of shape N.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> LabelledImages:
        """Return them on a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device))
