"""Model of the small project. No layer mixes the images of a batch, so that the outputs do not
depend on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from small.data import SIDE


class Tiny(nn.Module):
    """Convolution and linear layer, from images [B, 3, SIDE, SIDE] to numbers [B, outputs]."""

    def __init__(self, outputs: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, width, 3, padding=1)
        self.features = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(width * SIDE * SIDE, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]
