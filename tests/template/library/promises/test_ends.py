"""Runs and ranks that fail, get a signal or are killed end promptly, and leave nothing."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_sharer
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from src.data.transforms import OnImage
from tests.template.runs import ROOT, cpu_loader, draw_images, run_python
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import BatchFetcher, TrainLoader
from timm_parallel.data.samplers import TrainSampler
from timm_parallel.machine.signals import exit_at_once, exit_process
from timm_parallel.task import Targets
from timm_parallel.testing.commands import Train
from timm_parallel.testing.ranks import warm_processes

pytestmark = pytest.mark.processes
TWO = ("parallel=ddp", "parallel.devices=2")
ENDLESS = ("train.epochs=10000", "train.evaluate_every=0", "train.log_every=5")


def folder_with_a_corrupt_image_for_rank_1(root: Path) -> Path:
    """Write 16 training images, damage the one that rank 1 of 2 reads first, and return it."""
    draw_images(root, "train/cat", "train/dog", count=8, size=32)
    draw_images(root, "val/cat", "val/dog", count=2, size=32)
    files = sorted((root / "train").rglob("*.png"))
    first = int(TrainSampler(16, 4, rank=1, world_size=2, seed=42).shard()[0])
    files[first].write_bytes(files[first].read_bytes()[:40])
    return files[first]


@pytest.mark.slow(seconds=7)
def test_exception_on_one_rank_ends_the_ddp_run_and_error_names_rank_and_log(train: Train) -> None:
    corrupt = folder_with_a_corrupt_image_for_rank_1(train.base / "images")
    data = (
        "data=folder",
        f"data.root={train.base}/images",
        "data.image_size=32",
        "data.limit_train=16",
    )
    done = train(*TWO, *data, "data.batch_size=4", "data.workers=0")
    ended = time.time()
    assert done.returncode == 1, done.output
    failure = done.result["failure"]
    assert (done.result["status"], failure["rank"], failure["exception"]) == (
        "failed",
        1,
        "UnreadableImageError",
    )
    assert ended - failure["time"] < 20
    for part in ("Failed: rank 1: UnreadableImageError", str(corrupt), "rank_1.log"):
        assert part in done.stderr, done.output
    assert str(corrupt) in done.result["reason"]
    log = (done.folder / "logs" / "rank_1.log").read_text()
    assert str(corrupt) in log and "Traceback (most recent call last)" in log


# Other combinations of signal and strategy are tested in test_resume.py (SIGUSR1, ddp). Tests below
# send SIGINT to ddp.
STOPS = [
    pytest.param("dp", signal.SIGHUP, os.kill, 0, id="SIGHUP-dp"),
    pytest.param("fsdp", signal.SIGTERM, os.kill, 1, id="SIGTERM-fsdp-with-a-loader-worker"),
    pytest.param("ddp", signal.SIGINT, os.killpg, 1, id="SIGINT-to-the-process-group-of-ddp"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "number", "send", "workers"), STOPS)
@pytest.mark.slow(seconds=7)
def test_signal_to_train_py_stops_all_processes_within_15_seconds(
    train: Train, strategy: str, number: int, send: Callable[[int, int], None], workers: int
) -> None:
    words = (f"parallel={strategy}", "parallel.devices=2", f"data.workers={workers}")
    running = train.start(*words, *ENDLESS)
    running.wait_for_steps()
    send(running.process.pid, number)
    running.started = time.monotonic()
    done = running.finish()
    assert done.returncode == 128 + number, done.output
    assert done.seconds < 15
    assert done.result["status"] == "interrupted"
    assert signal.Signals(number).name in done.result["reason"]
    assert f"resume={done.folder}" in done.stderr
    assert "Traceback" not in done.output
    assert train.left_after(5) == []


@pytest.mark.slow
def test_sigint_stops_a_ddp_run_while_ranks_are_starting(train: Train) -> None:
    running = train.start(*TWO, *ENDLESS)
    running.wait_for(lambda: len(running.workers()) == 2)
    done = running.signal(signal.SIGINT)
    assert (done.returncode, done.result["status"]) == (130, "interrupted"), done.output
    assert train.left_after(5) == []


@pytest.mark.slow
def test_signal_to_torchrun_ends_all_processes(train: Train) -> None:
    running = train.start("parallel=ddp", *ENDLESS, form="torchrun")
    running.wait_for_steps()
    done = running.signal(signal.SIGINT)
    assert done.returncode != 0
    assert done.result["status"] == "interrupted", done.output
    assert f"resume={done.folder}" in done.stderr
    assert train.left_after(10) == []


@pytest.mark.slow(seconds=7)
def test_ranks_and_loader_workers_end_when_train_py_is_killed(train: Train) -> None:
    running = train.start(*TWO, "data.workers=1", *ENDLESS)
    running.wait_for_steps()
    before = len(psutil.Process(running.process.pid).children(recursive=True))
    assert before >= 4, "expected ranks and loader workers to be running"
    running.process.kill()
    running.process.wait()
    assert train.left_after(10) == []


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.mark.parametrize(
    ("opened", "streams"),
    [
        pytest.param("keep_running_without_stdout()", "> /dev/full 2>&1", marks=FULL),
        # The reader of the pipe has exited.
        ("keep_running_without_stdout()", "2>&1 | true"),
        ("keep_running_without_stdout()", "<&- >&- 2>&-"),
        ("errors_in_one_line(lambda argv: 0)([])", "<&- >&- 2>&-"),
    ],
)
def test_process_and_its_child_keep_running_when_streams_are_closed_or_full(
    tmp_path: Path, opened: str, streams: str
) -> None:
    code = (
        "import logging, os, subprocess, sys\n"
        "from timm_parallel.config.arguments import errors_in_one_line\n"
        "from timm_parallel.machine.streams import keep_running_without_stdout\n"
        f"{opened}\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "print('x' * 99999, flush=True)\n"
        "print('x' * 99999, flush=True, file=sys.stderr)\n"
        "logging.error('x')\n"
        # C++ code writes without Python.
        f"{'os.write(1, bytes(1))' if '|' in streams else ''}\n"
        "sys.stdin.close()\n"
        "child = 'import os; [os.fstat(number) for number in range(3)]'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    file.write(str(file.fileno() > 2))\n"
    )
    command = shlex.join([sys.executable, "-c", code, str(tmp_path / "last")])
    words = ["bash", "-c", f"set -o pipefail; {command} {streams}"]
    done = subprocess.run(words, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "last").read_text() == "True"


# Script of a failed rank. BLOCKS is the time in seconds that a destructor waits. CODE is the exit
# code.
FAILED = """
import atexit, os, threading
import torch.distributed as dist
from timm_parallel.machine.signals import exit_process
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Communicators:
    def __del__(self, write=os.write, wait=threading.Event().wait):
        write(1, b"destructor\\n")
        wait(BLOCKS)
communicators = Communicators()
atexit.register(print, "exit handler", flush=True)
print("last words", flush=True)
exit_process(CODE)
"""


def left(code: int, blocks: float) -> tuple[int, list[str]]:
    done = run_python("-c", FAILED.replace("CODE", str(code)).replace("BLOCKS", str(blocks)))
    return done.returncode, done.stdout.split("\n")[:-1]


@pytest.mark.nightly
@pytest.mark.slow
def test_exit_process_skips_destructors_when_a_rank_failed_or_was_stopped() -> None:
    assert left(1, blocks=600) == (1, ["last words", "exit handler"])
    assert left(143, blocks=600) == (143, ["last words", "exit handler"])
    assert left(0, blocks=0) == (0, ["last words", "exit handler", "destructor"])


# Script in which one thread always waits in the torch store. An exit handler prints the names of
# the threads that still run.
IN_THE_STORE = """
import atexit, threading, time
atexit.register(lambda: print(*sorted(thread.name for thread in threading.enumerate())))
from contextlib import suppress
from datetime import timedelta
from torch.distributed import TCPStore
from timm_parallel.faults.stop import StopCoordinator

class Slow:
    def __init__(self):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    def check(self, keys):
        with suppress(RuntimeError):
            self.store.wait(["never"], timedelta(seconds=0.2))
        return False
stopping = StopCoordinator(0, 1, Slow())
time.sleep(0.5)
raise RuntimeError("the accident of this test")
"""


@pytest.mark.slow
def test_exception_in_main_thread_ends_the_thread_that_waits_in_the_torch_store() -> None:
    """If a thread still waited in the torch store at interpreter shutdown, train.py, evaluate.py
    and scripts/predict.py would abort.
    """
    done = run_python("-c", IN_THE_STORE)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: the accident of this test"
    assert done.stdout == "MainThread\n"


def test_exit_process_raises_system_exit_when_no_torch_process_group_exists() -> None:
    for code in (0, 1):
        with pytest.raises(SystemExit) as error:
            exit_process(code)
        assert error.value.code == code


def loader_with_a_worker() -> TrainLoader:
    split = InMemory(
        torch.zeros(64, 3, 8, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64)
    )
    fetcher = BatchFetcher(split, Targets(), OnImage(torch.clone), seed=0, substitutes=64)
    return cpu_loader(fetcher, TrainSampler(64, 4, rank=0, world_size=1, seed=0), 1)


def _kill_worker_and_exit(temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    # Make this process look like a rank, which has no temporary folder of multiprocessing yet. A
    # forked rank of a sweep is a process that multiprocessing has started.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    next(loader_with_a_worker().epoch(0))
    assert list(temporary.glob("pymp-*"))
    for child in psutil.Process().children():
        child.kill()
    exit_at_once(7)


@pytest.mark.processes
def test_rank_that_exits_after_a_loader_worker_was_killed_leaves_no_temporary_folder() -> None:
    # Use a folder with a short path instead of tmp_path, because the path of a socket has at most
    # 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        process = warm_processes().Process(
            target=_kill_worker_and_exit, args=(Path(folder),), daemon=False
        )
        process.start()
        process.join(timeout=60)
        process.kill()
        assert process.exitcode == 7
        assert list(Path(folder).iterdir()) == []


@pytest.mark.processes
def test_error_names_the_killed_loader_worker_instead_of_the_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader, others = loader_with_a_worker(), set(psutil.Process().children())
    batches = loader.epoch(0)
    next(batches)
    [worker] = set(psutil.Process().children()) - others

    def detach(*given: object) -> None:
        threading.Timer(0.2, worker.kill).start()
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(multiprocessing.resource_sharer.DupFd, "detach", detach)
    with pytest.raises(RuntimeError, match=f"DataLoader worker .*{worker.pid}"):
        next(batches)
    loader.close()
