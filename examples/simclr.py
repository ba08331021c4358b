"""SimCLR (Chen et al. 2020, arXiv:2002.05709) with the negatives of all ranks: the loss of a view
compares it with all other views of the batch, wherever they were computed.

    cp examples/simclr.py src/tasks/ && cp examples/simclr.yaml conf/experiment/
    python train.py experiment=simclr

`ranks.gather_rows` carries gradients, so two devices train as one device with the whole batch. With
train.accumulate, a view is compared with those of its own batch only. val/found is 0.12 after 50
seconds of CPU time; chance is below 0.01.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torchvision.transforms import v2

from src.tasks.images import ImageTask
from timm_parallel import Batch, Metric, to_double

TEMPERATURE = 0.2


class TwoViews:
    """Returns two augmented views of an image, [2, C, H, W]."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.augment = v2.Compose(
            [v2.RandomResizedCrop(size, (0.4, 1.0)), v2.RandomAffine(15, (0.1, 0.1))]
        )

    def __call__(self, image: Tensor, target: Any) -> tuple[Tensor, Any]:
        return torch.stack([self.augment(image), self.augment(image)]), target


def contrast(features: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each image of a rank [B], and whether its views find each other.
    `features` [N, 2, D]: those of all ranks; image i belongs to the rank i % ranks.
    """
    views = normalize(features, dim=-1).transpose(0, 1).flatten(0, 1)
    images = len(features)
    own = torch.arange(rank, images, ranks, device=views.device)
    rows = torch.cat([own, own + images])
    scores = (views[rows] @ views.T / TEMPERATURE).scatter(1, rows[:, None], float("-inf"))
    partners = (rows + images) % (2 * images)
    found = (scores.argmax(1) == partners).float()
    losses = cross_entropy(scores, partners, reduction="none")
    return losses.view(2, -1).mean(0), found.view(2, -1).mean(0)


def found_sum(task: Any, found: Tensor, batch: Batch) -> Tensor:
    return to_double(found).sum()


class SimClr(ImageTask):
    """Images of any labels; the model has as many outputs as the data has classes."""

    target = "none"
    phases = {"train": ("model", "projector")}
    metrics = {
        # Share of views that are nearest to the other view of their image, in a batch of a rank.
        "found": Metric(found_sum, lambda total, samples: float(total) / samples)
    }
    headline = "found"

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        width = self.num_outputs
        projector = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32))
        return {"model": model, "projector": projector}

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        return TwoViews(size)

    def evaluation_transform(self, preprocessing: Any) -> Any:
        return TwoViews(preprocessing.input_size[1:])

    def features(self, networks: Any, batch: Batch) -> Tensor:
        projected: Tensor = networks.projector(networks.model(batch.image.flatten(0, 1)))
        return projected.unflatten(0, (-1, 2))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.ranks.gather_rows(self.features(networks, batch))
        losses, found = contrast(features, self.ranks.rank, self.ranks.world_size)
        return losses, {"found": found}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        # predict.py gives one view of each image: return the features.
        if batch.image.dim() == 4:
            features: Tensor = networks.model(batch.image)
            return features
        return contrast(self.features(networks, batch), 0, 1)[1]
