"""Tests of the lock of a run folder."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from timm_parallel.machine.files import is_locked, lock_folder


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
