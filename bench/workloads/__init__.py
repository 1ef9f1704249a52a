"""What is placed: the five models of Collage's evaluation, with random weights, and blocks of two trainings.

Each file has `make(preset, batch, seed)`, which returns a module in evaluation mode and its inputs.
"""

from __future__ import annotations

from bench.workloads import bert, dcgan, nasnet, resnet3d, resnext, training
from bench.workloads.base import Workload

WORKLOADS: dict[str, Workload] = {
    "bert": Workload("bert", "BERT base, 128 tokens", bert.make),
    "dcgan": Workload("dcgan", "DCGAN's generator, 64 x 64 images", dcgan.make),
    "nasnet": Workload("nasnet", "NASNet-A (4 @ 1056), 224 x 224 images", nasnet.make),
    "resnet3d": Workload("resnet3d", "3D-ResNet50, 16 frames of 112 x 112", resnet3d.make),
    "resnext": Workload("resnext", "ResNeXt50 (32 x 4d), 224 x 224 images", resnext.make),
    "digits-forward": Workload("digits-forward", "a training step's forward", training.workload("digits", 0)),
    "digits-backward": Workload("digits-backward", "its backward", training.workload("digits", 1)),
    "charlm-forward": Workload("charlm-forward", "a training step's forward", training.workload("charlm", 0)),
    "charlm-backward": Workload("charlm-backward", "its backward", training.workload("charlm", 1)),
}
"""The workloads by name."""
MODELS = ("bert", "dcgan", "nasnet", "resnet3d", "resnext")
"""The workloads that are models in inference."""

__all__ = ["MODELS", "WORKLOADS", "Workload"]
