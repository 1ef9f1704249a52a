"""Faster R-CNN on synthesised scenes: region proposals, non-maximum suppression, and a head over the regions.

Its trait: the program looks at tensors while it builds its loss (suppression is NumPy's here), and how many
proposals, positives and negatives there are, and so the shapes of most tensors behind them, depends on data.

Source: Ren et al., "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks" (2016),
section 3; regions are aligned as in He et al., "Mask R-CNN" (2017), section 3.
Shapes: B images, A anchors, P proposals, R sampled regions, C channels, H height, W width, N objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.boxes import Detections, box_iou, nms, recall
from bench.data.scenes import CLASSES, Scene, make_scenes
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches

STRIDE = 8
REGION = 4
"""Cells of a region's side after alignment."""
BACKGROUND = CLASSES
LOG_RATIO_LIMIT = math.log(4)


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model, of the images and of a batch."""

    width: int
    image_size: int
    batch_size: int
    scenes: int
    anchor_shares: tuple[float, ...] = (0.25, 0.4)
    """Sides of the anchors as shares of the image's."""
    proposals_before_nms: int = 48
    proposals: int = 16
    anchors_sampled: int = 32
    regions_sampled: int = 16


CONFIGS: dict[Preset, Config] = {
    "small": Config(width=32, image_size=96, batch_size=3, scenes=200),
    "full": Config(
        width=128,
        image_size=512,
        batch_size=8,
        scenes=400,
        anchor_shares=(0.1, 0.2, 0.4),
        proposals_before_nms=2000,
        proposals=500,
        anchors_sampled=256,
        regions_sampled=128,
    ),
    "tiny": Config(width=8, image_size=32, batch_size=2, scenes=60),
}


def encode(boxes: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return how far boxes are from anchors, in units of the anchors' size (equation 2)."""
    sizes = anchors[:, 2:] - anchors[:, :2]
    shift = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / sizes
    return torch.cat([shift, torch.log((boxes[:, 2:] - boxes[:, :2]) / sizes)], dim=1)


def decode(deltas: torch.Tensor, anchors: torch.Tensor, image_size: int) -> torch.Tensor:
    """Return the boxes that `encode` would turn into `deltas`, cut off at the image's border."""
    sizes = anchors[:, 2:] - anchors[:, :2]
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2 + deltas[:, :2] * sizes
    half = sizes * deltas[:, 2:].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() / 2
    return torch.cat([centres - half, centres + half], dim=1).clamp(0, image_size)


class Backbone(nn.Sequential):
    """Convolutions to a resolution of one eighth."""

    def __init__(self, width: int) -> None:
        layers: list[nn.Module] = []
        for channels, out in ((3, width // 2), (width // 2, width), (width, width)):
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.GroupNorm(4, out), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(width, width, 3, padding=1), nn.ReLU())


class RPN(nn.Module):
    """The region proposal network: an objectness logit and four deltas for each anchor."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        per_cell = len(config.anchor_shares)
        self.conv = nn.Conv2d(config.width, config.width, 3, padding=1)
        self.objectness = nn.Conv2d(config.width, per_cell, 1)
        self.deltas = nn.Conv2d(config.width, 4 * per_cell, 1)
        steps = torch.arange(config.image_size // STRIDE) * STRIDE + STRIDE / 2
        ys, xs = torch.meshgrid(steps, steps, indexing="ij")
        centres = torch.stack([xs, ys], dim=-1).reshape(-1, 1, 2)
        half = torch.tensor(config.anchor_shares).reshape(1, -1, 1) * config.image_size / 2
        self.anchors: torch.Tensor
        self.register_buffer("anchors", torch.cat([centres - half, centres + half], dim=-1).reshape(-1, 4))

    def forward(self, features_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, of shape B x A, and deltas, of shape B x A x 4."""
        x = F.relu(self.conv(features_BCHW))
        logits_BA = self.objectness(x).permute(0, 2, 3, 1).flatten(1)
        deltas_BA4 = self.deltas(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4)
        return logits_BA, deltas_BA4

    @torch.no_grad()
    def propose(self, logits_A: torch.Tensor, deltas_A4: torch.Tensor) -> torch.Tensor:
        """Return the best boxes of one image that don't overlap too much, of shape P x 4."""
        scores, best = logits_A.topk(min(self.config.proposals_before_nms, len(logits_A)))
        boxes = decode(deltas_A4[best], self.anchors[best], self.config.image_size)
        sides = boxes[:, 2:] - boxes[:, :2]
        large = torch.where((sides >= 2).all(1))[0]
        boxes, scores = boxes[large], scores[large]
        kept = nms(boxes.cpu().numpy(), scores.cpu().numpy(), 0.7)
        return boxes[kept[: self.config.proposals]]

    def loss(self, logits_A: torch.Tensor, deltas_A4: torch.Tensor, boxes_N4: torch.Tensor) -> torch.Tensor:
        """Return the loss of one image over a sample of its anchors."""
        overlaps_AN = box_iou(self.anchors[:, None], boxes_N4)
        best_A, match_A = overlaps_AN.max(1)
        labels_A = torch.full_like(match_A, -1)
        labels_A[best_A < 0.3] = 0
        labels_A[best_A >= 0.5] = 1
        labels_A[overlaps_AN.argmax(0)] = 1  # every object has an anchor
        positive, negative = sample(labels_A, self.config.anchors_sampled, positive_share=0.5)
        sampled = torch.cat([positive, negative])
        objectness = F.binary_cross_entropy_with_logits(logits_A[sampled], labels_A[sampled].float())
        targets = encode(boxes_N4[match_A[positive]], self.anchors[positive])
        shift = F.smooth_l1_loss(deltas_A4[positive], targets, beta=1 / 9, reduction="sum")
        return objectness + shift / len(sampled)


def sample(labels: torch.Tensor, count: int, positive_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose at random among what is labelled 1 and what is labelled 0.

    Returns:
        The places of at most `positive_share * count` positives, and of negatives that fill up to `count`.
    """
    positive, negative = torch.where(labels == 1)[0], torch.where(labels == 0)[0]
    positives = min(len(positive), int(positive_share * count))
    negatives = min(len(negative), count - positives)
    chosen = torch.randperm(len(positive), device=labels.device)[:positives]
    others = torch.randperm(len(negative), device=labels.device)[:negatives]
    return positive[chosen], negative[others]


def roi_align(features_CHW: torch.Tensor, boxes_R4: torch.Tensor) -> torch.Tensor:
    """Return the features in the middle of each cell of each box, of shape R x C x REGION x REGION."""
    H, W = features_CHW.shape[1:]
    middles = (torch.arange(REGION, device=boxes_R4.device) + 0.5) / REGION
    xs = boxes_R4[:, 0, None] + middles * (boxes_R4[:, 2] - boxes_R4[:, 0])[:, None]
    ys = boxes_R4[:, 1, None] + middles * (boxes_R4[:, 3] - boxes_R4[:, 1])[:, None]
    xs, ys = 2 * xs / (W * STRIDE) - 1, 2 * ys / (H * STRIDE) - 1
    grid = torch.stack([xs[:, None, :].expand(-1, REGION, -1), ys[:, :, None].expand(-1, -1, REGION)], dim=-1)
    all_regions = features_CHW[None].expand(len(grid), -1, -1, -1)
    return F.grid_sample(all_regions, grid, padding_mode="border", align_corners=False)


class FasterRCNN(nn.Module):
    """Backbone, region proposals and the head that classifies and refines them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config.width)
        self.rpn = RPN(config)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(config.width * REGION**2, 4 * config.width),
            nn.ReLU(),
            nn.Linear(4 * config.width, 4 * config.width),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(4 * config.width, CLASSES + 1)
        self.refinement = nn.Linear(4 * config.width, 4)

    def forward(
        self, images: torch.Tensor, boxes: list[torch.Tensor], labels: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the losses of the proposals and of the head, means over the images."""
        features = self.backbone(images)
        logits_BA, deltas_BA4 = self.rpn(features)
        losses: dict[str, list[torch.Tensor]] = {"proposals": [], "classes": [], "boxes": []}
        for i in range(len(images)):
            losses["proposals"].append(self.rpn.loss(logits_BA[i], deltas_BA4[i], boxes[i]))
            proposals = torch.cat([self.rpn.propose(logits_BA[i], deltas_BA4[i]), boxes[i]])
            regions, classes, targets = self._sample_regions(proposals, boxes[i], labels[i])
            hidden = self.head(roi_align(features[i], regions))
            losses["classes"].append(F.cross_entropy(self.classifier(hidden), classes))
            deltas = self.refinement(hidden)[: len(targets)]
            losses["boxes"].append(F.smooth_l1_loss(deltas, targets, reduction="sum") / len(regions))
        return {name: torch.stack(values).mean() for name, values in losses.items()}

    def _sample_regions(
        self, proposals_P4: torch.Tensor, boxes_N4: torch.Tensor, labels_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return regions, those of objects first, the classes of all, and the deltas of those first ones."""
        overlaps_P, match_P = box_iou(proposals_P4[:, None], boxes_N4).max(1)
        is_object = (overlaps_P >= 0.5).long()
        positive, negative = sample(is_object, self.config.regions_sampled, positive_share=0.25)
        regions = proposals_P4[torch.cat([positive, negative])]
        background = torch.full_like(negative, BACKGROUND)
        classes = torch.cat([labels_N[match_P[positive]], background])
        return regions, classes, encode(boxes_N4[match_P[positive]], proposals_P4[positive])

    @torch.no_grad()
    def detect(self, images: torch.Tensor, least_score: float = 0.3) -> list[Detections]:
        """Return what is found in each image."""
        features = self.backbone(images)
        logits_BA, deltas_BA4 = self.rpn(features)
        found = []
        for i in range(len(images)):
            proposals = self.rpn.propose(logits_BA[i], deltas_BA4[i])
            hidden = self.head(roi_align(features[i], proposals))
            scores, labels = self.classifier(hidden).softmax(1)[:, :BACKGROUND].max(1)
            boxes = decode(self.refinement(hidden), proposals, self.config.image_size)
            sure = scores >= least_score
            boxes, labels, scores = boxes[sure], labels[sure], scores[sure]
            kept = nms(boxes.cpu().numpy(), scores.cpu().numpy(), 0.5)
            found.append(Detections(boxes[kept], labels[kept], scores[kept]))
        return found


class FasterRCNNTraining(LoggedTraining):
    """SGD with momentum over the sum of the losses."""

    model: FasterRCNN

    def __init__(self, config: Config, device: torch.device) -> None:
        self.scenes = make_scenes(config.image_size, config.scenes, most_objects=3, seed=0)
        self.test_scenes = make_scenes(config.image_size, config.scenes // 5, most_objects=3, seed=1)
        self.device = device
        self.rows = shuffled_batches(config.scenes, config.batch_size)
        model = FasterRCNN(config).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        super().__init__(model, optimizer, steps_per_epoch=config.scenes // config.batch_size)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        scenes: list[Scene] = [self.scenes[row] for row in next(self.rows).tolist()]
        images = torch.stack([scene.image for scene in scenes]).to(self.device)
        boxes = [scene.boxes.to(self.device) for scene in scenes]
        labels = [scene.labels.to(self.device) for scene in scenes]
        [optimizer] = self.optimizers
        with tape():
            losses = self.model(images, boxes, labels)
            loss: torch.Tensor = sum(losses.values(), torch.zeros((), device=self.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            optimizer.step()
            self.log(loss)
        return loss

    def evaluate(self) -> float:
        """Return the share of the test scenes' objects that are found."""
        self.model.eval()
        images = torch.stack([scene.image for scene in self.test_scenes]).to(self.device)
        found = recall(self.model.detect(images), self.test_scenes)
        self.model.train()
        return found


def make(seed: int, preset: Preset) -> FasterRCNNTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return FasterRCNNTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="fasterrcnn",
    description="Faster R-CNN (proposals, NMS by NumPy, data-dependent shapes) on synthesised scenes",
    metric="test recall at IoU 0.5",
    make=make,
)
