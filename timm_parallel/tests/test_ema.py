"""Test of averaged weights, which the key model.ema switches on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from timm_parallel.parallel.networks import build_ema


def test_ema_weights_equal_those_of_timm_and_no_step_calls_state_dict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    ours = build_ema(model, 0.9, warmup=False)
    assert ours is not None
    theirs = ModelEmaV3(model, decay=0.9)
    calls: Counter[str] = Counter()
    listed = nn.Module.state_dict

    def state_dict(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        calls["state_dict"] += 1
        return listed(self, *arguments, **named)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        # Load weights into the model between two steps, as a resumed run does.
        if step == 4:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        model(torch.randn(8, 3, 3, 3)).square().sum().backward()
        optimizer.step()
        theirs.update(model, step)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "state_dict", state_dict)
            ours.update(model, step)
        for own, other in zip(
            ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True
        ):
            assert torch.equal(own, other)
    assert calls["state_dict"] <= 2 * sum(1 for _ in model.modules())
