"""Faults while a device is in use: the rank is named, the device is free again, a sweep goes on.

On a CPU promises/test_faults.py and test_ends.py try the same; a sweep that goes on is tried there here too.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import Train

FAULTY = Path(__file__).parent / "promises" / "faulty"
pytestmark = pytest.mark.processes
gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
on_cuda = pytest.mark.parametrize("accelerator", [pytest.param("cuda", marks=gpu)])
on_both = pytest.mark.parametrize(
    "accelerator", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=gpu)]
)


def words(accelerator: str) -> list[str]:
    """Two ranks, which share a device where there is one."""
    shared = ["parallel=ddp", "parallel.devices=2", "parallel.backend=gloo", f"parallel.accelerator={accelerator}"]
    return [*shared, "data=synthetic", "data.kwargs.num_samples=192", "train.epochs=2", "parallel.timeout=4"]


def accident(kind: str, mark: Path) -> dict[str, str]:
    """To rank 1, in the forward pass of step 7."""
    path = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "FAULT": f"{kind}:1:7:the forward pass", "FAULT_MARK": str(mark)}


@on_cuda
@pytest.mark.parametrize(
    ("kind", "said"),
    [("kill", "rank 1 was killed by SIGKILL"), ("stop", "rank 1 does not answer")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_dies_or_stops_is_named(train: Train, accelerator: str, kind: str, said: str) -> None:
    done = train(*words(accelerator), environment=accident(kind, train.base / "mark"))
    assert done.returncode == 1 and said in done.stderr, done.output


@on_both
def test_one_of_two_ranks_is_out_of_memory_and_the_sweep_goes_on(train: Train, accelerator: str) -> None:
    sweep = train.base / "sweep"
    environment = accident("no_memory", train.base / "mark")
    done = train("-m", *words(accelerator), "parallel.devices=2,1", f"hydra.sweep.dir={sweep}", environment=environment)
    assert done.returncode == 1, done.output
    jobs = json.loads((sweep / "jobs.json").read_text(encoding="utf-8"))["jobs"]
    assert sorted(job["status"] for job in jobs) == ["done", "out_of_memory"], done.output


@on_cuda
def test_a_stop_signal_saves_and_leaves(train: Train, accelerator: str) -> None:
    running = train.start(*words(accelerator), "train.epochs=500", "train.log_every=1")
    running.wait_for_steps()
    done = running.signal(signal.SIGTERM)
    assert done.returncode == 143 and done.seconds < 15, done.output
    assert (done.folder / "checkpoints" / "last.pt").exists()
