"""Training function of the small project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from small.checks import IMAGES
from timm_parallel.machine.process import import_name
from timm_parallel.machine.ranks import Ranks
from timm_parallel.project import current
from timm_parallel.record.result import Result, write_result


def fit(config: Any, folder: Path, ranks: Ranks, store: Any) -> None:
    """Fit a linear model to points on a line with gradient descent. Rank 0 writes result.json. All
    ranks must call this function.
    """
    torch.manual_seed(config.seed)
    strategy = import_name(current().strategies[config.parallel.strategy])(
        config.parallel, ranks, store
    )
    model = nn.Linear(1, 1)
    wrapped = strategy.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optim.lr)
    points = torch.linspace(-1, 1, IMAGES)[:, None]
    mine = points[ranks.rank :: ranks.world_size]
    loss = torch.zeros(())
    for _ in range(config.train.max_steps):
        optimizer.zero_grad()
        loss = (wrapped(mine) - config.data.slope * mine).square().mean()
        loss.backward()
        optimizer.step()
    mean = strategy.group.sum(loss.detach()[None]).item() / ranks.world_size
    if ranks.is_first:
        # Write the loss into the field val, because a hyper-parameter search reads its metric from
        # this field.
        result = Result(
            status="done",
            strategy=config.parallel.strategy,
            devices=config.parallel.devices,
            world_size=ranks.world_size,
            steps=config.train.max_steps,
            val={"loss": mean, "loss_best": mean},
            objective=mean,
        )
        write_result(folder, result)
    strategy.group.close()
