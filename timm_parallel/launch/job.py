"""Launcher of one run. It writes the files that the ranks read, starts the ranks of this node,
waits until they exit, and records how they ended. ddp and fsdp use torch's elastic agent. single
and dp use one child process.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from timm_parallel.app import current, find_app, root
from timm_parallel.cluster.kubernetes import write_manifest
from timm_parallel.cluster.slurm import write_script
from timm_parallel.config.compose import asks_for_accumulate, load_config, save_config
from timm_parallel.config.resolve import halve_batches
from timm_parallel.faults.failure import (
    REPORT,
    RankExits,
    failure_files,
    failure_text,
    first_failure,
    published_failures,
    reported_failures,
)
from timm_parallel.keys import ResolvedConfig, ResolvedParallel
from timm_parallel.launch.rendezvous import (
    BACKEND,
    Rendezvous,
    from_parameters,
    listen_towards,
    ranks_store,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.files import RunFolder, lock_folder, write_json
from timm_parallel.machine.imports import slow_imports
from timm_parallel.machine.platform import STOP_SIGNALS, open_memory
from timm_parallel.machine.process import (
    LAUNCHER,
    SAFE_PATH,
    process_start_time,
    terminate_descendants,
)
from timm_parallel.machine.ranks import NodeAddress
from timm_parallel.machine.signals import heeded_signals, signal_handlers
from timm_parallel.record.environment import environment_facts, run_seconds, write_code_diff
from timm_parallel.record.result import Result, read_segments, read_status, write_result

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


def job_command(folder: Path) -> list[str]:
    """Build the command with which a sweep runs the saved config of a run folder in a separate
    process.
    """
    return [
        sys.executable,
        *SAFE_PATH,
        "-m",
        "timm_parallel.launch.job",
        current().name,
        str(folder),
    ]


def main(folder: Path) -> int:
    """Lock a run folder and run its saved config, as one job of a sweep. Return the exit code."""
    with lock_folder(folder):
        return run_job(load_config(folder), folder)


def run_job(config: ResolvedConfig, folder: Path) -> int:
    """Train with a config in child processes. For Slurm or Kubernetes, write the file of the job
    instead. Return the exit code.
    """
    if config.cluster.scheduler != "local":
        save_config(config, folder)
        write_job_file = write_script if config.cluster.scheduler == "slurm" else write_manifest
        write_job_file(config, folder)
        return 0
    prepare(config, folder)
    config, ended = run_until_it_fits(config, folder)
    return conclude(config, folder, ended)


def run_until_it_fits(
    config: ResolvedConfig, folder: Path, **start: Any
) -> tuple[ResolvedConfig, RankExits]:
    """Run the ranks of this node. If train.accumulate=auto, start them again with half the batch
    size, as long as they run out of memory and the batch can be halved. Return the config of the
    last attempt, and how its ranks ended.

    `start`: arguments of `run_ranks` for the first attempt.
    """
    ended = run_ranks(config, folder, **start)
    while (half := _after_out_of_memory(config, folder, ended)) is not None:
        config = half
        print(
            "train.accumulate=auto: out of memory, so all ranks start again with "
            f"train.accumulate={config.train.accumulate} and batches of {config.global_batch} "
            "images: an optimizer step has as many images as before",
            flush=True,
        )
        prepare(config, folder)
        # Start the ranks as commands, because a forked rank can start only once.
        ended = run_ranks(config, folder)
    return config, ended


def _after_out_of_memory(
    config: ResolvedConfig, folder: Path, ended: RankExits
) -> ResolvedConfig | None:
    """Build the config of the next attempt with half the batch size. Return None if the run did not
    run out of memory, if train.accumulate is not auto, or if the run has a checkpoint.
    """
    if ended.signal is not None or not ended.exit_codes or not asks_for_accumulate(folder):
        return None
    has_checkpoint = any((folder / "checkpoints").glob("*.pt"))
    if has_checkpoint or first_failure(folder, ended)["status"] != "out_of_memory":
        return None
    return halve_batches(config)


def prepare(config: ResolvedConfig, folder: Path) -> None:
    """Write config.yaml and environment.json into the run folder for the ranks. Delete result.json
    and failure records of an earlier attempt.
    """
    # Seconds of this process are part of this attempt.
    seconds = run_seconds(folder) + time.perf_counter() - process_start_time(os.getpid())
    for stale in [folder / "result.json", *failure_files(folder)]:
        stale.unlink(missing_ok=True)
    save_config(config, folder)
    environment = environment_facts(config) | {"seconds_before": seconds}
    write_json(folder / "environment.json", environment)
    write_code_diff(folder, environment["dirty"])


def conclude(
    config: ResolvedConfig, folder: Path, ended: RankExits, console: TextIO | None = None
) -> int:
    """Write into result.json why a run stopped or failed, and print the reason. Return the exit
    code.

    `ended`: how the ranks ended. `console`: stream to print to, stderr by default.
    """
    console = console or sys.stderr
    # Ignore a signal or an error of ranks that were exiting after the run had finished.
    if read_status(folder) == "done":
        return 0
    if ended.signal is not None and not ended.folder_problem:
        name = signal.Signals(ended.signal).name
        _try_to_record(config, folder, console, "interrupted", f"stopped by {name}")
        hint = "No checkpoint was saved; to start again, give the same command"
        if any((folder / "checkpoints").glob("*.pt")):
            hint = f"Continue with: python train.py {shlex.quote(f'resume={folder}')}"
        print(f"Stopped by {name}. {hint}", file=console, flush=True)
        return 128 + ended.signal
    failure = first_failure(folder, ended)
    # Print the failure before writing result.json, because the disk may be full.
    print(failure_text(failure), file=console, flush=True)
    if ended.folder_problem:
        _remove_leftovers(folder)
    else:
        _try_to_record(config, folder, console, failure["status"], failure["reason"], failure)
    return int(failure["exit_code"]) if ended.signal is None else 128 + ended.signal


def _try_to_record(config: ResolvedConfig, folder: Path, console: TextIO, *outcome: Any) -> None:
    """Write result.json. If the file cannot be written, print a line. `outcome`: status, reason and
    failure record of the run, which are the last arguments of `record_end`.
    """
    try:
        record_end(config, folder, *outcome)
    except OSError as error:
        print(
            f"{folder / 'result.json'}: could not be written ({error.strerror or error})",
            file=console,
            flush=True,
        )


def _remove_leftovers(folder: Path) -> None:
    """Delete files that a rank wrote into the run folder while the user was deleting the folder
    with `rm -rf`, which then left the folder behind.
    """
    # Delete nothing if the folder has a config.yaml, because then another run uses the folder's
    # name.
    if (folder / "config.yaml").exists():
        return
    for path in failure_files(folder):
        path.unlink(missing_ok=True)
    for path in (folder / "checkpoints", folder / "logs", folder):
        # Skip a folder that is not empty or no longer exists.
        with suppress(OSError):
            path.rmdir()


def record_end(
    config: ResolvedConfig,
    folder: Path,
    status: str,
    reason: str,
    failure: dict[str, Any] | None = None,
) -> None:
    """Write result.json for a run that was stopped or failed, with its status and the reason. A
    rank writes result.json only for a run that has ended normally.
    """
    parallel, segments = config.parallel, read_segments(folder)
    result = Result(
        status="failed" if status == "refused" else status,
        reason=reason,
        strategy=parallel.strategy,
        accelerator=parallel.accelerator,
        devices=parallel.devices,
        nodes=config.cluster.nodes,
        model=config.model.name,
        batch_size=config.global_batch,
        accumulate=config.train.accumulate,
        tags=config.tags,
        started=segments[0]["started"] if segments else None,
        segments=segments,
        failure=failure,
        seconds={"total": time.perf_counter() - process_start_time(os.getpid())},
    )
    write_result(folder, result)


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
    with closing(RunFolder(folder)) as place, terminate_descendants():
        if config.parallel.has_ranks:
            ended = run_agent(command, config.parallel, folder / "logs" / ".agent", rendezvous)
        else:
            ended = _run_child(command, config.parallel, start_rank)
        ended.folder_problem = place.problem()
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
    with slow_imports():
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


if __name__ == "__main__":
    find_app(sys.argv[1])
    sys.exit(main(Path(sys.argv[2])))
