"""A failed rank writes its records and exits without waiting for other ranks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_sharer
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from src.data.transforms import OnImage
from tests.template.runs import cpu_loader, run_python
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import BatchFetcher, TrainLoader
from timm_parallel.data.samplers import TrainSampler
from timm_parallel.machine.signals import exit_at_once, exit_process
from timm_parallel.task import Targets
from timm_parallel.testing.ranks import warm_processes

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
    # Make this process look like a rank of train.py, which multiprocessing has not started and
    # which has no temporary folder of multiprocessing yet.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
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
