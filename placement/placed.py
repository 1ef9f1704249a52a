"""Placed: an optimized model, called as the model is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from placement.capture import Captured
from placement.errors import CaptureError, PlacementError
from placement.placements import Placement
from placement.report import Report


class Placed:
    """A callable with the model's signature, for inputs of the shapes that it was optimized for.

    Weights are those of the moment of optimization. It computes no gradients.
    """

    def __init__(
        self,
        captured: Captured,
        placement: Placement,
        function: Callable[..., tuple[torch.Tensor, ...]],
        report: Report | None,
    ) -> None:
        self.captured = captured
        self.placement = placement
        self.function = function
        """The placement as a function of the graph's inputs, unchecked."""
        self._report = report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model.

        Raises:
            CaptureError: if the arguments are not what it was optimized for.
        """
        tensors = self._checked(self.captured.flatten(*args, **kwargs))
        with torch.no_grad():
            return self.captured.unflatten(self.function(*tensors))

    def _checked(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        fitted = self.captured.fitted(tensors)
        gradients = torch.is_grad_enabled()
        for position, tensor in enumerate(tensors):
            if gradients and tensor.requires_grad:
                raise CaptureError(
                    f"input {position} requires gradients, and a placed model computes none. Call it under "
                    'torch.no_grad(), or use torch.compile(model, backend="placement"), which places the '
                    "backward graph too."
                )
        return fitted

    def report(self) -> Report:
        """Which segment went where, at which cost, and what was measured.

        Raises:
            PlacementError: if it was loaded from a file, which holds no report.
        """
        if self._report is None:
            raise PlacementError("a loaded placement has no report; optimize() makes one.")
        return self._report

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the graph, coloured by backend, to an .svg, .png or .pdf file (needs matplotlib)."""
        from placement.draw import draw

        draw(self.captured.graph, self.placement, Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes graph, weights and placement to a file; `placement.load` compiles the parts again."""
        from placement.saving import save

        save(self, Path(path))
