"""`model.compile`: compiled steps train like uncompiled ones, in each of torch's modes and under each strategy with ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_ranks, resolved
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import get_cpp_compiler

from src.engine.machine.ranks import Ranks
from src.engine.runtime import checkpoint
from src.models.build import compile_model
from src.schema import COMPILE_MODES
from src.train.run import Trainer

CPU = torch.device("cpu")
SPREADS = {"single": ("parallel=single",), "ddp": ("parallel=ddp", "parallel.devices=2")}
COMMON = ("data.batch_size=8", "train.max_steps=3", "model.ema.decay=0.9", "optim=sgd", "optim.lr=0.005")
Record = Callable[..., nn.Module]


def has_compiler() -> bool:
    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def train(ranks: Ranks, store: Any, folder: str, overrides: tuple[str, ...], cache: str) -> int:
    """Train in this process, and return the number of graphs that torch compiled."""
    from torch._dynamo.utils import counters

    # A warm rank's environment is that of its server.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    Trainer(resolved(*COMMON, *overrides), Path(folder), ranks, store).train()
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow(seconds=40)
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("spread", SPREADS)
def test_compiled_training_matches_uncompiled_training(tmp_path: Path, spread: str) -> None:
    """Weights and averaged weights keep their names and agree up to rounding: a compiled kernel adds in another order."""
    contents = {}
    for mode in ("false", "true"):
        folder = tmp_path / mode
        folder.mkdir()
        overrides = (*SPREADS[spread], f"model.compile={mode}")
        world_size = resolved(*overrides).parallel.devices
        graphs = in_ranks(train, world_size, str(folder), overrides, str(tmp_path / "cache"), timeout=500)
        assert all(count > 0 for count in graphs) == (mode == "true")
        contents[mode] = checkpoint.load(folder / "checkpoints" / "last.pt")
    for part in ("model", "ema"):
        eager, compiled = contents["false"][part], contents["true"][part]
        assert list(compiled) == list(eager)
        for name, tensor in eager.items():
            torch.testing.assert_close(compiled[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{part} {name}")


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_compile_mode_is_passed_to_torch(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    given: list[Any] = []

    def record(model: nn.Module, **options: Any) -> nn.Module:
        given.append(options)
        return model

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    model = nn.Linear(2, 2)
    assert compile_model(model, False, CPU) is model and given == []
    compile_model(model, resolved(f"model.compile={mode}").model.compile, CPU)
    compile_model(model, resolved("model.compile=true").model.compile, CPU)
    assert given == [{"mode": mode}, {"mode": None}]


def test_torch_knows_every_compile_mode() -> None:
    """`default` is torch's name for no mode; the others are sets of options of its compiler."""
    assert set(COMPILE_MODES) <= set(torch._inductor.list_mode_options())


def test_compile_is_refused_on_cpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("no_such_compiler",))
    with pytest.raises(ValueError, match=r"^model\.compile=max-autotune: needs a C\+\+ compiler .* install g\+\+"):
        compile_model(nn.Linear(2, 2), "max-autotune", CPU)
    assert isinstance(compile_model(nn.Linear(2, 2), "max-autotune", torch.device("cuda")), nn.Module)
