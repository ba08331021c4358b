"""A folder in use is refused with the owner's process and host; a dead owner blocks nobody."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Train

from src.engine.machine.lock import is_owned, own


def _hold(folder: Path, answers: Any) -> None:
    with own(folder):
        answers.put(os.getpid())
        time.sleep(60)


def _try(folder: Path, answers: Any) -> None:
    try:
        with own(folder):
            answers.put("mine")
            time.sleep(0.2)
    except ValueError as error:
        answers.put(str(error))


@pytest.mark.processes
def test_the_owner_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    owner = context.Process(target=_hold, args=(tmp_path, answers))
    owner.start()
    pid = answers.get(timeout=300)
    assert is_owned(tmp_path)
    with pytest.raises(ValueError, match="in use by") as refusal, own(tmp_path):
        pass
    assert f"process {pid} on {socket.gethostname()}" in str(refusal.value)
    os.kill(pid, signal.SIGKILL)
    owner.join()
    assert not is_owned(tmp_path)
    with own(tmp_path):
        assert is_owned(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


@pytest.mark.processes
def test_of_many_that_want_it_at_once_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_try, args=(tmp_path, answers)) for _ in range(8)]
    for process in processes:
        process.start()
    said = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert 1 <= said.count("mine") <= 8
    assert all(line == "mine" or "in use by" in line for line in said)


def test_whoever_asks_who_owns_a_folder_is_in_nobody_s_way(tmp_path: Path) -> None:
    """resume=auto looks at all folders of a task, while other jobs take theirs."""
    asked, leave = threading.Event(), threading.Timer(0.05, lambda: None)

    def ask() -> None:
        with own(tmp_path):  # as is_owned does, for a moment
            asked.set()
            leave.start()
            leave.join()

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(10)
    with own(tmp_path):
        pass
    asking.join()


def test_a_folder_that_cannot_be_written_to_is_refused_and_auto_passes_it_over(tmp_path: Path) -> None:
    """Another person's, say; a folder in the lock's place stands for it, because root may write everywhere."""
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match="cannot be written to"), own(tmp_path):
        pass
    assert is_owned(tmp_path)


def test_a_folder_that_does_not_exist_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"), own(tmp_path / "missing"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(__import__("fcntl"), "flock", refuse)
    with own(tmp_path):
        (tmp_path / "result.json").write_text("{}")
    assert "this file system has no locks" in caplog.text
    assert not is_owned(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_a_running_run_cannot_be_resumed(train: Train) -> None:
    running = train.start("parallel=single", "train.epochs=1000", "train.log_every=1")
    running.wait_for(lambda: (running.folder / "checkpoints" / "last.pt").exists())
    before = {path: path.stat().st_mtime for path in (running.folder / ".hydra").iterdir()}
    second = train(f"resume={running.folder}", defaults=False, folder=running.folder)
    assert second.returncode == 2
    assert len(second.stderr.splitlines()) == 1 and "in use by process" in second.stderr, second.output
    assert {path: path.stat().st_mtime for path in (running.folder / ".hydra").iterdir()} == before
    assert running.signal(signal.SIGTERM).returncode == 128 + signal.SIGTERM
