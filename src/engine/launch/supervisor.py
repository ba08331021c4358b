"""Starts the ranks of one job as processes and waits for them: torch's elastic agent for ddp, a plain child otherwise.

Both run the same command, `python -m src.run <run folder>`. Commands and not functions, because the agent
hangs for ever on a function rank that ends with exit code 0 without returning.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from src.engine.config.compose import ROOT
from src.engine.launch.rendezvous import Rendezvous, listen_towards, register_backend
from src.engine.machine import hardware
from src.engine.machine.platform import STOP_SIGNALS, WINDOWS, pass_on
from src.engine.machine.process import LAUNCHER, SAFE_PATH, imports_without_collector, no_survivors, process_started_at
from src.engine.machine.ranks import Place
from src.schema import ResolvedConfig, ResolvedParallel

GRACE_SECONDS = 30.0  # for a rank to save and leave after a signal, before it is killed; torch's agent gives as many
ENDED_BY_AGENT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of ranks that it ends because another has failed


@dataclass
class Ended:
    """How the ranks ended: exit codes of those that did not end with 0 (negative: killed by that signal)."""

    signal: int | None = None  # the signal that stopped this process while it waited
    exit_codes: dict[int, int] = field(default_factory=dict)
    world_size: int = 0  # ranks that were started and have all ended; 0 where others ran elsewhere
    # Processes that the kernel killed meanwhile for want of memory, of this run or of others on the machine.
    oom_kills: int = 0


def run_ranks(config: ResolvedConfig, folder: Path, rendezvous: Rendezvous | None = None) -> Ended:
    """Start this node's ranks of a resolved config on its run folder and wait until none is left.

    `rendezvous`: with the other nodes; None where there are none.
    """
    command = [sys.executable, *SAFE_PATH, "-m", "src.run", str(folder)]
    before = hardware.oom_kills()
    with no_survivors():
        if config.parallel.has_ranks:
            ended = run_agent(command, config.parallel, folder / "logs" / ".agent", rendezvous)
        else:
            ended = _run_child(command, config.parallel)
    ended.oom_kills = hardware.oom_kills() - before
    stops = {code - 128 for code in ended.exit_codes.values()}
    if ended.signal is None and len(stops) == 1 and stops <= set(STOP_SIGNALS):
        ended.signal = stops.pop()  # it has reached the ranks alone, or those of another node, and all have stopped
    return ended


def _environment(parallel: ResolvedParallel) -> dict[str, str]:
    """That of ranks; thread pools read theirs once, when torch is imported."""
    threads = str(parallel.threads_per_device)
    return with_project_on_path(os.environ) | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "RUN_STARTED_AT": str(process_started_at(os.getpid())),
        LAUNCHER: str(os.getpid()),
        **({"USE_LIBUV": "0"} if WINDOWS else {}),  # torch's store there is built without it
    }


def with_project_on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` in which `python -m src.…` works from any folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def _run_child(command: list[str], parallel: ResolvedParallel) -> Ended:
    """`command` as one process, in our process group, so that a debugger in it has the terminal."""
    ended = Ended(world_size=1)
    child = subprocess.Popen(command, env=_environment(parallel))
    at_last = threading.Timer(GRACE_SECONDS, child.kill)  # a wait that has begun cannot be given a limit any more

    def forward(number: int, frame: FrameType | None) -> None:
        ended.signal = ended.signal or number
        at_a_prompt = number == signal.SIGINT and os.isatty(0)  # a person, who may be in a debugger
        if not at_a_prompt and at_last.ident is None:
            at_last.start()
        pass_on(number, child)

    with signal_handlers(forward):
        code = child.wait()
    at_last.cancel()
    if code != 0:
        ended.exit_codes[0] = code
    return ended


def run_agent(
    command: list[str], parallel: ResolvedParallel, scratch: Path, rendezvous: Rendezvous | None = None
) -> Ended:
    """`command` as each rank of this node, under torch's elastic agent.

    `scratch`: a folder to be made and removed; without one, every launch leaves a folder in the system's temporary one.
    """
    with imports_without_collector():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous = rendezvous or Rendezvous(Place(), parallel.start_timeout)  # a free port, whatever MASTER_PORT says
    place = rendezvous.place
    for name in ("agent.server.api", "multiprocessing.api"):  # launch/job.py tells what failed
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        nproc_per_node=parallel.devices // place.nodes,
        run_id=rendezvous.get_run_id(),
        rdzv_backend=register_backend(),
        rdzv_configs={"rendezvous": rendezvous},
        max_restarts=parallel.max_restarts,  # the library's default is 3
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        signals_to_handle=",".join(number.name for number in STOP_SIGNALS),
    )
    ended = Ended(world_size=launch.nproc_per_node if place.nodes == 1 else 0)
    os.environ.update(_environment(parallel) | listen_towards(place.address))  # the agent hands its own to the ranks
    with signal_handlers(None):  # the agent installs handlers of its own and leaves them behind
        try:
            elastic_launch(launch, command[0])(*command[1:])
        except ChildFailedError as error:
            ended.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:  # an Exception: Hydra would swallow it and start the next job of a sweep
            ended.signal = int(error.sigval)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return ended


@contextmanager
def signal_handlers(handler: object) -> Iterator[None]:
    """Install `handler` for the stop signals (None: leave them as they are), and put back what was there."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        if handler is not None:
            for number in STOP_SIGNALS:
                signal.signal(number, handler)  # type: ignore[arg-type]
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
