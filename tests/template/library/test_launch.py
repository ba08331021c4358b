"""train.py, torchrun and a cluster give the same run when they start its ranks."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.template.runs import run_warm, tiny
from timm_parallel.machine.ranks import NEEDED
from timm_parallel.state import checkpoint
from timm_parallel.testing.commands import Finished, Refuse, Running, Train
from timm_parallel.testing.configs import without_times

pytestmark = pytest.mark.processes
TWO = ("parallel=ddp", "parallel.devices=2")


def by_hand(train: Train, folder: Path, *overrides: str) -> list[Running]:
    """Start rank 1 and rank 0, as a cluster starts ranks without torchrun. Return both commands."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in (1, 0):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "train.py", *tiny(f"hydra.run.dir={folder}", *overrides)]
        started.append(train.start_command(command, folder, environment))
    return started


def in_its_folder(done: Finished) -> Finished:
    """Return the finished command with the run folder that the run has printed."""
    assert done.returncode == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("folder"))
    return replace(done, folder=Path(line.split()[-1]))


@pytest.fixture(scope="module")
def by_torchrun(train_shared: Train) -> Finished:
    return in_its_folder(train_shared("parallel=ddp", form="torchrun"))


def check(done: Finished) -> None:
    """Check that each record exists once, and that both ranks trained the same model."""
    folder, result = done.folder, done.result
    assert [path.parent for path in folder.rglob(".hydra")] == [folder]
    writers = {path.name.split(".")[-2] for path in folder.rglob("events.out.tfevents.*")}
    assert len(writers) == 1, "expected TensorBoard files from one process"
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert list(folder.rglob("*.tmp")) == []
    assert result["status"] == "done"
    assert (result["strategy"], result["devices"], result["world_size"], result["processes"]) == (
        "ddp",
        2,
        2,
        2,
    )
    assert result["backend"] == "gloo"
    assert result["proof"]["hashes_equal"] is True
    assert result["proof"]["parameters_hash_start"] != result["parameters_hash"], (
        "expected training to change the weights"
    )
    assert [entry["device"] for entry in result["memory"]] == ["cpu:0", "cpu:1"]


def check_equal(done: Finished, other: Finished) -> None:
    assert without_times(done.metrics) == without_times(other.metrics)
    assert done.result["parameters_hash"] == other.result["parameters_hash"]
    weights = [
        checkpoint.load(each.folder / "checkpoints" / "last.pt")["model"] for each in (done, other)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow(seconds=10)
def test_run_of_two_torchrun_ranks_writes_each_record_once_and_has_equal_parameters(
    by_torchrun: Finished, train_shared: Train
) -> None:
    check(by_torchrun)
    temporary = [path.name for path in train_shared.temporary.iterdir()]
    assert all(name.startswith("torchelastic_") for name in temporary), (
        "expected no files except the log folder of torchrun"
    )


@pytest.mark.slow(seconds=2)
def test_metrics_and_weights_are_identical_under_torchrun_and_python(
    by_torchrun: Finished, tmp_path: Path
) -> None:
    check_equal(by_torchrun, Finished(0, "", "", run_warm(tmp_path / "run", *TWO), 0.0))


@pytest.mark.slow(seconds=4)
def test_config_error_is_printed_once_when_ranks_are_started_externally(train: Train) -> None:
    ranks = by_hand(train, train.base / "run", "parallel=ddp", "modle=tiny")
    ended = [rank.finish() for rank in ranks]
    assert [done.returncode for done in ended] == [2, 2]
    stderr = "".join(done.stderr for done in ended)
    assert len(stderr.splitlines()) == stderr.count("did you mean model") == 1, stderr
    assert not (train.base / "run").exists()


def test_sweep_is_refused_under_torchrun(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        monkeypatch.setenv(name, {"RANK": "0", "LOCAL_RANK": "0"}.get(name, "2"))
    monkeypatch.setattr(
        "timm_parallel.launch.torchrun.refuse_followers", lambda ranks, reason: None
    )
    assert "python train.py -m" in refuse("-m", "parallel=ddp")
