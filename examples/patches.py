"""A small network over patches, as an example of an own model.

    cp examples/patches.py src/models/
    python train.py model.name=src.models.patches.Patches +model.kwargs.width=64

conf/model/patches.yaml with `name` and `kwargs` turns this into `model=patches`.
"""

from torch import Tensor, nn


class Patches(nn.Module):
    def __init__(self, num_classes: int, in_chans: int, width: int, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, width, 4, stride=4)
        self.blocks = nn.Sequential(*(self._block(width) for _ in range(depth)))
        self.head = nn.Linear(width, num_classes)

    def _block(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, in_chans, H, W] to scores [B, num_classes]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
