"""One rank: read the frozen config, join the group, run, leave. `python -m src.run <run folder>` comes here."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from src.engine.config.compose import read_frozen
from src.engine.launch.failure import failure_record, log_file, write_failure
from src.engine.launch.heartbeat import publish_failure
from src.engine.launch.rendezvous import open_store
from src.engine.launch.watchdog import Watchdog
from src.engine.machine.platform import STOP_SIGNALS
from src.engine.machine.process import die_with_parent
from src.engine.machine.ranks import Ranks, ranks_from_environment
from src.engine.machine.secrets import HidingFormatter
from src.engine.machine.signals import Stopped, exit_after_stop_signal, ignore_stop_signals, stop_handler
from src.schema import ResolvedConfig

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
# What a rank does; handed in, because the engine imports none of it.
RankMain = Callable[[ResolvedConfig, Path, Ranks, "Store | None"], None]
STUCK_SECONDS = 8.0  # after a signal, for a rank that waits in a collective for ranks that have left


def main(folder: Path, run: RankMain) -> int:
    """Run the rank that this process is, on a run folder prepared by job.py. Returns the exit code."""
    ranks = ranks_from_environment(os.environ) or Ranks()
    config = read_frozen(folder)
    return run_rank(run, config, folder, ranks, open_store(ranks) if config.parallel.has_ranks else None)


def run_rank(
    run: RankMain,
    config: ResolvedConfig,
    folder: Path,
    ranks: Ranks,
    store: Store | None,
    before_exit: Callable[[], object] | None = None,
) -> int:
    """Run one rank in this process; returns its exit code. A failure is recorded in `logs/failure_rank_N.json`, not raised.

    `before_exit` is called before the watchdog ends this process, which then does not return from here.
    """
    die_with_parent()
    keep_compiled_code_private()
    stacks = _set_up_output(log_file(folder, ranks.rank), ranks)
    for number in STOP_SIGNALS:
        signal.signal(number, stop_handler)
    try:
        with Watchdog(config.parallel, folder, ranks, store, stacks, before_exit) as heartbeats:
            # before training there is nothing to save, and without a peer nobody can
            exit_after_stop_signal(STUCK_SECONDS, lambda: stop_handler.request is None or heartbeats.peer_has_left())
            try:
                run(config, folder, ranks, store)
                return 0
            except Exception as error:
                ignore_stop_signals()  # the agent ends the other ranks of a failed job; this one is writing down why
                log.exception("rank %d failed", ranks.rank)
                record = failure_record(error, config, ranks, folder)
                if store is not None:
                    publish_failure(store, record)
                write_failure(folder, record)
                if record["is_echo"] and ranks.nodes > 1:
                    heartbeats.wait_for_cause()
                return int(record["exit_code"])
    except Stopped as stop:
        log.info("stopped by %s", stop)
        return 128 + stop.number


def keep_compiled_code_private() -> None:
    """What model.compile makes is loaded again; torch's place for it is a name in /tmp that a neighbour can take first.

    The agent that started this rank may have put torch's place into the environment.
    """
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_")).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path.home() / ".cache" / "torchinductor")


class Stdout(logging.StreamHandler[TextIO]):
    """stdout as it is at the moment: while a progress bar is shown, rich stands there and prints lines above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would keep today's

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _set_up_output(own_log: Path, ranks: Ranks) -> TextIO:
    """Every rank logs to its own file; rank 0 alone also has the console.

    For other ranks the file descriptors themselves are redirected, so that what C++ prints lands there too. Returns the
    log, for stacks.
    """
    own_log.parent.mkdir(parents=True, exist_ok=True)
    stream = open(own_log, "a", encoding="utf-8", buffering=1)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    if ranks.is_first:
        console = Stdout()
        console.addFilter(lambda record: record.levelno < logging.ERROR)  # the launcher shows the first failure
        console.setFormatter(HidingFormatter("%(message)s"))
        handlers.append(console)
    else:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    handlers[0].setFormatter(HidingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.getLogger("src").setLevel(logging.INFO)  # libraries speak up only when something is wrong
    logging.captureWarnings(True)
    faulthandler.enable(stream, all_threads=True)
    return stream
