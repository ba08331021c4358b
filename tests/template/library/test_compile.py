"""Tests of model.compile."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from src.schema import COMPILE_MODES
from tests.template.runs import resolved, train_run
from timm_parallel.machine.ranks import Ranks
from timm_parallel.model.checks import compile_model
from timm_parallel.state import checkpoint
from timm_parallel.testing.ranks import in_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPREADS = {"single": ("parallel=single",), "ddp": ("parallel=ddp", "parallel.devices=2")}
COMMON = (
    "data.batch_size=8",
    "train.max_steps=3",
    "model.ema.decay=0.9",
    "optim=sgd",
    "optim.lr=0.005",
)


def has_compiler() -> bool:
    # Import inside the function, because this import takes several seconds.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def train(ranks: Ranks, store: Any, folder: str, overrides: tuple[str, ...], cache: str) -> int:
    """Train in this rank, and return the number of graphs that torch.compile has compiled."""
    from torch._dynamo.utils import counters

    # Set the variable in the rank, because a forked rank has the environment variables of the fork
    # server, not those of the test.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    train_run(resolved(*COMMON, *overrides), Path(folder), ranks, store)
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for compiled kernels that all strategies share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.nightly
@pytest.mark.sample(2)
@pytest.mark.slow(seconds=50)
@pytest.mark.parametrize("spread", SPREADS)
def test_compiled_training_matches_uncompiled_training(
    tmp_path: Path, cache: Path, spread: str
) -> None:
    """Weights and averaged weights have equal names. Their values agree up to rounding, because a
    compiled kernel adds numbers in another order.
    """
    if not has_compiler():
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    contents = {}
    for mode in ("false", "true"):
        folder = tmp_path / mode
        folder.mkdir()
        overrides = (*SPREADS[spread], f"model.compile={mode}")
        world_size = resolved(*overrides).parallel.devices
        graphs = in_ranks(train, world_size, str(folder), overrides, str(cache), timeout=600)
        assert all(count > 0 for count in graphs) == (mode == "true")
        contents[mode] = checkpoint.load(folder / "checkpoints" / "last.pt")
    of_modes = {
        mode: {"model": saved["model"], **saved["averages"]} for mode, saved in contents.items()
    }
    for part in ("model", "ema"):
        eager, compiled = of_modes["false"][part], of_modes["true"][part]
        assert list(compiled) == list(eager)
        for name, tensor in eager.items():
            torch.testing.assert_close(
                compiled[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{part} {name}"
            )


@pytest.mark.slow(seconds=1)
def test_model_compile_mode_is_passed_to_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def record(model: nn.Module, **options: Any) -> nn.Module:
        given.append(options)
        return model

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    model = nn.Linear(2, 2)
    assert compile_model(model, False, CUDA) is model and given == []
    for mode in ("true", *COMPILE_MODES):
        compile_model(model, resolved(f"model.compile={mode}").model.compile, CUDA)
    assert given == [{"mode": None}, *({"mode": mode} for mode in COMPILE_MODES)]


def test_torch_compile_supports_every_value_of_model_compile() -> None:
    assert set(COMPILE_MODES) <= set(torch._inductor.list_mode_options())


def test_compile_is_refused_on_cpu_without_a_compiler() -> None:
    from torch._inductor import config as inductor

    # Do not use monkeypatch here. It would delete the option when it restores the old value, and
    # later tests would not find the option.
    with (
        inductor.patch({"cpp.cxx": ("no_such_compiler",)}),
        pytest.raises(
            ValueError,
            match=r"^model\.compile=max-autotune: needs a C\+\+ compiler .* install g\+\+",
        ),
    ):
        compile_model(nn.Linear(2, 2), "max-autotune", CPU)


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("variable", "present", "is_refused"),
    [
        (None, (), True),
        (None, ("gcc",), False),
        (None, ("clang",), False),
        ("icx", ("gcc",), True),
        ("icx", ("icx",), False),
    ],
)
def test_compile_is_refused_on_a_gpu_without_a_c_compiler(
    variable: str | None,
    present: tuple[str, ...],
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in present else None)
    with (
        pytest.raises(ValueError, match=r"^model\.compile=true: ") if is_refused else nullcontext()
    ):
        assert isinstance(compile_model(nn.Linear(2, 2), True, CUDA), nn.Module)
