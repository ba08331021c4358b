r"""ArcFace (Deng et al. 2019, arXiv:1801.07698) next to cross entropy: a loss with parameters, a
center for each class.

    cp examples/arcface.py src/train/
    python train.py train.loss=src.train.arcface.ArcFace +train.loss_kwargs.classes=10 \
        +train.loss_kwargs.size=64 model.num_classes=74

The first outputs of the model are scores, the others an embedding, which is compared with the
centers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ArcFace(nn.Module):
    """`classes`: number of scores; `size`: of the embedding. `margin` in radians."""

    def __init__(self, classes: int, size: int, margin: float = 0.3, scale: float = 16.0) -> None:
        super().__init__()
        self.classes, self.margin, self.scale = classes, margin, scale
        self.centers = nn.Parameter(torch.randn(classes, size))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores, embeddings = outputs[:, : self.classes], outputs[:, self.classes :]
        cosines = functional.normalize(embeddings) @ functional.normalize(self.centers).T
        # The derivative of acos is infinite at 1.
        angles = cosines.clamp(-0.9999, 0.9999).acos()
        margins = self.margin * functional.one_hot(targets, self.classes)
        with_margins = self.scale * (angles + margins).cos()
        losses = functional.cross_entropy(scores, targets, reduction="none")
        return losses + functional.cross_entropy(with_margins, targets, reduction="none")
