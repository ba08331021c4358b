"""Cross entropy with a polynomial term: Poly-1 (Leng et al. 2022, arXiv:2204.12511).

    cp examples/poly.py src/train/
    python train.py train.loss=src.train.poly.PolyLoss +train.loss_kwargs.epsilon=2

`reads` declares which options of `train` the loss reads.
"""

from torch import Tensor, nn
from torch.nn import functional


class PolyLoss(nn.Module):
    """`epsilon`: weight of the polynomial term."""

    reads = ("smoothing", "mixup")

    def __init__(self, epsilon: float = 1.0, smoothing: float = 0.0) -> None:
        super().__init__()
        self.epsilon, self.smoothing = epsilon, smoothing

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=self.smoothing
        )
        return losses + self.epsilon * (1 - (-losses).exp())
