"""One job, from a checked config and a claimed run folder to result.json and an exit code."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from src.engine.config.compose import freeze, read_frozen
from src.engine.launch.failure import failure_files, failure_text, first_failure
from src.engine.launch.kubernetes import write_manifest
from src.engine.launch.slurm import write_script
from src.engine.launch.supervisor import Ended, run_ranks
from src.engine.machine.files import write_json
from src.engine.machine.lock import own
from src.engine.machine.process import SAFE_PATH
from src.engine.record.environment import environment_facts
from src.engine.record.result import Result, read_status, write_result
from src.schema import ResolvedConfig


def job_command(folder: Path) -> list[str]:
    """The command that runs a frozen job in a process of its own, for sweeps."""
    return [sys.executable, *SAFE_PATH, "-m", "src.engine.launch.job", str(folder)]


def run_job(config: ResolvedConfig, folder: Path) -> int:
    """Run a resolved config in processes of its own, or write the file by which a scheduler does. Returns the exit code.

    `folder` holds everything that it leaves.
    """
    if config.cluster.scheduler != "local":
        freeze(config, folder)
        (write_script if config.cluster.scheduler == "slurm" else write_manifest)(config, folder)
        return 0
    prepare(config, folder)
    return conclude(config, folder, run_ranks(config, folder))


def prepare(config: ResolvedConfig, folder: Path) -> None:
    """Put into the run folder what ranks read, and remove what an earlier attempt said of its end."""
    for stale in [folder / "result.json", *failure_files(folder)]:
        stale.unlink(missing_ok=True)
    freeze(config, folder)
    write_json(folder / "environment.json", environment_facts(config))


def conclude(config: ResolvedConfig, folder: Path, ended: Ended, console: TextIO | None = None) -> int:
    """Make sure that result.json says how the job ended, say so on `console` (stderr), and return the exit code."""
    console = console or sys.stderr
    if read_status(folder) == "done" and (ended.signal is not None or not ended.exit_codes):
        return 0  # a signal that has found the ranks leaving has stopped nothing
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name
        record_end(config, folder, "interrupted", f"stopped by {name}")
        saved = any((folder / "checkpoints").glob("*.pt"))
        again = f"Go on with: python train.py {shlex.quote(f'resume={folder}')}" if saved else ""
        print(f"Stopped by {name}. {again}", file=console, flush=True)
        return 128 + ended.signal
    failure = first_failure(folder, ended)
    record_end(config, folder, failure["status"], failure["reason"], failure)
    print(failure_text(failure), file=console, flush=True)
    return int(failure["exit_code"])


def record_end(
    config: ResolvedConfig, folder: Path, status: str, reason: str, failure: dict[str, Any] | None = None
) -> None:
    """Write the result.json of a run that has not been able to."""
    parallel = config.parallel
    write_result(
        folder,
        Result(
            status="failed" if status == "refused" else status,
            reason=reason,
            strategy=parallel.strategy,
            accelerator=parallel.accelerator,
            devices=parallel.devices,
            nodes=config.cluster.nodes,
            model=config.model.name,
            batch_size=config.global_batch,
            tags=config.tags,
            failure=failure,
        ),
    )


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    with own(run_folder):
        sys.exit(run_job(read_frozen(run_folder), run_folder))
