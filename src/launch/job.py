"""One job, from a checked config and a claimed run folder to result.json and an exit code."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

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


def conclude(config: Config, folder: Path, ended: Ended) -> int:
    """Make sure that result.json says how the job ended, tell the console, and return the exit code."""
    result = _own_result(folder)
    if result is not None and result.status == "done" and not ended.exit_codes:
        return 0
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name
        _record(config, folder, "interrupted", f"stopped by {name}")
        print(f"Stopped by {name}. Go on with: python train.py resume={folder}", file=sys.stderr)
        return 128 + ended.signal
    failure = first_failure(folder, ended.exit_codes)
    _record(config, folder, failure.get("status", "failed"), failure["reason"], failure)
    print(failure_text(failure), file=sys.stderr)
    return int(failure.get("exit_code", 1))


def first_failure(folder: Path, exit_codes: dict[int, int]) -> dict[str, Any]:
    """The failure that came first, not its echo on the ranks that waited for it.

    A rank killed by a signal leaves no record, but others then fail in a collective: so the killed rank goes first,
    then the earliest recorded exception that is not itself a lost connection.
    """
    records = [json.loads(path.read_text()) for path in sorted((folder / "logs").glob("failure_rank_*.json"))]
    recorded = {record["rank"] for record in records}
    for rank, code in sorted(exit_codes.items()):
        if rank not in recorded and code not in (0, -signal.SIGTERM):
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            hint = " (out of memory? the kernel kills with SIGKILL)" if code == -signal.SIGKILL else ""
            return {"rank": rank, "reason": f"rank {rank} was {how}{hint}" if code < 0 else f"rank {rank} {how}"}
    if records:
        return min(records, key=lambda record: (record["is_echo"], record["time"]))
    return {"rank": None, "reason": "the ranks ended without leaving a result"}


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
