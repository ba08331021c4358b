"""Start the ranks of a run on this node and wait for them: under torch's elastic agent for ddp,
else as one process.
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

from timm_parallel.faults.failure import REPORT, RankExits, reported_failures
from timm_parallel.faults.heartbeat import published_failures
from timm_parallel.faults.run_folder import RunFolder
from timm_parallel.keys import ResolvedConfig, ResolvedParallel
from timm_parallel.launch.rendezvous import (
    BACKEND,
    Rendezvous,
    from_parameters,
    listen_towards,
    ranks_store,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.platform import STOP_SIGNALS, open_memory
from timm_parallel.machine.process import (
    LAUNCHER,
    SAFE_PATH,
    imports_without_gc,
    process_start_time,
    terminate_descendants,
)
from timm_parallel.machine.ranks import NodeAddress
from timm_parallel.machine.signals import heeded_signals, signal_handlers
from timm_parallel.project import current, root

# Seconds for a rank to save and exit after a signal, before it is killed. torch's agent waits
# equally long.
GRACE_SECONDS = 30.0


class Child(Protocol):
    """Process of a rank, with the methods of subprocess.Popen that the launcher calls."""

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


StartRank = Callable[[list[str], dict[str, str]], Child]  # from the rank's command and environment


def start_command(command: list[str], environment: dict[str, str]) -> Child:
    return subprocess.Popen(command, env=environment, pass_fds=[int(environment[REPORT])])


def run_ranks(
    config: ResolvedConfig,
    folder: Path,
    rendezvous: Rendezvous | None = None,
    start_rank: StartRank = start_command,
) -> RankExits:
    """Start the ranks of this node, wait until all have exited, and return their exit codes.

    `rendezvous`: connects this node to the other nodes, if any. `start_rank`: starts the rank of a
    run with one process.
    """
    # A command instead of a function: the agent hangs if a function exits with code 0 without
    # returning.
    command = [sys.executable, *SAFE_PATH, "-m", "timm_parallel.rank", current().name, str(folder)]
    oom_kills_before = hardware.oom_kills()
    with RunFolder(folder) as place, terminate_descendants():
        if config.parallel.has_ranks:
            ended = run_agent(command, config.parallel, folder / "logs" / ".agent", rendezvous)
        else:
            ended = _run_child(command, config.parallel, start_rank)
        ended.folder_problem = place.problem if place.is_gone() else ""
    ended.oom_kills = hardware.oom_kills() - oom_kills_before
    # A signal may reach only some ranks, perhaps of another node. They stop all ranks, and exit
    # with 128 + signal.
    stops = {code - 128 for code in ended.exit_codes.values()}
    if ended.signal is None and len(stops) == 1 and stops <= set(STOP_SIGNALS):
        ended.signal = stops.pop()
    return ended


def _environment(parallel: ResolvedParallel) -> dict[str, str]:
    """Return the environment variables of the ranks. The numbers of threads are among them: torch
    reads them at import.
    """
    threads = str(parallel.threads_per_device)
    return with_project_on_path(os.environ) | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "RUN_STARTED_AT": str(process_start_time(os.getpid())),
        LAUNCHER: str(os.getpid()),
    }


def with_project_on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` with the project on PYTHONPATH, so that `python -m src.…`
    works from any folder.
    """
    path = os.pathsep.join(filter(None, [str(root()), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def _run_child(
    command: list[str], parallel: ResolvedParallel, start_rank: StartRank = start_command
) -> RankExits:
    """Run `command` as one process and return its exit. It shares the terminal, so that a debugger
    works in it.
    """
    ended = RankExits(world_size=1)
    report = open_memory()
    child = start_rank(command, _environment(parallel) | {REPORT: str(report.fileno())})
    # Popen.wait below cannot get a time limit after it has begun.
    killer = threading.Timer(GRACE_SECONDS, child.kill)
    has_limit = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal has_limit
        ended.signal = ended.signal or number
        # A person who presses Ctrl-C at a terminal may be in a debugger, so no limit applies.
        is_interactive = number == signal.SIGINT and os.isatty(0)
        if not is_interactive and not has_limit:
            # Set first, because a second signal may arrive during start().
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
    """Run `command` once per rank of this node under torch's elastic agent, whose files are in the
    new folder `scratch`.
    """
    with imports_without_gc():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous_handler_registry.register(BACKEND, from_parameters)
    # Without other nodes the store takes a free port, whatever MASTER_PORT is.
    rendezvous = rendezvous or Rendezvous(NodeAddress(), parallel.start_timeout)
    nodes = rendezvous.endpoint.nodes
    for name in ("agent.server.api", "multiprocessing.api"):  # launch/job.py prints the failure
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=parallel.devices // nodes,
        run_id=rendezvous.get_run_id(),
        rdzv_backend=BACKEND,
        rdzv_configs={"rendezvous": rendezvous},
        max_restarts=parallel.max_restarts,  # the library's default is 3
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        signals_to_handle=",".join(number.name for number in heeded_signals()),
    )
    ended = RankExits(world_size=launch.nproc_per_node if nodes == 1 else 0)
    # The agent passes its own environment to the ranks.
    os.environ.update(_environment(parallel) | listen_towards(rendezvous.endpoint.address))
    # The agent installs signal handlers and does not restore the previous ones.
    with signal_handlers(None):
        try:
            elastic_launch(launch, command[0])(*command[1:])
        except ChildFailedError as error:
            ended.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except (
            SignalException
        ) as error:  # an Exception: Hydra would swallow it and start the next job of a sweep
            ended.signal = int(error.sigval)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if ended.exit_codes and nodes == 1:
        ended.records = _failures_of_last_attempt(rendezvous, parallel)
    return ended


def _failures_of_last_attempt(
    rendezvous: Rendezvous, parallel: ResolvedParallel
) -> list[dict[str, Any]]:
    """Return the failure records in the store of a run on this machine."""
    for attempt in range(parallel.max_restarts, -1, -1):
        store = ranks_store(rendezvous.store, attempt)
        if records := published_failures(store, parallel.devices):
            return records
    return []
