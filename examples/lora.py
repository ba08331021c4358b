r"""LoRA (Hu et al. 2021, arXiv:2106.09685): a trained ViT stays as it is. Only two small matrices
next to each linear layer of the attention, and the head, are trained.

    cp examples/lora.py src/models/ && cp examples/lora.yaml conf/experiment/
    python train.py model=tiny optim.lr=0.003 train.epochs=30 data.augment.vflip=1 \
        hydra.run.dir=outputs/base
    python train.py experiment=lora model.weights=outputs/base/checkpoints/last.pt \
        model.weights_strict=false

The first command trains on digits that are upside down; its val/acc for upright ones is 0.37. The
second trains 4 % of the parameters, and reaches 0.72 in 12 seconds of CPU time. The file has no
adapters, so model.weights_strict=false. Checkpoints of the second run have the whole model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear

from timm_parallel import head_names


class LoraLinear(nn.Linear):
    """A linear layer plus the product of two matrices. Its weight and bias keep their names, so
    that checkpoints of the layer without adapters fit.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        # With zeros, training starts from the outputs of the trained model.
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + linear(linear(inputs, self.lora_a), self.lora_b)


class LoraVit(VisionTransformer):
    """A ViT of timm, of which only adapters and head are trained."""

    def __init__(self, num_classes: int, in_chans: int, rank: int = 4, **kwargs: Any) -> None:
        super().__init__(num_classes=num_classes, in_chans=in_chans, **kwargs)
        layers = {
            name: module
            for name, module in self.named_modules()
            if ".attn." in name and isinstance(module, nn.Linear)
        }
        for name, layer in layers.items():
            self.set_submodule(name, LoraLinear(layer, rank))
        head = head_names(self)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in head or "lora_" in name)
