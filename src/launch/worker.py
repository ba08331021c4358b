"""One rank: read the frozen config, join the group, run, leave. `python -m src.launch.worker <run folder>`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.schema import Config
from src.launch.ranks import Ranks, ranks_from_environment
from src.process import (
    STOP_SIGNALS,
    Stopped,
    die_with_parent,
    exit_after_stop_signal,
    ignore_stop_signals,
    stop_handler,
)
from src.records import write_json

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
STUCK_SECONDS = 8.0  # after a signal, for a rank that waits in a collective for ranks that have left
STATUSES = {"OutOfMemoryError": "out_of_memory", "NotFiniteError": "not_finite"}


def main(folder: Path) -> int:
    """Run the rank that this process is, on a run folder prepared by launch/job.py. Returns the exit code."""
    from src.config.compose import read_frozen

    ranks = ranks_from_environment(os.environ) or Ranks()
    config = read_frozen(folder)
    if config.parallel.strategy != "ddp":
        return run_rank(config, folder, ranks, None)
    from src.launch.outside import open_store

    return run_rank(config, folder, ranks, open_store(ranks))


def run_rank(config: Config, folder: Path, ranks: Ranks, store: Store | None) -> int:
    """Run one rank in this process. A failure is recorded in `logs/failure_rank_N.json`, not raised."""
    die_with_parent()
    exit_after_stop_signal(STUCK_SECONDS)
    own_log = folder / "logs" / f"rank_{ranks.rank}.log"
    _set_up_output(own_log, ranks)
    for number in STOP_SIGNALS:
        signal.signal(number, stop_handler)
    try:
        return _run_recorded(config, folder, ranks, store, own_log)
    except Stopped as stop:
        log.info("stopped by %s", stop)
        return 128 + stop.number


def _run_recorded(config: Config, folder: Path, ranks: Ranks, store: Store | None, own_log: Path) -> int:
    try:
        from src.run import run  # here, because it imports timm, and what it raises belongs into the record

        run(config, folder, ranks, store)
        return 0
    except Exception as error:
        ignore_stop_signals()  # the agent ends the other ranks of a failed job; this one is still writing down why
        log.error("rank %d failed\n%s", ranks.rank, traceback.format_exc())
        return _record_failure(folder, ranks, error, own_log)


def _set_up_output(own_log: Path, ranks: Ranks) -> None:
    """Every rank logs to its own file; rank 0 alone also has the console.

    For other ranks the file descriptors themselves are redirected, so that what C++ prints lands there too.
    """
    own_log.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(own_log)]
    if ranks.is_first:
        console = logging.StreamHandler(sys.stdout)
        console.addFilter(lambda record: record.levelno < logging.ERROR)  # the launcher shows the first failure
        console.setFormatter(logging.Formatter("%(message)s"))
        handlers.append(console)
    else:
        file = os.open(own_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.getLogger("src").setLevel(logging.INFO)  # libraries speak up only when something is wrong
    logging.captureWarnings(True)
    faulthandler.enable(all_threads=True)


def _record_failure(folder: Path, ranks: Ranks, error: Exception, own_log: Path) -> int:
    """Leave a record of `error` for whoever started this rank, and return the exit code: 2 for what the user can mend."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    kind, text = type(error).__name__, " ".join(str(error).split())[:500]
    refused = kind == "RefusedError"
    record = {
        "rank": ranks.rank,
        "time": time.time(),
        "status": "refused" if refused else STATUSES.get(kind, "failed"),
        "reason": text if refused else f"rank {ranks.rank}: {kind}: {text} ({Path(last.filename).name}:{last.lineno})",
        "exception": kind,
        "traceback": traceback.format_exc(),
        "log": str(own_log),
        "is_echo": kind in ("DistBackendError", "DistNetworkError") or "gloo" in text.lower(),
        "exit_code": 2 if refused else 1,
    }
    write_json(folder / "logs" / f"failure_rank_{ranks.rank}.json", json.loads(json.dumps(record)))
    return 2 if refused else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
