"""Base class of tasks whose targets do not change when an image is cropped or flipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from src.schema import ResolvedConfig
from timm_parallel import Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

    from src.data.transforms import Preprocessing
    from timm_parallel import InMemory

# A loss function: computes the mean loss from outputs [B, …] and targets [B, …].
Criterion = Callable[["Tensor", "Tensor"], "Tensor"]


class ImageTask(Task[ResolvedConfig]):
    """Base class of tasks that augment and prepare images as timm does. Transforms leave the
    targets as they are.
    """

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        from src.data.transforms import OnImage, train_transform

        return OnImage.of(train_transform(self.config.data.augment, size, resize, mean))

    def evaluation_transform(self, preprocessing: Preprocessing) -> Any:
        from src.data.transforms import OnImage, evaluation_transform

        return OnImage(evaluation_transform(preprocessing))

    def batch_augmentation(self, rows: InMemory | None, size: tuple[int, int]) -> Any:
        from src.data.transforms import batch_step

        # A task with its own transform of single images must not lose it.
        if type(self).train_transform is not ImageTask.train_transform:
            return None
        return batch_step(self.config.data.augment, rows, size)


def total_loss(scores: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    """Return the sum of the losses of all images."""
    return losses.sum()


def per_image(total: Tensor, samples: int) -> float:
    """Divide a sum over images by the number of images."""
    return float(total.item()) / samples


LOSS = Metric(total_loss, per_image, lower_is_better=True)
