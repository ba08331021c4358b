"""Example of a test of your own model: the one of conf/experiment/mine.yaml."""

from __future__ import annotations

from typing import Any


def test_model_has_an_output_per_name_and_a_gradient_for_every_parameter(mine: Any) -> None:
    model, batch = mine.state.model, next(mine.train_loader.epoch(0))
    outputs = model(batch.image)
    assert outputs.shape == (len(batch), mine.task.num_outputs)
    outputs.square().sum().backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert [name for name, each in trained.items() if each.grad is None] == []
