"""Helpers that run test code in forked rank processes.

A fork server imports torch, the library and the project once. Its forked ranks start three seconds
faster than new processes. `in_ranks` calls a function on every rank. `train_warm` trains a whole
run. `warm_ranks` replaces the launcher of train.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from timm_parallel import app
from timm_parallel.faults.failure import RankExits
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch.job import prepare
from timm_parallel.machine.ranks import NEEDED, Ranks

RANK_VARIABLES = (*NEEDED, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES")

COLD = "the server of ranks has not found timm_parallel/testing/warm.py"
# Environment variables that tell the fork server which project to import: the name of its app, and
# its folder.
WARM_APP, WARM_ROOT = "WARM_APP", "WARM_ROOT"


def name_project() -> None:
    """Let the fork server import the current project of this process, if there is one."""
    if app._current is not None:
        os.environ |= {WARM_APP: app._current.name, WARM_ROOT: str(app._current.root)}


def warm_processes() -> Any:
    """Return a multiprocessing context that forks processes from a server. The server has already
    imported the modules of timm_parallel/testing/warm.py.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["timm_parallel.testing.warm"])
    # Start the fork server in the folder that contains the library. Python before 3.13 looks for
    # the module to preload in the folder in which the server starts, and ignores a module that it
    # does not find. If the server started elsewhere, the ranks of all later tests would import
    # torch again.
    with contextlib.chdir(Path(__file__).parents[2]):
        forkserver.ensure_running()
    return context


def in_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300
) -> list[Any]:
    """Call `function(ranks, store, *arguments)` in `world_size` forked processes, and return a list
    of the results, ordered by rank.

    `ranks` describes the rank of the process, and `store` is a torch FileStore. The test fails with
    the traceback if a process raises, and with the exit code if a process dies.
    """
    context = warm_processes()
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank,
                args=(function, rank, world_size, f"{folder}/store", answers, arguments),
                daemon=False,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        try:
            until = time.monotonic() + timeout
            while len(values) < world_size:
                rank, failure, value = _next_answer(answers, processes, until)
                assert failure is None, f"rank {rank}:\n{failure}"
                values[rank] = value
            for process in processes:
                process.join(timeout=10)
                assert process.exitcode == 0, f"exit code {process.exitcode}"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [values[rank] for rank in range(world_size)]


def _next_answer(answers: Any, processes: list[Any], until: float) -> tuple[int, str | None, Any]:
    while time.monotonic() < until:
        try:
            return answers.get(timeout=0.5)  # type: ignore[no-any-return]
        except queue.Empty:
            dead = [
                f"rank {i}: {p.exitcode}"
                for i, p in enumerate(processes)
                if p.exitcode not in (None, 0)
            ]
            if dead:
                pytest.fail(f"died: {dead}")
    return pytest.fail("the ranks took too long")  # type: ignore[no-any-return]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    path: str,
    answers: Any,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    from torch.distributed import FileStore

    torch.set_num_threads(1)
    identity = Ranks(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    try:
        assert "timm_parallel.testing.warm" in sys.modules, COLD
        answers.put((rank, None, function(identity, FileStore(path, world_size), *arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))


def train_warm(config: ResolvedConfig, folder: Path) -> Path:
    """Train a run with a resolved config in forked ranks, and return the run folder. The test fails
    if the run fails.
    """
    prepare(config, folder)
    ended = warm_ranks(config, folder)
    console = (folder / "console.txt").read_text(encoding="utf-8")
    assert not ended.exit_codes, f"{ended}\n{console}"
    return folder


def warm_ranks(
    config: ResolvedConfig,
    folder: Path,
    environment: dict[str, str] | None = None,
    first: Path | None = None,
    timeout: float = 300,
    start_rank: object = None,
) -> RankExits:
    """Train a run in forked ranks without torch's elastic agent, and return the exit codes of the
    ranks. Tests use this function in place of `supervisor.run_ranks`.

    The run folder must already contain the saved config. If a rank fails, the other ranks are
    ended, as the agent does. `environment` holds additional environment variables. `first` is a
    Python file that each rank executes before training. The output of all ranks goes to
    `console.txt` in the run folder. `start_rank`, an argument of `run_ranks`, is ignored.
    """
    from torch.distributed import TCPStore

    count = config.parallel.devices if config.parallel.has_ranks else 1
    given = {"RUN_STARTED_AT": str(time.perf_counter()), **(environment or {})}
    if config.parallel.has_ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given |= {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        given |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    processes = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if config.parallel.has_ranks else {}
        processes.append(
            warm_processes().Process(
                target=_warm_rank,
                args=(app.current().name, folder, given | own, first),
                daemon=False,
            )
        )
        processes[-1].start()
    until = time.monotonic() + timeout
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > until:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(timeout=30)
                process.kill()
        time.sleep(0.02)
    codes = {
        rank: int(process.exitcode or 0)
        for rank, process in enumerate(processes)
        if process.exitcode
    }
    return RankExits(exit_codes=codes, world_size=count)


def _warm_rank(
    app_name: str, folder: Path, environment: dict[str, str], first: Path | None
) -> None:
    assert "timm_parallel.testing.warm" in sys.modules, COLD
    from timm_parallel.launch.rank import main
    from timm_parallel.machine.signals import exit_process

    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    console = os.open(folder / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(console, 1), os.dup2(console, 2)
    # Fork loader workers, as a rank of train.py does.
    multiprocessing.set_start_method("fork", force=True)
    if first is not None:
        spec = importlib.util.spec_from_file_location(first.stem, first)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    exit_process(main(folder, app.find_app(app_name).train))
