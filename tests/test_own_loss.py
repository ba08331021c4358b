"""Example of tests of your own loss: the one of conf/experiment/mine.yaml."""

from __future__ import annotations

from typing import Any

import torch

from timm_parallel import Batch


def mean_loss(mine: Any, batch: Batch) -> torch.Tensor:
    (phase,) = mine.task.phases
    losses, _ = mine.task.losses(mine.state.networks, batch, phase)
    return losses.mean()


def test_loss_of_a_batch_is_the_mean_over_its_halves(mine: Any) -> None:
    # In evaluation mode, the output for an image does not depend on the other images.
    mine.state.networks.eval()
    batch = next(mine.train_loader.epoch(0))
    half = len(batch) // 2
    halves = [
        Batch({name: field[part] for name, field in batch.fields.items()})
        for part in (slice(half), slice(half, None))
    ]
    mean = torch.stack([mean_loss(mine, each) for each in halves]).mean()
    torch.testing.assert_close(mean_loss(mine, batch), mean)


def test_loss_of_a_batch_falls_when_the_model_trains_on_it(mine: Any) -> None:
    batch = next(mine.train_loader.epoch(0))
    optimizer = torch.optim.Adam(mine.state.parameters(), lr=3e-3)
    values = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = mean_loss(mine, batch)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.5 * values[0]
