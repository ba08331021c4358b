"""The bill for a fork: how many files a model, a dataset, a loss, a metric or a strategy of one's own touches. Each trains.

All are added to one scratch copy, one after the other; then one run uses them all: FSDP2 over two gloo ranks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_lines, tiny

ROOT = Path(__file__).resolve().parents[1]
ADDITIONS = Path(__file__).parent / "additions"

MODEL = """
from torch import Tensor, nn

class Patches(nn.Module):
    def __init__(self, num_classes: int, in_chans: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_chans, width, 4, 4), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
"""
DATASET = """
import torch
from src.data.datasets import InMemory
from src.schema import DataConfig

class Stripes:
    def __init__(self, config: DataConfig, count: int) -> None:
        self.class_names, self.in_chans, self.image_size = list("abcdefg"), 1, 16
        self.mean, self.std = (0.5,), (0.25,)
        labels = torch.arange(count) % 7
        images = (torch.arange(16) * (labels[:, None] + 1) * 16 % 256).to(torch.uint8)
        images = images[:, None, None].expand(-1, 1, 16, 16).contiguous()
        self.train = InMemory(images, labels)
        self.val, self.test = InMemory(images[:45], labels[:45]), None
"""


def write(path: Path, text: str) -> None:
    assert not path.exists()
    path.write_text(text, encoding="utf-8")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def add_model(copy: Path) -> None:
    write(copy / "src/models/patches.py", MODEL)
    write(copy / "conf/model/patches.yaml", "name: src.models.patches.Patches\nkwargs: {width: 8}\n")


def add_dataset(copy: Path) -> None:
    write(copy / "src/data/stripes.py", DATASET)
    write(copy / "conf/data/stripes.yaml", "name: src.data.stripes.Stripes\nbatch_size: 32\nkwargs: {count: 128}\n")


def add_loss(copy: Path) -> None:
    path = copy / "src/training/objective.py"
    edit(path, 'LOSSES = {"ce"', 'LOSSES = {"margin": lambda config, augment: nn.MultiMarginLoss(), "ce"')


def add_metric(copy: Path) -> None:
    path = copy / "src/training/metrics.py"
    edit(path, '"acc5": self.acc5}', '"acc5": self.acc5, "error": 1 - self.acc}')
    edit(path, 'LOWER_IS_BETTER = ("loss",)', 'LOWER_IS_BETTER = ("loss", "error")')


def add_strategy(copy: Path) -> None:
    shutil.copy(ADDITIONS / "fsdp2.py", copy / "src/parallel/fsdp2.py")
    text = (
        "strategy: src.parallel.fsdp2.FullyShard\nprocess_per_device: true\noptions: {reshard_after_forward: false}\n"
    )
    write(copy / "conf/parallel/fsdp2.yaml", text)


BILL: dict[Callable[[Path], None], int] = {add_model: 2, add_dataset: 2, add_loss: 1, add_metric: 1, add_strategy: 2}


def contents(copy: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what runs, with everything added; `bill.json` in it says how many files each addition touched."""
    copy, touched = tmp_path_factory.mktemp("fork"), {}
    shutil.copy(ROOT / "train.py", copy)
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "local"))
    for add in BILL:
        before = contents(copy)
        add(copy)
        touched[add.__name__] = sum(before.get(path) != text for path, text in contents(copy).items())
    (copy / "bill.json").write_text(json.dumps(touched))
    return copy


def train(copy: Path, *words: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", *(words if words[0].startswith("resume=") else tiny(*words))]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=timeout, check=False)


def test_the_bill_is_true(scratch: Path) -> None:
    assert json.loads((scratch / "bill.json").read_text()) == {add.__name__: count for add, count in BILL.items()}


ADDED = (
    "model=patches",
    "data=stripes",
    "train.loss=margin",
    "checkpoint.metric=val/error_ema",
    "data.limit_train=null",
)
BUSY = ("optimized_metric=val/error", "model.ema.decay=0.5", "optim.clip_grad=1", "train.accumulate=2", "seed=3")


@pytest.fixture(scope="module")
def sharded(scratch: Path) -> Path:
    """Two epochs under FSDP2, the second by a run that was resumed."""
    folder = scratch / "sharded"
    words = (*ADDED, *BUSY, "data.batch_size=32", "parallel=fsdp2", "parallel.devices=2", "train.log_every=1")
    first = train(scratch, *words, "train.epochs=1", "optim.sched=none", f"hydra.run.dir={folder}")
    assert first.returncode == 0, first.stdout + first.stderr
    second = train(scratch, f"resume={folder}", "train.epochs=2")
    assert second.returncode == 0, second.stdout + second.stderr
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_each_addition_trains_under_fsdp2(sharded: Path) -> None:
    result: dict[str, Any] = json.loads((sharded / "result.json").read_text())
    assert result["status"] == "done"
    assert result["world_size"] == 2
    assert result["strategy"] == "src.parallel.fsdp2.FullyShard"
    assert result["proof"]["hashes_equal"]
    assert result["val"]["error"] == pytest.approx(1 - result["val"]["acc"])
    assert result["objective"] == result["val"]["error"]
    assert result["val"]["samples"] == 45, "ranks with 23 and 22 images"
    logged = [line for line in read_lines(sharded / "metrics.jsonl") if "val/error" in line]
    assert len(logged) == 2
    assert "val/error_ema" in logged[0]
    weights = torch.load(sharded / "checkpoints/best.pt", weights_only=True)
    assert {type(tensor) for tensor in weights["model"].values()} == {torch.Tensor}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_fsdp2_computes_what_ddp_computes(scratch: Path, sharded: Path) -> None:
    folder = scratch / "ddp"
    words = (*ADDED, *BUSY, "data.batch_size=32", "parallel=ddp", "parallel.devices=2", "train.log_every=1")
    done = train(scratch, *words, "train.epochs=2", "optim.sched=none", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/loss_ema"):
        found = [
            [line[key] for line in read_lines(path / "metrics.jsonl") if key in line] for path in (folder, sharded)
        ]
        assert len(found[0]) >= 2
        assert found[1] == pytest.approx(found[0], rel=1e-4), key


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("checkpoint.metric=val/eror",), "did you mean val/error"),
        (("optimized_metric=val/eror",), "did you mean val/error"),
        (("train.loss=magin",), "did you mean margin"),
        (("parallel.strategy=src.parallel.fsdp2.FullShard",), "no such strategy"),
        (("parallel.strategy=src.parallel.fsdp2.FullyShard",), "parallel.process_per_device"),
        (("parallel=ddp", "+parallel.options.a=1"), "of a strategy of your own"),
    ],
)
@pytest.mark.slow
@pytest.mark.processes
def test_a_wrong_name_of_an_addition_is_refused_early(scratch: Path, words: tuple[str, ...], said: str) -> None:
    done = train(scratch, *words, timeout=90)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
