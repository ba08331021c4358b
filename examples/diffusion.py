"""A diffusion model (DDPM, Ho et al. 2020, arXiv:2006.11239) that predicts the noise in an image.
`model(images, times)` has two inputs.

    cp examples/diffusion.py src/tasks/ && cp examples/diffusion.yaml conf/experiment/
    python train.py experiment=diffusion

Times and noise are draws of the batch: equal on any number of devices, and fixed in evaluation. The
trackers show generated digits at every evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.utils import make_grid

from src.tasks.images import ImageTask
from timm_parallel import Batch, Metric, to_double

TIMES = 100
# Variance of the noise that each time adds, and share of the image that is left.
BETAS = [1e-4 + (0.05 - 1e-4) * time / (TIMES - 1) for time in range(TIMES)]


def kept(times: Tensor) -> Tensor:
    """Return the share of the variance of the image at each time, [B, 1, 1, 1]."""
    left = (1 - torch.tensor(BETAS, device=times.device)).cumprod(0)
    return left[times][:, None, None, None]


class Denoiser(nn.Module):
    """Predicts the noise of images [B, C, H, W] at times [B]."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_chans, width, 3, padding=1)
        self.of_time = nn.Embedding(TIMES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(4)
        )
        self.last = nn.Conv2d(width, in_chans, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        features = self.first(images) + self.of_time(times)[:, :, None, None]
        for block in self.blocks:
            features = features + block(features)
        noise: Tensor = self.last(features)
        return noise


def error(task: Any, errors: Tensor, batch: Batch) -> Tensor:
    return to_double(errors).sum()


class Diffusion(ImageTask):
    """Learns to remove noise from images; labels are ignored."""

    target = "none"
    metrics = {
        "loss": Metric(error, lambda total, samples: float(total) / samples, lower_is_better=True)
    }

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        times, noise = batch.integers(TIMES), batch.normal(*batch.image.shape[1:])
        share = kept(times)
        noisy = share.sqrt() * batch.image + (1 - share).sqrt() * noise
        return (networks.model(noisy, times) - noise).square().mean((1, 2, 3)), {}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        return self.losses(networks, batch, "train")[0]

    def pictures(self, networks: Any) -> dict[str, Any]:
        device = next(networks.parameters()).device
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(16, 1, 16, 16, generator=draw).to(device)
        for time in reversed(range(TIMES)):
            times = torch.full((16,), time, device=device)
            noise, beta = networks.model(images, times).float(), BETAS[time]
            images = (images - beta / (1 - kept(times)).sqrt() * noise) / (1 - beta) ** 0.5
            if time:
                images += beta**0.5 * torch.randn(images.shape, generator=draw).to(device)
        grid = make_grid(images.cpu(), nrow=4, normalize=True)
        return {"samples": (grid.permute(1, 2, 0) * 255).byte().numpy()}
