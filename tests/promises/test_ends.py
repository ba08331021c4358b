"""However a run comes to its end, by a failure, a signal or a kill, it ends promptly, by name, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Train, in_ranks, resolved
from PIL import Image

from src.data.sampling import TrainRequests
from src.engine.machine.ranks import Ranks

pytestmark = pytest.mark.processes
TWO = ("parallel=ddp", "parallel.devices=2")
ENDLESS = ("train.epochs=10000", "train.evaluate_every=0", "train.log_every=5")


def folder_with_a_corrupt_image_for_rank_1(root: Path) -> Path:
    """16 training images, of which the one is damaged that rank 1 of 2 reads first. Returns its path."""
    for split, count in (("train", 8), ("val", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (32, 32), (index * 20, 0, 0)).save(root / split / name / f"{index}.png")
    files = sorted((root / "train").rglob("*.png"))
    first = int(TrainRequests(16, 4, rank=1, world_size=2, seed=42).shard()[0])
    files[first].write_bytes(files[first].read_bytes()[:40])
    return files[first]


def test_a_rank_that_fails_ends_the_run_with_its_name_and_log(train: Train) -> None:
    corrupt = folder_with_a_corrupt_image_for_rank_1(train.base / "images")
    data = ("data=folder", f"data.root={train.base}/images", "data.image_size=32", "data.limit_train=16")
    done = train(*TWO, *data, "data.batch_size=4", "data.workers=0")
    ended = time.time()
    assert done.returncode == 1, done.output
    failure = done.result["failure"]
    assert (done.result["status"], failure["rank"], failure["exception"]) == ("failed", 1, "UnreadableImageError")
    assert ended - failure["time"] < 20
    for word in ("Failed: rank 1: UnreadableImageError", str(corrupt), "rank_1.log"):
        assert word in done.stderr, done.output
    assert str(corrupt) in done.result["reason"]
    log = (done.folder / "logs" / "rank_1.log").read_text()
    assert str(corrupt) in log and "Traceback (most recent call last)" in log


# SIGTERM under single is in test_ownership.py, SIGUSR1 under ddp in test_resume.py.
STOPS = [
    pytest.param("ddp", signal.SIGINT, 1, id="SIGINT-ddp-with-a-loader-worker"),
    pytest.param("ddp", signal.SIGTERM, 0, id="SIGTERM-ddp", marks=pytest.mark.slow),
    pytest.param("single", signal.SIGINT, 1, id="SIGINT-single-with-a-loader-worker", marks=pytest.mark.slow),
    pytest.param("dp", signal.SIGHUP, 0, id="SIGHUP-dp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "number", "workers"), STOPS)
def test_a_signal_stops_the_run_promptly(train: Train, strategy: str, number: int, workers: int) -> None:
    devices = 1 if strategy == "single" else 2
    running = train.start(f"parallel={strategy}", f"parallel.devices={devices}", f"data.workers={workers}", *ENDLESS)
    running.wait_for_steps()
    done = running.signal(number)
    assert done.returncode == 128 + number, done.output
    assert done.seconds < 15
    assert done.result["status"] == "interrupted"
    assert signal.Signals(number).name in done.result["reason"]
    assert f"resume={done.folder}" in done.stderr
    assert "Traceback" not in done.output
    assert train.left_after(5) == []


@pytest.mark.slow
def test_a_signal_to_the_whole_group_does_the_same(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS, "data.workers=1")
    running.wait_for_steps()
    os.killpg(running.process.pid, signal.SIGINT)
    running.started = time.monotonic()
    done = running.finish()
    assert (done.returncode, done.result["status"]) == (130, "interrupted"), done.output
    assert train.left_after(5) == []


@pytest.mark.slow
def test_a_signal_before_the_ranks_have_started_stops_the_run(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS)
    running.wait_for(lambda: len(running.workers()) == 2)
    done = running.signal(signal.SIGINT)
    assert (done.returncode, done.result["status"]) == (130, "interrupted"), done.output
    assert train.left_after(5) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_leaves_nothing(train: Train, number: int) -> None:
    running = train.start("parallel=ddp", *ENDLESS, form="torchrun")
    running.wait_for_steps()
    done = running.signal(number)
    assert done.returncode != 0
    assert done.result["status"] == "interrupted", done.output
    assert f"resume={done.folder}" in done.stderr
    assert train.left_after(10) == []


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("single", marks=pytest.mark.slow)])
def test_nothing_survives_a_killed_launcher(train: Train, strategy: str) -> None:
    devices = 2 if strategy == "ddp" else 1
    running = train.start(f"parallel={strategy}", f"parallel.devices={devices}", "data.workers=1", *ENDLESS)
    running.wait_for_steps()
    before = len(psutil.Process(running.process.pid).children(recursive=True))
    assert before >= 2 * devices, "ranks and loader workers are running"
    running.process.kill()
    running.process.wait()
    assert train.left_after(10) == []


def _drift(ranks: Ranks, store: torch.distributed.Store, where: str, folder: str) -> str:
    from src.run.lifecycle import Training

    run = Training(resolved("parallel=ddp", "parallel.devices=2", "train.max_steps=2"), Path(folder), ranks, store)

    def spoil() -> None:
        with torch.no_grad():
            next(run.state.model.parameters()).add_(ranks.rank)

    if where == "start":
        spoil()
    else:
        ordinary: Callable[[], None] = run.end_epoch  # the best weights, which the digits are tested with, are rank 0's

        def then_spoil() -> None:
            ordinary()
            spoil()

        run.end_epoch = then_spoil  # type: ignore[method-assign]
    try:
        run.train()
    except RuntimeError as error:
        return str(error)
    return "not noticed"


@pytest.mark.parametrize("where", ["start", "end"])
def test_ranks_with_different_parameters_are_noticed(tmp_path: Path, where: str) -> None:
    assert all(
        f"the ranks {where} with different parameters" in said for said in in_ranks(_drift, 2, where, str(tmp_path))
    )
