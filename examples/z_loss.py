"""Classification with z-loss (Chowdhery et al. 2022, arXiv:2204.02311), which keeps scores small.

    cp examples/z_loss.py src/tasks/
    python train.py train.task=src.tasks.z_loss.ZLoss model=tiny

The log has the term as train/z_loss, and train/loss is the sum. val/loss stays the loss of the
predictions.
"""

from typing import Any

from torch import Tensor

from src.tasks.classification import Classification
from timm_parallel import Batch


class ZLoss(Classification):
    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        targets = batch.target.to(outputs.device)
        z_losses = outputs.logsumexp(1).square()
        # The loss that train.loss names is a function, or a module.
        criterion = self.criterion or networks.loss
        numbers = self.train_numbers(outputs.detach()[:, : self.num_outputs], targets)
        numbers["z_loss"] = z_losses.detach()
        return criterion(outputs, targets) + 1e-4 * z_losses, numbers
