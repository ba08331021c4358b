"""Distillation (Hinton et al. 2015, arXiv:1503.02531): a classifier also imitates the scores of a
trained teacher, which stays as it is.

    cp examples/distillation.py src/tasks/ && cp examples/distillation.yaml conf/experiment/
    python train.py model=tiny optim.lr=0.003 train.epochs=30 hydra.run.dir=outputs/teacher
    python train.py experiment=distillation

Each run takes 25 seconds of CPU time. train/imitation, the divergence from the teacher, falls from
1.3 to 0.04. Teacher and student have the same size and reach the same val/acc, 0.94.

Checkpoints have the teacher too, but evaluate.py and predict.py need its folder, which says how to
build it. An export has the student alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from src.commands.load import load_trained
from src.tasks.classification import Classification
from timm_parallel import Batch, key


@dataclass
class DistillationOptions:
    """Keys of train.task_kwargs."""

    teacher: str = key("", help="Run folder of the teacher.")
    share: float = key(0.5, ge=0, le=1, help="Share of the teacher in the loss.")
    temperature: float = key(2.0, gt=0, help="Divides the scores of both models.")


class Distillation(Classification):
    """Classification with the help of a teacher, which sees the same images as the student. So
    both runs need the same data.mean and data.std.
    """

    Options: ClassVar[type[Any]] = DistillationOptions

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        folder = self.options.teacher
        if not Path(folder, "result.json").is_file():
            raise ValueError(
                f"train.task_kwargs.teacher={folder}: expected the folder of a finished run; "
                "train a teacher first, and give its run folder"
            )
        trained = load_trained(Path(folder))
        if trained.task.names != self.names:
            raise ValueError(
                f"train.task_kwargs.teacher={folder}: its classes are not those of the data; use "
                "a teacher that was trained on the same classes"
            )
        # A network without trainable parameters stays in evaluation mode.
        teacher = trained.model.requires_grad_(False)
        return {**super().networks(model), "teacher": teacher}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        with torch.no_grad():
            taught = networks.teacher(batch.image)
        temperature, share = self.options.temperature, self.options.share
        scores = (outputs / temperature).log_softmax(1)
        taught = (taught / temperature).log_softmax(1)
        imitation = kl_div(scores, taught, reduction="none", log_target=True).sum(1)
        criterion = self.criterion or networks.loss
        losses = (1 - share) * criterion(outputs, batch.target) + share * temperature**2 * imitation
        numbers = self.train_numbers(outputs.detach()[:, : self.num_outputs], batch.target)
        return losses, {**numbers, "imitation": imitation.detach()}
