"""A GAN (Goodfellow et al. 2014, arXiv:1406.2661) with a non-saturating loss: two networks with an
optimizer each. `model` is the generator.

    cp examples/gan.py src/tasks/ && cp examples/gan.yaml conf/experiment/
    python train.py experiment=gan

The log has the losses of both phases, and the trackers show generated digits at every evaluation.
After 25 seconds of CPU time, the discriminator takes 4 % of the generated digits for real ones.
This share, val/fooled, compares the two networks with each other. Look at the digits to judge them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torchvision.utils import make_grid

from src.tasks.images import ImageTask
from timm_parallel import Batch, Metric, to_double

NOISE, SIDE = 32, 16


class Generator(nn.Module):
    """Maps noise [B, NOISE] to normalized images [B, C, SIDE, SIDE]."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE, width * 16),
            nn.Unflatten(1, (width, 4, 4)),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.GroupNorm(8, width // 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, in_chans, 4, 2, 1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.layers(noise)
        return images


class Discriminator(nn.Module):
    """Maps images to a score [B], which is high for real ones."""

    def __init__(self, in_chans: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_chans, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width * 2, 4, 2, 1),
            nn.GroupNorm(8, width * 2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(width * 2 * (SIDE // 4) ** 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores[:, 0]


def fooled(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count the generated images that the discriminator takes for real ones."""
    return to_double((scores > 0).sum())


class Gan(ImageTask):
    """Trains the discriminator first, then the generator, in every step."""

    target = "none"
    phases = {"discriminator": ("discriminator",), "generator": ("model",)}
    metrics = {
        "fooled": Metric(fooled, lambda total, samples: float(total) / samples, is_proportion=True)
    }
    headline = "fooled"

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "discriminator": Discriminator(in_chans=1)}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        fakes = networks.model(batch.normal(NOISE))
        if phase == "generator":
            return softplus(-networks.discriminator(fakes)), {}
        both = torch.cat([batch.image, fakes.detach()])
        real, fake = networks.discriminator(both).chunk(2)
        return softplus(-real) + softplus(fake), {"real": (real > 0).float()}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        scores: Tensor = networks.discriminator(networks.model(batch.normal(NOISE)))
        return scores

    def pictures(self, networks: Any) -> dict[str, Any]:
        device = next(networks.parameters()).device
        noise = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0)).to(device)
        images = make_grid(networks.model(noise).float().cpu(), normalize=True)
        return {"samples": (images.permute(1, 2, 0) * 255).byte().numpy()}
