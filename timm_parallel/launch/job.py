"""Launcher of one run. It writes the files that the ranks read, starts the ranks, and records how
they ended.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from timm_parallel.app import current, find_app
from timm_parallel.cluster.kubernetes import write_manifest
from timm_parallel.cluster.slurm import write_script
from timm_parallel.config.compose import asks_for_accumulate, load_config, save_config
from timm_parallel.config.resolve import halve_batches
from timm_parallel.faults.failure import RankExits, failure_files, failure_text, first_failure
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch.supervisor import StartRank, run_ranks, start_command
from timm_parallel.machine.files import lock_folder, write_json
from timm_parallel.machine.process import SAFE_PATH, process_start_time
from timm_parallel.record.environment import environment_facts, run_seconds, write_code_diff
from timm_parallel.record.result import Result, read_segments, read_status, write_result


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


def main(folder: Path, start_rank: StartRank = start_command) -> int:
    """Lock a run folder and run its saved config, as one job of a sweep. Return the exit code.
    `start_rank`: function that starts the rank of a run with one process.
    """
    with lock_folder(folder):
        return run_job(load_config(folder), folder, start_rank)


def run_job(config: ResolvedConfig, folder: Path, start_rank: StartRank = start_command) -> int:
    """Train with a config in child processes. For Slurm or Kubernetes, write the file of the job
    instead. Return the exit code. `start_rank`: function that starts the rank of a run with one
    process.
    """
    if config.cluster.scheduler != "local":
        save_config(config, folder)
        write_job_file = write_script if config.cluster.scheduler == "slurm" else write_manifest
        write_job_file(config, folder)
        return 0
    prepare(config, folder)
    ended = run_ranks(config, folder, start_rank=start_rank)
    config, ended = repeat_until_it_fits(config, folder, ended)
    return conclude(config, folder, ended)


def repeat_until_it_fits(
    config: ResolvedConfig, folder: Path, ended: RankExits
) -> tuple[ResolvedConfig, RankExits]:
    """If train.accumulate=auto, start all ranks again with half the batch size, as long as they run
    out of memory and the batch can be halved. Return the config of the last attempt, and how its
    ranks ended.

    `ended`: how the ranks of the first attempt ended.
    """
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
        _try_to_record(config, folder, ended, console, "interrupted", f"stopped by {name}")
        hint = "No checkpoint was saved; to start again, give the same command"
        if any((folder / "checkpoints").glob("*.pt")):
            hint = f"Continue with: python train.py {shlex.quote(f'resume={folder}')}"
        print(f"Stopped by {name}. {hint}", file=console, flush=True)
        return 128 + ended.signal
    failure = first_failure(folder, ended)
    # Print the failure before writing result.json, because the disk may be full.
    print(failure_text(failure), file=console, flush=True)
    _try_to_record(config, folder, ended, console, failure["status"], failure["reason"], failure)
    return int(failure["exit_code"]) if ended.signal is None else 128 + ended.signal


def record_interruption(config: ResolvedConfig, folder: Path, number: signal.Signals) -> None:
    """Write result.json for a run that signal `number` stopped before its first rank started. An
    existing result.json is kept, because it shows that the run has ended.
    """
    if not (folder / "result.json").exists():
        record_end(config, folder, "interrupted", f"stopped by {number.name}")


def _try_to_record(
    config: ResolvedConfig, folder: Path, ended: RankExits, console: TextIO, *outcome: Any
) -> None:
    """Write result.json, unless the run folder was deleted or moved. If the file cannot be written,
    print a line. `outcome`: status, reason and failure record of the run, which are the last
    arguments of `record_end`.
    """
    if ended.folder_problem:
        _remove_leftovers(folder)
        return
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


if __name__ == "__main__":
    find_app(sys.argv[1])
    sys.exit(main(Path(sys.argv[2])))
