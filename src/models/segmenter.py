"""Segmentation model: a decoder on any backbone of timm, `model=segmenter
model.kwargs.backbone=resnet50`.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import Format
from torch import Tensor, nn
from torch.nn import functional


class Segmenter(nn.Module):
    """Segmentation model with a feature pyramid (Lin et al. 2017, arXiv:1612.03144). It resizes the
    features of all depths to the largest of their sizes, adds them, and computes scores for each
    pixel.
    """

    # With this attribute, build_model passes `pretrained`, so model.pretrained=true loads the
    # weights of the backbone.
    has_pretrained = True

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        backbone: str = "resnet18",
        width: int = 64,
        pretrained: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build the backbone and the decoder. `width`: channels of the decoder. `kwargs`: more
        arguments of `timm.create_model`.
        """
        super().__init__()
        if not timm.is_model(backbone):
            raise ValueError(
                f"model.kwargs.backbone={backbone}: not a model of timm; python train.py "
                "model.name=<name> suggests similar names"
            )
        backbone_model: Any = timm.create_model(
            backbone, features_only=True, in_chans=in_chans, pretrained=pretrained, **kwargs
        )
        self.backbone = backbone_model
        # Some backbones, such as Swin, return features [B, H, W, C].
        self.channels_are_last = getattr(backbone_model, "output_fmt", None) == Format.NHWC
        config = timm.get_pretrained_cfg(backbone)
        # Preprocessing reads the mean and std of timm's weights from this attribute.
        self.pretrained_cfg: dict[str, Any] = {} if config is None else config.to_dict()
        channels = backbone_model.feature_info.channels()
        self.laterals = nn.ModuleList(nn.Conv2d(count, width, 1) for count in channels)
        self.smooth = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.head = nn.Conv2d(width, num_classes, 1)

    def get_classifier(self) -> list[nn.Module]:
        """Return the modules of the decoder, which start from random weights. model.freeze=backbone
        trains only these modules.
        """
        return [self.laterals, self.smooth, self.head]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        backbone: Any = self.backbone
        # For a ViT, timm returns a wrapper without set_grad_checkpointing. The attribute `model` of
        # this wrapper has the method.
        getattr(backbone, "model", backbone).set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores [B, num_classes, H, W] from images [B, in_chans, H, W]."""
        features = self.backbone(images)
        if self.channels_are_last:
            features = [maps.permute(0, 3, 1, 2) for maps in features]
        merged = self.laterals[-1](features[-1])
        for lateral, finer in zip(reversed(self.laterals[:-1]), features[-2::-1], strict=True):
            merged = lateral(finer) + _resized(merged, finer.shape[2:])
        return _resized(self.head(self.smooth(merged)), images.shape[2:])


def _resized(maps: Tensor, size: torch.Size) -> Tensor:
    return functional.interpolate(maps, size=size, mode="bilinear", align_corners=False)
