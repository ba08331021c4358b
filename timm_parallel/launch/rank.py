"""Process of one rank, started by timm_parallel/rank.py: sets up logs, signals and the watchdog,
then trains.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from timm_parallel.config.compose import load_config
from timm_parallel.faults.failure import (
    failure_record,
    log_file,
    report_descriptor,
    report_failure,
    write_failure,
)
from timm_parallel.faults.heartbeat import publish_failure
from timm_parallel.faults.liveness import liveness
from timm_parallel.faults.watchdog import Watchdog
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch.rendezvous import open_store
from timm_parallel.machine.process import imports_without_gc, kill_on_parent_exit
from timm_parallel.machine.ranks import Ranks, ranks_from_environment
from timm_parallel.machine.secrets import HidingFormatter
from timm_parallel.machine.signals import (
    Stopped,
    exit_after_stop_signal,
    heeded_signals,
    ignore_stop_signals,
    stop_handler,
)
from timm_parallel.project import current

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
# The work of a rank. Callers pass it in, because the library does not import your code.
RankMain = Callable[[ResolvedConfig, Path, Ranks, "Store | None"], None]
# Seconds after a signal until a rank exits that waits in a collective for ranks that have exited.
STUCK_SECONDS = 8.0


def main(folder: Path, run: RankMain) -> int:
    """Call `run` as the rank that the environment names, with the config saved in `folder`. Return
    the exit code.
    """
    ranks = ranks_from_environment(os.environ) or Ranks()
    config = load_config(folder)
    return run_rank(
        run, config, folder, ranks, open_store(ranks) if config.parallel.has_ranks else None
    )


def run_rank(
    run: RankMain,
    config: ResolvedConfig,
    folder: Path,
    ranks: Ranks,
    store: Store | None,
    before_exit: Callable[[], object] | None = None,
) -> int:
    """Call `run` under the watchdog, with logs and failure records. Return the exit code.
    `before_exit`: called by the watchdog.
    """
    kill_on_parent_exit()
    report_descriptor()
    keep_compiled_code_private()
    stacks = _set_up_output(log_file(folder, ranks.rank), ranks)
    for number in heeded_signals():
        signal.signal(number, stop_handler)
    try:
        with Watchdog(config.parallel, folder, ranks, store, stacks, before_exit) as heartbeats:
            # Before training there is nothing to save, and without its peers no rank can save.
            exit_after_stop_signal(
                STUCK_SECONDS, lambda: stop_handler.request is None or heartbeats.peer_has_left()
            )
            try:
                with imports_without_gc():
                    from torch.optim.optimizer import register_optimizer_step_post_hook
                register_optimizer_step_post_hook(liveness.count_step)
                run(config, folder, ranks, store)
                return 0
            except Exception as error:
                # The agent signals the other ranks of a failed job; this rank must write its record
                # first.
                ignore_stop_signals()
                log.exception("rank %d failed", ranks.rank)
                record = failure_record(error, config, ranks, folder)
                if store is not None:
                    publish_failure(store, record)
                report_failure(record)
                write_failure(folder, record)
                if record["is_echo"] and ranks.nodes > 1:
                    heartbeats.wait_for_cause()
                return int(record["exit_code"])
    except Stopped as stop:
        log.info("stopped by %s", stop)
        return 128 + stop.number


def keep_compiled_code_private() -> None:
    """Move the cache of torch.compile from /tmp to the home folder: another user could put code
    into the one in /tmp.
    """
    # The agent that started this rank may have put torch's default folder into the environment.
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_")).name.startswith(
        "torchinductor_"
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path.home() / ".cache" / "torchinductor")


class Stdout(logging.StreamHandler[TextIO]):
    """Log handler that writes to the current `sys.stdout`. rich replaces that stream while it shows
    a progress bar.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's own __init__ would keep the present stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _set_up_output(rank_log: Path, ranks: Ranks) -> TextIO:
    """Log to the file of this rank, and on rank 0 to the console too. Return the open file, for
    stack dumps.
    """
    rank_log.parent.mkdir(parents=True, exist_ok=True)
    stream = open(rank_log, "a", encoding="utf-8", buffering=1)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    if ranks.is_first:
        console = Stdout()
        console.addFilter(
            lambda record: record.levelno < logging.ERROR
        )  # the launcher shows the first failure
        console.setFormatter(HidingFormatter("%(message)s"))
        handlers.append(console)
    else:
        # Redirect the file descriptors themselves, so that output of C++ code lands in the file
        # too.
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    handlers[0].setFormatter(HidingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for name in (current().package, "timm_parallel"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    faulthandler.enable(stream, all_threads=True)
    return stream
