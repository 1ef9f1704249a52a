"""What the training runs of the suite have in common: batches in random order, and a loss that is logged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bench.data.labelled import LabelledImages

LOG_EVERY = 10


class LoggedTraining:
    """A run that reads its loss every 10 steps and does nothing between epochs."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self.model = model
        self.optimizers = optimizers
        self.steps_per_epoch = steps_per_epoch
        self.logged: list[tuple[int, float]] = []
        self.steps = 0

    def log(self, loss: torch.Tensor) -> None:
        """Read the loss if it is its turn, and count the step."""
        if self.steps % LOG_EVERY == 0:
            self.logged.append((self.steps, loss.item()))
        self.steps += 1

    def end_epoch(self) -> None:
        """Nothing is to be done between epochs."""


class ClassifierTraining(LoggedTraining):
    """A run over labelled images, which are in the model's device's memory as a whole."""

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        train: LabelledImages,
        test: LabelledImages,
        batch_size: int,
    ) -> None:
        super().__init__(model, *optimizers, steps_per_epoch=len(train.labels) // batch_size)
        self.train_images, self.train_labels = train.images, train.labels
        self.test_images, self.test_labels = test.images, test.labels
        self.batch_size = batch_size
        self.rows = shuffled_batches(len(train.labels), batch_size)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and labels of the next batch."""
        rows = next(self.rows)
        return self.train_images[rows], self.train_labels[rows]

    def evaluate(self) -> float:
        """Return the share of test images that are classified correctly."""
        return accuracy(self.model, self.test_images, self.test_labels, self.batch_size)


def shuffled_batches(examples: int, batch_size: int) -> Iterator[torch.Tensor]:
    """Yield the numbers of each batch's examples, for ever; what is left of an epoch is dropped."""
    while True:
        for rows in torch.randperm(examples).split(batch_size):
            if len(rows) == batch_size:
                yield rows


@torch.no_grad()
def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, batch_size: int) -> float:
    """Return the share of inputs that a classifier in evaluation mode gets right; it trains on afterwards."""
    model.eval()
    correct = [
        (model(some).argmax(1) == expected).float()
        for some, expected in zip(inputs.split(batch_size), labels.split(batch_size), strict=True)
    ]
    model.train()
    return torch.cat(correct).mean().item()
