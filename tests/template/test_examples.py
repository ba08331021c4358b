"""Each example trains alike under single, ddp and fsdp, with accumulation, and after a resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import src.tasks
from timm_parallel.checked_configs import check_config
from timm_parallel.config.compose import compose_command
from timm_parallel.config.resolve import resolve
from timm_parallel.launch.job import prepare
from timm_parallel.state import checkpoint
from timm_parallel.testing.commands import ROOT
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import warm_ranks

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
COMMON = (
    "print_config=false",
    "parallel.threads_per_device=1",
    "data.batch_size=24",
    "data.limit_train=144",
    "train.epochs=2",
    "train.max_steps=8",
    "train.log_every=2",
    "checkpoint.every_steps=4",
    "checkpoint.keep=9",
    "optim.warmup_epochs=0",
    "tracker=none",
)
SPREADS = {
    "single": ("parallel=single",),
    "ddp2": ("parallel=ddp", "parallel.devices=2"),
    "ddp3": ("parallel=ddp", "parallel.devices=3"),
    "fsdp2": ("parallel=fsdp", "parallel.devices=2"),
    "accumulated": ("parallel=single", "data.batch_size=12", "train.accumulate=2"),
    "ddp2_accumulated": (
        "parallel=ddp",
        "parallel.devices=2",
        "data.batch_size=12",
        "train.accumulate=2",
    ),
    "fsdp2_accumulated": (
        "parallel=fsdp",
        "parallel.devices=2",
        "data.batch_size=12",
        "train.accumulate=2",
    ),
}
# Module that lets a process import the examples as files of src/tasks/.
IMPORT = f"import src.tasks\nsrc.tasks.__path__.append({str(EXAMPLES)!r})\n"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function `(example, spread, folder) -> folder` that trains an example."""
    base = tmp_path_factory.mktemp("examples")
    src.tasks.__path__.append(str(EXAMPLES))
    (base / "first.py").write_text(IMPORT, encoding="utf-8")
    options = base / "conf" / "experiment"
    options.mkdir(parents=True)
    for path in EXAMPLES.glob("*.yaml"):
        shutil.copy(path, options)

    def get(example: str, spread: str, folder: Path | None = None) -> Path:
        at = folder or base / f"{example}_{spread}"
        if folder is None and at.exists():
            return at
        at.mkdir(exist_ok=True)
        words = [f"experiment={example}", *COMMON, *SPREADS[spread]]
        given = parse(*words, "--config-dir", str(base / "conf"))
        config: Any = compose_command(given).config
        # With SGD, rounding errors stay small. AdamW divides gradients that are near 0.
        config.optim.opt, config.optim.lr, config.optim.kwargs = "sgd", 0.01, {}
        config.optim.of = {phase: {"lr": 0.02} for phase in config.optim.of}
        check_config(config)
        config = resolve(config)
        prepare(config, at)
        ended = warm_ranks(config, at, first=base / "first.py")
        assert not ended.exit_codes, (at / "console.txt").read_text(encoding="utf-8")
        return at

    return get


def weights_of(folder: Path, name: str = "last") -> dict[str, Tensor]:
    contents = checkpoint.load(folder / "checkpoints" / f"{name}.pt")
    parts = {"model": contents["model"], **contents["networks"], **contents["averages"]}
    return {
        f"{part}.{key}": tensor.double()
        for part, tensors in parts.items()
        for key, tensor in tensors.items()
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights."""
    assert first.keys() == second.keys()
    squares = sum(float((first[name] - second[name]).square().sum()) for name in first)
    return float((squares / sum(float(of.square().sum()) for of in first.values())) ** 0.5)


@pytest.mark.parametrize("spread", [name for name in SPREADS if name != "single"])
@pytest.mark.parametrize("example", NAMES)
def test_example_trains_alike(train: Any, example: str, spread: str) -> None:
    # The negatives of SimCLR are those of a batch, so it differs with accumulation.
    is_accumulated = example == "simclr" and "accumulated" in spread
    single = weights_of(train(example, "accumulated" if is_accumulated else "single"))
    assert difference(single, weights_of(train(example, spread))) <= 1e-6


@pytest.mark.parametrize("example", NAMES)
def test_example_resumes_exactly(train: Any, example: str, tmp_path: Path) -> None:
    whole = train(example, "single")
    folder = tmp_path / "resumed"
    (folder / "checkpoints").mkdir(parents=True)
    for suffix in (".pt", ".json"):
        for name in ("step_4", "last"):
            shutil.copy(
                whole / "checkpoints" / f"step_4{suffix}",
                folder / "checkpoints" / f"{name}{suffix}",
            )
    train(example, "single", folder)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(folder)[name]), name
