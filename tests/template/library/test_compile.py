"""Tests of model.compile."""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from src.schema import COMPILE_MODES
from tests.template.runs import resolved, train_run
from timm_parallel.machine.ranks import Ranks
from timm_parallel.model.checks import compile_model
from timm_parallel.run import checkpoint
from timm_parallel.testing.ranks import in_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COMMON = (
    "data.batch_size=8",
    "model.kwargs.depth=1",
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


def train(ranks: Ranks, store: Any, folder: str, backend: str, *overrides: str) -> bool:
    """Train a run, and resume it if it has one rank. Return True if torch has compiled graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        for steps in (2, 4) if ranks.world_size == 1 else (4,):
            config = resolved(*COMMON, *overrides, f"train.max_steps={steps}")
            train_run(config, Path(folder), ranks, store)
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        # This backend differs from inductor, the default, only in that it writes no C++ code.
        ("single", "aot_eager"),
        pytest.param("ddp", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_training_with_a_resume_matches_uncompiled_training(
    tmp_path: Path, strategy: str, backend: str
) -> None:
    """Weights and averaged weights have equal names. Their values agree up to rounding, because a
    compiled kernel adds numbers in another order.
    """
    if not has_compiler():
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    devices = 2 if strategy == "ddp" else 1
    of_modes = []
    for mode in ("false", "true"):
        folder = tmp_path / mode
        folder.mkdir()
        words = (f"parallel={strategy}", f"parallel.devices={devices}", f"model.compile={mode}")
        compiled = in_ranks(train, devices, str(folder), backend, *words, timeout=600)
        assert compiled == [mode == "true"] * devices
        saved = checkpoint.load(folder / "checkpoints" / "last.pt")
        assert saved["progress"]["step"] == 4
        of_modes.append({"model": saved["model"], **saved["averages"]})
    for part in ("model", "ema"):
        eager, compiled_part = (of_mode[part] for of_mode in of_modes)
        assert list(compiled_part) == list(eager)
        for name, tensor in eager.items():
            torch.testing.assert_close(
                compiled_part[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{part} {name}"
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
