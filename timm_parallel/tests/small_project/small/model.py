"""Model of the small project. No layer mixes the images of a batch, so that the outputs do not
depend on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from small.data import SIDE


class Tiny(nn.Module):
    """Convolution and linear layer, from images [B, 3, SIDE, SIDE] to numbers [B, outputs]."""

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * SIDE * SIDE, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]
