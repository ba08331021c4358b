"""Example of a model of your own, which timm does not have:
`model.name=src.models.cifar_resnet.CifarResNet18`.
"""

from __future__ import annotations

from typing import Any

import timm
from torch import Tensor, nn


class CifarResNet18(nn.Module):
    """timm's ResNet-18 with the stem of the networks for CIFAR (He et al. 2015, arXiv:1512.03385,
    section 4.2).

    The stem is one 3x3 convolution without stride or pooling, so the first block gets 32x32 images
    in full resolution.
    """

    def __init__(self, num_classes: int, in_chans: int, **kwargs: Any) -> None:
        super().__init__()
        self.resnet: Any = timm.create_model(
            "resnet18", num_classes=num_classes, in_chans=in_chans, **kwargs
        )
        self.resnet.conv1 = nn.Conv2d(in_chans, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.resnet.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.resnet.maxpool = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores [B, num_classes] from images [B, in_chans, H, W]."""
        scores: Tensor = self.resnet(images)
        return scores
