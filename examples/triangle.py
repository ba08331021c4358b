"""A triangle of learning rates (Smith 2017, arXiv:1506.01186).

    cp examples/triangle.py src/train/
    python train.py optim.sched=src.train.triangle.Triangle optim.lr=2e-3

A rate is a function of the step, so checkpoints have no state of this schedule.
"""

import numpy as np
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

from src.schema import OptimConfig


class Triangle(Scheduler):
    """Straight lines from optim.warmup_lr to the peak at half of the steps, and down to
    optim.min_lr.
    """

    def __init__(self, optimizer: Optimizer, config: OptimConfig, steps: int) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.steps, self.first, self.last = steps, config.warmup_lr, config.min_lr
        self.step_update(0)

    def _get_lr(self, t: int) -> list[float]:
        corners = (0, self.steps / 2, self.steps)
        return [
            float(np.interp(t, corners, (self.first, peak, self.last))) for peak in self.base_values
        ]
