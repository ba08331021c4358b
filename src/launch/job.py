"""One job, from a checked config and a claimed run folder to result.json and an exit code."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from src.config.compose import freeze, read_frozen
from src.config.schema import Config
from src.environment import write_environment
from src.launch.agent import Ended, run_ranks
from src.records import Result, read_result, write_result


def job_command(folder: Path) -> list[str]:
    """The command that runs a frozen job in a process of its own, for sweeps."""
    return [sys.executable, "-m", "src.launch.job", str(folder)]


def run_job(config: Config, folder: Path) -> int:
    """Run a resolved config in processes of its own; `folder` holds everything it leaves. Returns the exit code."""
    prepare(config, folder)
    ended = run_ranks(config, folder)
    return conclude(config, folder, ended)


def prepare(config: Config, folder: Path) -> None:
    """Put into the run folder what ranks read, and remove what an earlier attempt said of its end."""
    for stale in [folder / "result.json", *(folder / "logs").glob("failure_rank_*.json")]:
        stale.unlink(missing_ok=True)
    freeze(config, folder)
    write_environment(config, folder)


def conclude(config: Config, folder: Path, ended: Ended, console: TextIO | None = None) -> int:
    """Make sure that result.json says how the job ended, say so on `console` (stderr), and return the exit code."""
    console = console or sys.stderr
    result = _own_result(folder)
    if result is not None and result.status == "done" and not ended.exit_codes:
        return 0
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name
        _record(config, folder, "interrupted", f"stopped by {name}")
        saved = any((folder / "checkpoints").glob("*.pt"))
        print(f"Stopped by {name}. " + (f"Go on with: python train.py resume={folder}" if saved else ""), file=console)
        return 128 + ended.signal
    failure = first_failure(folder, ended.exit_codes)
    _record(config, folder, failure.get("status", "failed"), failure["reason"], failure)
    print(failure_text(failure), file=console, flush=True)
    return int(failure.get("exit_code", 1))


def first_failure(folder: Path, exit_codes: dict[int, int]) -> dict[str, Any]:
    """The failure that caused the others, not its echo on the ranks that waited for it.

    In this order: the earliest recorded exception that is not a lost connection; a rank that a signal killed (it leaves
    no record, and its peers record a lost connection); one that left without a record; the earliest lost connection.
    """
    records = [json.loads(path.read_text()) for path in sorted((folder / "logs").glob("failure_rank_*.json"))]
    records.sort(key=lambda record: (record["is_echo"], record["time"]))
    if records and not records[0]["is_echo"]:
        return dict(records[0])
    silent = {rank: code for rank, code in exit_codes.items() if rank not in {record["rank"] for record in records}}
    for rank, code in sorted(silent.items(), key=lambda item: item[1]):  # killed ones, with negative codes, first
        if code in (-signal.SIGTERM, 128 + signal.SIGTERM):  # the agent ended it because another had failed
            continue
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        hint = " (out of memory? the kernel kills with SIGKILL)" if code == -signal.SIGKILL else ""
        log = folder / "logs" / f"rank_{rank}.log"
        return {"rank": rank, "reason": f"rank {rank} {how}{hint}", "log": str(log)}
    return dict(records[0]) if records else {"rank": None, "reason": "the ranks ended without leaving a result"}


def failure_text(failure: dict[str, Any]) -> str:
    """What a tired person needs: who failed first, why, where the log is."""
    lines = [f"Failed: {failure['reason']}"]
    if failure.get("traceback") and failure.get("status") != "refused":
        lines.insert(0, failure["traceback"].rstrip())
    if failure.get("log"):
        lines.append(f"Log: {failure['log']}")
    return "\n".join(lines)


def _own_result(folder: Path) -> Result | None:
    try:
        return read_result(folder)
    except ValueError:
        return None


def _record(config: Config, folder: Path, status: str, reason: str, failure: dict[str, Any] | None = None) -> None:
    parallel = config.parallel
    write_result(
        folder,
        Result(
            status="failed" if status == "refused" else status,
            reason=reason,
            strategy=parallel.strategy,
            accelerator=parallel.accelerator,
            devices=int(parallel.devices),
            model=config.model.name,
            batch_size=config.data.batch_size,
            failure=failure,
        ),
    )


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    sys.exit(run_job(read_frozen(run_folder), run_folder))
