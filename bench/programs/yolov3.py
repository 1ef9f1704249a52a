"""YOLOv3 on synthesised scenes: three resolutions, three anchors in each of their cells.

Its traits: features that are scaled up and joined, masks in the loss, and a program that keeps the parts of
its loss as numbers, for which it reads them in every step.

Source: Redmon and Farhadi, "YOLOv3: An Incremental Improvement" (2018), sections 2.1 to 2.4 and Table 1.
Shapes: B images, C channels, H and W cells, A anchors of a cell, N objects (padded with boxes of no size).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.boxes import Detections, box_iou, nms, recall
from bench.data.scenes import CLASSES, Scene, make_scenes
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches

STRIDES = (32, 16, 8)
ANCHOR_SHARES = ((0.42, 0.46, 0.5), (0.31, 0.35, 0.39), (0.2, 0.24, 0.28))
"""Sides of the anchors at each stride, as shares of the image's."""
MOST_OBJECTS = 3
IGNORED_ABOVE = 0.5
"""A box without an object costs nothing if it overlaps one by this much (section 2.1)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model, of the images and of a batch."""

    width: int
    """Channels behind the first convolution: 32 in the paper."""
    blocks: tuple[int, int, int, int, int]
    """Residual blocks at each resolution: (1, 2, 8, 8, 4) in the paper."""
    image_size: int
    batch_size: int
    scenes: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(width=4, blocks=(1, 1, 2, 2, 1), image_size=64, batch_size=4, scenes=200),
    "full": Config(width=32, blocks=(1, 2, 8, 8, 4), image_size=416, batch_size=16, scenes=400),
    "tiny": Config(width=4, blocks=(0, 0, 1, 1, 1), image_size=32, batch_size=4, scenes=100),
}


def conv(channels: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm and leaky rectifier."""
    return nn.Sequential(
        nn.Conv2d(channels, out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out),
        nn.LeakyReLU(0.1),
    )


class Residual(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution around a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(conv(channels, channels // 2, 1), conv(channels // 2, channels, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape."""
        y: torch.Tensor = x + self.convs(x)
        return y


class Darknet(nn.Module):
    """The backbone of Table 1."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.stem = conv(3, width, 3)
        self.stages = nn.ModuleList()
        for blocks in config.blocks:
            self.stages.append(
                nn.Sequential(
                    conv(width, 2 * width, 3, stride=2), *(Residual(2 * width) for _ in range(blocks))
                )
            )
            width *= 2

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the features at strides 32, 16 and 8."""
        x, features = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features[:1:-1]


class YOLOv3(nn.Module):
    """Predicts, for each anchor of each cell at each resolution, a box, its objectness and its class."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = Darknet(config)
        self.necks, self.outputs, self.laterals = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        above = 0
        for level in range(len(STRIDES)):
            width = config.width * 2 ** (5 - level)
            self.necks.append(
                nn.Sequential(
                    conv(width + above, width // 2, 1), conv(width // 2, width, 3), conv(width, width // 2, 1)
                )
            )
            self.outputs.append(
                nn.Sequential(
                    conv(width // 2, width, 3), nn.Conv2d(width, len(ANCHOR_SHARES[0]) * (5 + CLASSES), 1)
                )
            )
            above = width // 4
            self.laterals.append(conv(width // 2, above, 1))

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return what is predicted at each stride, of shape B x H x W x A x (5 + classes)."""
        predictions, joined = [], None
        for features, neck, output, lateral in zip(
            self.backbone(images), self.necks, self.outputs, self.laterals, strict=True
        ):
            x = neck(features if joined is None else torch.cat([joined, features], dim=1))
            raw = output(x)
            B, _, H, W = raw.shape
            predictions.append(raw.view(B, len(ANCHOR_SHARES[0]), -1, H, W).permute(0, 3, 4, 1, 2))
            joined = F.interpolate(lateral(x), scale_factor=2, mode="nearest")
        return predictions


def decode(raw: torch.Tensor, level: int, image_size: int) -> torch.Tensor:
    """Return the boxes of raw predictions, of shape B x H x W x A x 4 (section 2.1)."""
    _, H, W, _, _ = raw.shape
    ys, xs = torch.meshgrid(
        torch.arange(H, device=raw.device), torch.arange(W, device=raw.device), indexing="ij"
    )
    corners = torch.stack([xs, ys], dim=-1)[:, :, None]
    anchors = torch.tensor(ANCHOR_SHARES[level], device=raw.device)[:, None] * image_size
    centres = (raw[..., :2].sigmoid() + corners) * STRIDES[level]
    half = raw[..., 2:4].clamp(max=4).exp() * anchors / 2
    return torch.cat([centres - half, centres + half], dim=-1)


class Loss(nn.Module):
    """The sum of squared errors of boxes and the cross entropies of objectness and class, over all cells."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size

    def forward(
        self, raw: torch.Tensor, targets: torch.Tensor, boxes_BN4: torch.Tensor, level: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses of boxes, objectness and classes at one stride, means over the images.

        Args:
            raw: predictions, of shape B x H x W x A x (5 + classes).
            targets: of shape B x H x W x A x 6: x and y in the cell, the sides' logarithms as shares of the
                anchor's, whether there is an object, its class.
            boxes_BN4: the objects' boxes.
            level: which stride.
        """
        has_object = targets[..., 4]
        overlaps = box_iou(
            decode(raw.detach(), level, self.image_size)[..., None, :], boxes_BN4[:, None, None, None]
        )
        ignored = (overlaps.amax(-1) > IGNORED_ABOVE).to(raw.dtype)
        shift = (raw[..., :2].sigmoid() - targets[..., :2]).square() + (
            raw[..., 2:4] - targets[..., 2:4]
        ).square()
        objectness = F.binary_cross_entropy_with_logits(raw[..., 4], has_object, reduction="none")
        classes = F.cross_entropy(
            raw[..., 5:].flatten(0, 3), targets[..., 5].long().flatten(), reduction="none"
        )
        return (
            (has_object * shift.sum(-1)).sum((1, 2, 3)).mean(),
            ((has_object + (1 - has_object) * (1 - ignored)) * objectness).sum((1, 2, 3)).mean(),
            (has_object * classes.view_as(has_object)).sum((1, 2, 3)).mean(),
        )


def make_targets(scene: Scene, image_size: int) -> list[torch.Tensor]:
    """Return what is to be predicted of a scene at each stride: each object by the anchor most like it."""
    anchors = torch.tensor(ANCHOR_SHARES) * image_size
    targets = [torch.zeros(image_size // s, image_size // s, len(ANCHOR_SHARES[0]), 6) for s in STRIDES]
    for box, label in zip(scene.boxes, scene.labels, strict=True):
        side = box[2] - box[0]
        level, anchor = divmod(int((side / anchors).log().abs().argmin()), len(ANCHOR_SHARES[0]))
        x, y = ((box[:2] + box[2:]) / 2 / STRIDES[level]).tolist()
        target = torch.tensor(
            [x % 1, y % 1, *[torch.log(side / anchors[level, anchor])] * 2, 1.0, float(label)]
        )
        targets[level][int(y), int(x), anchor] = target
    return targets


class YOLOv3Training(LoggedTraining):
    """Adam; keeps the parts of each step's loss."""

    model: YOLOv3

    def __init__(self, config: Config, device: torch.device) -> None:
        self.scenes = make_scenes(config.image_size, config.scenes, most_objects=MOST_OBJECTS, seed=0)
        self.test_scenes = make_scenes(
            config.image_size, config.scenes // 5, most_objects=MOST_OBJECTS, seed=1
        )
        self.targets = [make_targets(scene, config.image_size) for scene in self.scenes]
        self.device = device
        self.rows = shuffled_batches(config.scenes, config.batch_size)
        self.loss = Loss(config.image_size)
        self.parts: list[tuple[float, float, float]] = []
        model = YOLOv3(config).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        super().__init__(model, optimizer, steps_per_epoch=config.scenes // config.batch_size)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        rows = next(self.rows).tolist()
        images = torch.stack([self.scenes[row].image for row in rows]).to(self.device)
        boxes = torch.stack([_padded(self.scenes[row].boxes) for row in rows]).to(self.device)
        targets = [
            torch.stack(level).to(self.device)
            for level in zip(*(self.targets[row] for row in rows), strict=True)
        ]
        [optimizer] = self.optimizers
        with tape():
            predictions = self.model(images)
            box_loss = object_loss = class_loss = torch.zeros((), device=self.device)
            for level, (raw, target) in enumerate(zip(predictions, targets, strict=True)):
                parts = self.loss(raw, target, boxes, level)
                box_loss, object_loss, class_loss = (
                    box_loss + parts[0],
                    object_loss + parts[1],
                    class_loss + parts[2],
                )
            loss = box_loss + object_loss + class_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.parts.append((box_loss.item(), object_loss.item(), class_loss.item()))
            self.log(loss)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the share of the test scenes' objects that are found."""
        self.model.eval()
        images = torch.stack([scene.image for scene in self.test_scenes]).to(self.device)
        predictions = self.model(images)
        self.model.train()
        size = images.shape[-1]
        boxes = torch.cat(
            [decode(raw, level, size).flatten(1, 3) for level, raw in enumerate(predictions)], dim=1
        )
        logits = torch.cat([raw[..., 4:].flatten(1, 3) for raw in predictions], dim=1)
        return recall([_detections(*image) for image in zip(boxes, logits, strict=True)], self.test_scenes)


def _padded(boxes: torch.Tensor) -> torch.Tensor:
    return F.pad(boxes, (0, 0, 0, MOST_OBJECTS - len(boxes)))


def _detections(boxes: torch.Tensor, logits: torch.Tensor) -> Detections:
    """Return one image's best boxes that don't overlap too much."""
    scores, order = logits[:, 0].sigmoid().topk(32)
    boxes, labels = boxes[order], logits[order, 1:].argmax(1)
    sure = scores >= 0.3
    boxes, labels, scores = boxes[sure], labels[sure], scores[sure]
    kept = nms(boxes.cpu().numpy(), scores.cpu().numpy(), 0.5)
    return Detections(boxes[kept], labels[kept], scores[kept])


def make(seed: int, preset: Preset) -> YOLOv3Training:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return YOLOv3Training(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="yolov3",
    description="YOLOv3 (Darknet, three resolutions, masked losses read in each step) on synthesised scenes",
    metric="test recall at IoU 0.5",
    make=make,
)
