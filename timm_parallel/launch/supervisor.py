"""Start the ranks of a run on this node and wait until they exit. ddp and fsdp use torch's elastic
agent. single and dp use one child process.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from timm_parallel.app import current, root
from timm_parallel.faults.failure import REPORT, RankExits, reported_failures
from timm_parallel.faults.heartbeat import published_failures
from timm_parallel.keys import ResolvedConfig, ResolvedParallel
from timm_parallel.launch.rendezvous import (
    BACKEND,
    Rendezvous,
    from_parameters,
    listen_towards,
    ranks_store,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.files import RunFolder
from timm_parallel.machine.imports import imports_without_gc
from timm_parallel.machine.platform import STOP_SIGNALS, open_memory
from timm_parallel.machine.process import (
    LAUNCHER,
    SAFE_PATH,
    process_start_time,
    terminate_descendants,
)
from timm_parallel.machine.ranks import NodeAddress
from timm_parallel.machine.signals import heeded_signals, signal_handlers

# Seconds that a rank has after a signal to save and exit, before it is killed. torch's agent waits
# equally long.
GRACE_SECONDS = 30.0


class Child(Protocol):
    """Process of a rank, with the methods of subprocess.Popen that the launcher calls."""

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


# Type of the function that starts a rank. Arguments: the command and the environment variables of
# the rank.
StartRank = Callable[[list[str], dict[str, str]], Child]


def start_command(command: list[str], environment: dict[str, str]) -> Child:
    return subprocess.Popen(command, env=environment, pass_fds=[int(environment[REPORT])])


def run_ranks(
    config: ResolvedConfig,
    folder: Path,
    rendezvous: Rendezvous | None = None,
    start_rank: StartRank = start_command,
) -> RankExits:
    """Start the ranks of this node, wait until all have exited, and return how they ended.

    `rendezvous`: connection to the other nodes, if any. `start_rank`: function that starts the rank
    of a run with one process.
    """
    # Start each rank as a command. torch's agent hangs if a rank is a function that exits with code
    # 0 without returning.
    command = [sys.executable, *SAFE_PATH, "-m", "timm_parallel.rank", current().name, str(folder)]
    oom_kills_before = hardware.oom_kills()
    with RunFolder(folder) as place, terminate_descendants():
        if config.parallel.has_ranks:
            ended = run_agent(command, config.parallel, folder / "logs" / ".agent", rendezvous)
        else:
            ended = _run_child(command, config.parallel, start_rank)
        ended.folder_problem = place.problem if place.is_gone() else ""
    ended.oom_kills = hardware.oom_kills() - oom_kills_before
    # Treat the run as stopped by a signal if all ranks exited with 128 + the same signal. The
    # signal may have reached only some ranks, even on another node. Those ranks then stop all
    # others.
    stops = {code - 128 for code in ended.exit_codes.values()}
    if ended.signal is None and len(stops) == 1 and stops <= set(STOP_SIGNALS):
        ended.signal = stops.pop()
    return ended


def _environment(parallel: ResolvedParallel) -> dict[str, str]:
    """Build the environment variables of the ranks. They include the number of threads, because
    torch reads that number at import time.
    """
    threads = str(parallel.threads_per_device)
    return with_project_on_path(os.environ) | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "RUN_STARTED_AT": str(process_start_time(os.getpid())),
        LAUNCHER: str(os.getpid()),
    }


def with_project_on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of environment variables with the project's folder on PYTHONPATH, so that
    ranks find the project in any folder.
    """
    path = os.pathsep.join(filter(None, [str(root()), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def _run_child(
    command: list[str], parallel: ResolvedParallel, start_rank: StartRank = start_command
) -> RankExits:
    """Run a command as the only process of a run, and return how it ended. The process shares the
    terminal, so that a debugger works in it.
    """
    ended = RankExits(world_size=1)
    report = open_memory()
    child = start_rank(command, _environment(parallel) | {REPORT: str(report.fileno())})
    # Kill the process by a timer, because the waiting Popen.wait cannot get a time limit later.
    killer = threading.Timer(GRACE_SECONDS, child.kill)
    has_limit = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal has_limit
        ended.signal = ended.signal or number
        # Set no time limit after Ctrl-C at a terminal, because the user may be in a debugger.
        is_interactive = number == signal.SIGINT and os.isatty(0)
        if not is_interactive and not has_limit:
            # Set `has_limit` before the timer starts, because a second signal may arrive meanwhile.
            has_limit = True
            killer.start()
        child.send_signal(number)

    with signal_handlers(forward):
        code = child.wait()
    killer.cancel()
    with report:
        ended.records = reported_failures(report.fileno())
    if code != 0:
        ended.exit_codes[0] = code
    return ended


def run_agent(
    command: list[str],
    parallel: ResolvedParallel,
    scratch: Path,
    rendezvous: Rendezvous | None = None,
) -> RankExits:
    """Run a command once per rank of this node under torch's elastic agent. Return how the ranks
    ended.

    `scratch`: new folder for the files of the agent, which is deleted at the end. `rendezvous`:
    connection to the other nodes, if any.
    """
    with imports_without_gc():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous_handler_registry.register(BACKEND, from_parameters)
    # For a run on one node, the key-value store takes any free port, even if MASTER_PORT is set.
    rendezvous = rendezvous or Rendezvous(NodeAddress(), parallel.start_timeout)
    nodes = rendezvous.endpoint.nodes
    # Silence the agent's error messages, because launch/job.py prints the failure.
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    # Set the number of restarts of the ranks, because torch would by default restart them 3 times.
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=parallel.devices // nodes,
        run_id=rendezvous.get_run_id(),
        rdzv_backend=BACKEND,
        rdzv_configs={"rendezvous": rendezvous},
        max_restarts=parallel.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        signals_to_handle=",".join(number.name for number in heeded_signals()),
    )
    ended = RankExits(world_size=launch.nproc_per_node if nodes == 1 else 0)
    # Set the environment variables of the ranks in this process, because the agent passes its own
    # environment to the ranks.
    os.environ.update(_environment(parallel) | listen_towards(rendezvous.endpoint.address))
    # Restore the signal handlers afterwards, because the agent does not.
    with signal_handlers(None):
        try:
            elastic_launch(launch, command[0])(*command[1:])
        except ChildFailedError as error:
            ended.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            # Catch the agent's exception for a signal here. It is a subclass of Exception, so Hydra
            # would ignore it and start the next job of a sweep.
            ended.signal = int(error.sigval)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if ended.exit_codes and nodes == 1:
        ended.records = _failures_of_last_attempt(rendezvous, parallel)
    return ended


def _failures_of_last_attempt(
    rendezvous: Rendezvous, parallel: ResolvedParallel
) -> list[dict[str, Any]]:
    """Read failure records from the key-value store of a run on one machine. Return those of the
    last attempt that has any.
    """
    for attempt in range(parallel.max_restarts, -1, -1):
        store = ranks_store(rendezvous.store, attempt)
        if records := published_failures(store, parallel.devices):
            return records
    return []
