"""A deep convolutional generative adversarial network that draws digits.

Its trait: two models and two optimizers take turns in a step, and the generator's images are used twice, once
detached.

Source: Radford et al., "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
Networks" (2016), section 3.
Shapes: B batch, C channels, H height, W width, Z size of the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the models and of a batch."""

    noise: int
    channels: int
    batch_size: int
    image_size: int
    """8 times a power of two: digits of 8 x 8 pixels are scaled up to it."""


CONFIGS: dict[Preset, Config] = {
    "small": Config(noise=32, channels=32, batch_size=64, image_size=16),
    "full": Config(noise=100, channels=128, batch_size=256, image_size=64),
    "tiny": Config(noise=8, channels=4, batch_size=16, image_size=16),
}


def make_generator(config: Config) -> nn.Sequential:
    """Transposed convolutions from noise, of shape B x Z x 1 x 1, to images."""
    doublings = (config.image_size // 8).bit_length()
    channels = config.channels * 2 ** (doublings - 1)
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(config.noise, channels, 4, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(True),
    ]
    for _ in range(doublings - 1):
        layers += [
            nn.ConvTranspose2d(channels, channels // 2, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(True),
        ]
        channels //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1), nn.Tanh())


def make_discriminator(config: Config) -> nn.Sequential:
    """Convolutions from images to one logit each: whether it is real."""
    halvings = (config.image_size // 8).bit_length()
    channels = config.channels
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2, True)]
    for _ in range(halvings - 1):
        layers += [
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.LeakyReLU(0.2, True),
        ]
        channels *= 2
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten(0))


def init_weights(module: nn.Module) -> None:
    """Draw a layer's weights as the paper does."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class DCGANTraining(LoggedTraining):
    """The discriminator's step, then the generator's, with Adam each; the loss is the discriminator's."""

    def __init__(self, config: Config, device: torch.device) -> None:
        images_NHW = torch.tensor(load_digits().images, dtype=torch.float32)
        images = F.interpolate(images_NHW[:, None] / 8 - 1, size=config.image_size, mode="bilinear")
        self.images = images.to(device)
        self.config, self.device = config, device
        self.rows = shuffled_batches(len(images), config.batch_size)
        self.generator = make_generator(config).apply(init_weights).to(device)
        self.discriminator = make_discriminator(config).apply(init_weights).to(device)
        self.fixed_noise = torch.randn(256, config.noise, 1, 1, device=device)
        super().__init__(
            nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator}),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            steps_per_epoch=len(images) // config.batch_size,
        )

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return the discriminator's loss."""
        real = self.images[next(self.rows)]
        discriminator_optimizer, generator_optimizer = self.optimizers
        with tape():
            noise = torch.randn(len(real), self.config.noise, 1, 1, device=self.device)
            fake = self.generator(noise)

            discriminator_optimizer.zero_grad()
            loss_real = self._loss(real, 1.0)
            loss_real.backward()
            loss_fake = self._loss(fake.detach(), 0.0)
            loss_fake.backward()
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            self._loss(fake, 1.0).backward()
            generator_optimizer.step()

            loss = loss_real.detach() + loss_fake.detach()
            self.log(loss)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the Frechet distance between drawn and real digits, as Gaussians over 8 x 8 pixels."""
        self.generator.eval()
        drawn = self.generator(self.fixed_noise)
        self.generator.train()
        (mean1, covariance1), (mean2, covariance2) = map(_moments, (drawn, self.images))
        root = torch.tensor(sqrtm((covariance1 @ covariance2).numpy()).real)
        distance = (mean1 - mean2).square().sum() + (covariance1 + covariance2 - 2 * root).trace()
        return distance.item()

    def _loss(self, images: torch.Tensor, real: float) -> torch.Tensor:
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def _moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = F.adaptive_avg_pool2d(images, 8).flatten(1).double().cpu()
    return pixels.mean(0), pixels.T.cov()


def make(seed: int, preset: Preset) -> DCGANTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return DCGANTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="dcgan",
    description="DCGAN (two models, two optimizers, batch norm) that draws handwritten digits",
    metric="Frechet distance (pixels)",
    make=make,
)
