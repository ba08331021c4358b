"""A run folder has one owner. A checkpoint in it is written completely or not at all, and damage is
detected.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from timm_parallel.machine.files import is_locked, lock_folder
from timm_parallel.run import checkpoint
from timm_parallel.testing.ranks import warm_processes

# Number of elements per tensor. A save then takes a few milliseconds, so that a kill can interrupt
# it.
SIZE = 40_000


def contents(step: int) -> dict[str, Any]:
    """Build the contents of a checkpoint in which every number equals the step."""
    return {
        "model": {f"layer{index}.weight": torch.full((SIZE,), float(step)) for index in range(4)},
        "optimizer": {"state": {}},
        "progress": {"step": step, "epoch": 0, "best_values": {}},
        "classes": ["a", "b"],
        "made_by": {"strategy": "single", "devices": 1},
    }


def step_in(path: Path) -> int:
    """Return the step of a checkpoint file, which all its numbers must equal."""
    loaded = checkpoint.load(path)
    step = int(loaded["progress"]["step"])
    assert all(bool((tensor == step).all()) for tensor in loaded["model"].values())
    return step


def _save_forever(folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    for step in range(first, 10**6):
        checkpoint.save(folder, contents(step), step, keep=2, is_best=step % 3 == 0)


@pytest.mark.nightly
@pytest.mark.slow
def test_last_checkpoint_loads_and_step_never_decreases_when_20_saves_are_killed(
    tmp_path: Path,
) -> None:
    context = warm_processes()
    draw, reached = random.Random(0), 0
    for _ in range(20):
        process = context.Process(target=_save_forever, args=(tmp_path, reached + 1))
        process.start()
        until = time.monotonic() + 300
        # Kill the process only after it has completed at least one save.
        while not (tmp_path / f"step_{reached + 2}.pt").exists() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        process.join()
        step = step_in(tmp_path / "last.pt") if (tmp_path / "last.pt").exists() else 0
        assert step >= reached
        reached = step
    assert reached > 20
    checkpoint.save(tmp_path, contents(reached + 1), reached + 1, keep=1, is_best=False)
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert left <= {
        f"{name}.{end}"
        for name in ("last", "best", f"step_{reached + 1}")
        for end in ("pt", "json")
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    checkpoint.save(folder, contents(3), 3, keep=1, is_best=True)
    return folder


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), sidecars=st.booleans())
def test_checkpoint_with_a_flipped_bit_is_refused_by_the_checksum_in_the_json_sidecar(
    good: Path, tmp_path: Path, where: float, bit: int, sidecars: bool
) -> None:
    """Without the JSON sidecar there is no checksum. The file may then load if the flipped bit is
    in padding, but all numbers must be correct.
    """
    data = bytearray((good / "last.pt").read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    folder = tmp_path / f"{where}{bit}{sidecars}"
    folder.mkdir(exist_ok=True)
    (folder / "last.pt").write_bytes(data)
    if sidecars:
        shutil.copy(good / "last.json", folder)
        with pytest.raises(ValueError, match="checksum"):
            checkpoint.load(folder / "last.pt")
        return
    # Loading may raise ValueError, which is the correct refusal of a damaged file.
    with contextlib.suppress(ValueError):
        assert step_in(folder / "last.pt") == 3


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (("model",), math.nan),
        (("averages", "ema"), -math.inf),
        (("networks", "loss"), math.nan),
    ],
)
def test_checkpoint_with_a_weight_that_is_not_finite_is_never_loaded(
    tmp_path: Path, part: tuple[str, ...], value: float
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, contents(2), 2, keep=3, is_best=False)
    bad = contents(4)
    tensors = bad
    for name in part:
        tensors = tensors.setdefault(name, {})
    tensors["head.bias"] = torch.tensor([0.5, value])
    checkpoint.save(folder, bad, 4, keep=3, is_best=True)
    with pytest.raises(ValueError, match=r"last\.pt: .*head\.bias"):
        checkpoint.load(folder / "last.pt")
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None and newest[0] == folder / "step_2.pt"


@pytest.mark.processes
def test_death_of_a_loader_worker_during_a_save_is_not_reported_as_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises the error in the main thread, whatever this thread does."""
    workers = iter(DataLoader(range(9), num_workers=1, persistent_workers=True))  # type: ignore[arg-type]
    next(workers)

    def kill_worker(*_: Any) -> None:
        os.kill(workers._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        time.sleep(20)

    monkeypatch.setattr(torch, "save", kill_worker)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        checkpoint.save(tmp_path / "checkpoints", contents(3), 3, keep=1, is_best=False)
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("keep", [0, 100, 0.999])
def test_checkpoint_load_error_names_the_truncated_file(
    good: Path, tmp_path: Path, keep: float
) -> None:
    data = (good / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"last\.pt: damaged") as refusal:
        checkpoint.load(tmp_path / "last.pt")
    assert "\n" not in str(refusal.value)


def test_load_newest_checkpoint_skips_damaged_files_and_those_of_a_killed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        checkpoint.save(folder, contents(step), step, keep=3, is_best=step == 1)
    for name in ("last.pt", "step_3.pt"):
        (folder / name).unlink()
        (folder / name).write_bytes(b"damaged")
    (folder / ".step_4.pt.tmp").write_bytes(os.urandom(100))
    (folder / ".step_4.json.4711.tmp").write_text("{")
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None and step_in(newest[0]) == 2
    assert "last.pt: damaged" in caplog.text
    checkpoint.save(folder, contents(4), 4, keep=1, is_best=False)
    assert step_in(folder / "last.pt") == 4
    assert step_in(folder / "best.pt") == 1
    assert not list(folder.glob(".*"))


def test_checkpoint_save_deletes_checkpoints_of_later_steps_from_an_abandoned_attempt(
    tmp_path: Path,
) -> None:
    """A run continued from step 2, because the checkpoint of step 9 was damaged. The next save
    keeps the new checkpoints and deletes step 9.
    """
    for step in (1, 2, 9):
        checkpoint.save(tmp_path, contents(step), step, keep=3, is_best=False)
    (tmp_path / "step_9.pt").write_bytes(b"damaged")
    checkpoint.save(tmp_path, contents(3), 3, keep=2, is_best=False)
    assert {path.name for path in tmp_path.glob("step_*.pt")} == {"step_2.pt", "step_3.pt"}
    assert [step_in(path) for path in sorted(tmp_path.glob("step_*.pt"))] == [2, 3]


def _save_with_little_room(folder: Path, answers: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Limit the size of a file in bytes so that writing the second checkpoint fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, SIZE))
    try:
        checkpoint.save(folder, contents(8), 8, keep=1, is_best=True)
        answers.put("saved")
    except OSError as error:
        answers.put(str(error))


@pytest.mark.processes
def test_checkpoint_save_keeps_earlier_files_when_a_file_size_limit_stops_the_write(
    tmp_path: Path,
) -> None:
    checkpoint.save(tmp_path, contents(7), 7, keep=1, is_best=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    context = warm_processes()
    answers = context.Queue()
    process = context.Process(target=_save_with_little_room, args=(tmp_path, answers))
    process.start()
    message = answers.get(timeout=300)
    process.join()
    assert "step_8.pt" in message
    assert "MiB free" in message and "earlier checkpoints are untouched" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _hold(folder: Path, answers: Any) -> None:
    with lock_folder(folder):
        answers.put(os.getpid())
        time.sleep(60)


def _try(folder: Path, answers: Any) -> None:
    """Try to lock the folder; answer with the times of the lock, or the error."""
    try:
        with lock_folder(folder):
            locked_at = time.monotonic()
            time.sleep(0.2)
            answers.put((locked_at, time.monotonic()))
    except ValueError as error:
        answers.put(str(error))


@pytest.mark.processes
def test_folder_lock_error_names_the_owner_and_lock_is_released_when_the_owner_dies(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    owner = context.Process(target=_hold, args=(tmp_path, answers))
    owner.start()
    pid = answers.get(timeout=300)
    assert is_locked(tmp_path)
    with pytest.raises(ValueError, match="in use by") as refusal, lock_folder(tmp_path):
        pass
    assert f"process {pid} on {socket.gethostname()}" in str(refusal.value)
    os.kill(pid, signal.SIGKILL)
    owner.join()
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the lock file must be removed when its owner exits"


@pytest.mark.processes
def test_folder_lock_is_held_by_one_process_at_a_time_when_8_processes_request_the_lock(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_try, args=(tmp_path, answers)) for _ in range(8)]
    for process in processes:
        process.start()
    received = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    errors = [answer for answer in received if isinstance(answer, str)]
    assert all("in use by" in error for error in errors)
    held = sorted(answer for answer in received if not isinstance(answer, str))
    assert held
    assert all(
        released <= locked_at for (_, released), (locked_at, _) in itertools.pairwise(held)
    ), "two processes held the lock at the same time"


def test_folder_lock_is_granted_while_another_thread_briefly_queries_the_lock(
    tmp_path: Path,
) -> None:
    """With resume=auto, train.py queries the locks of all runs of a task while other jobs lock
    their run folders.
    """
    asked, leave = threading.Event(), threading.Timer(0.05, lambda: None)

    def ask() -> None:
        # Lock the folder for a short time, as the query is_locked does.
        with lock_folder(tmp_path):
            asked.set()
            leave.start()
            leave.join()

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(10)
    with lock_folder(tmp_path):
        pass
    asking.join()


def test_folder_lock_is_refused_when_the_folder_is_missing_or_not_writable(tmp_path: Path) -> None:
    """Tests may run as root, so a folder at the path of the lock makes writing fail."""
    with pytest.raises(ValueError, match="no such folder"), lock_folder(tmp_path / "missing"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match="cannot be written to"), lock_folder(tmp_path):
        pass
    assert is_locked(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_folder_lock_warns_when_the_file_system_does_not_support_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(__import__("fcntl"), "flock", refuse)
    with lock_folder(tmp_path):
        (tmp_path / "result.json").write_text("{}")
    assert "this file system has no locks" in caplog.text
    assert not is_locked(tmp_path)
