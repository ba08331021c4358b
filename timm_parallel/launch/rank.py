"""Process of one rank, which timm_parallel/rank.py starts. It sets up logs, signal handlers and the
watchdog, then trains.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from timm_parallel.app import current, package
from timm_parallel.config.compose import load_config
from timm_parallel.faults.failure import (
    failure_record,
    log_file,
    publish_failure,
    report_descriptor,
    report_failure,
    write_failure,
)
from timm_parallel.faults.liveness import liveness
from timm_parallel.faults.watchdog import Watchdog
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch.rendezvous import open_store
from timm_parallel.machine.files import RunFolder
from timm_parallel.machine.imports import import_name, slow_imports
from timm_parallel.machine.process import kill_on_parent_exit, start_clock
from timm_parallel.machine.ranks import Ranks, ranks_from_environment
from timm_parallel.machine.secrets import HidingFormatter
from timm_parallel.machine.signals import (
    Stopped,
    exit_after_stop_signal,
    heeded_signals,
    ignore_stop_signals,
    stop_handler,
)

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
# Type of the function that trains one rank.
RankMain = Callable[[ResolvedConfig, Path, Ranks, "Store | None"], None]
# Seconds after a stop signal until a rank exits that is stuck in a collective, because the other
# ranks have exited.
STUCK_SECONDS = 8.0


def main(folder: Path) -> int:
    """Train one rank with the config in a run folder. Environment variables hold the number of the
    rank. Return the exit code.
    """
    ranks = ranks_from_environment(os.environ) or Ranks()
    config = load_config(folder)
    store = open_store(ranks) if config.parallel.has_ranks else None
    return run_rank(train, config, folder, ranks, store)


def train(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train one rank of a run in this process. Torch and the project's code are imported here, so
    that an import error becomes a failure record of the rank.
    """
    with slow_imports():
        from timm_parallel.run.run import start_run

        project = current()
        # start_run calls this function, which imports most of the project.
        import_name(project.build)
        loop = import_name(config.train.loop or project.loop)
    with start_run(config, folder, ranks, store).training() as training:
        loop(training)


def run_rank(
    run: RankMain,
    config: ResolvedConfig,
    folder: Path,
    ranks: Ranks,
    store: Store | None,
    before_exit: Callable[[], object] | None = None,
) -> int:
    """Train one rank under the watchdog, with its log and its failure record. Return the exit code.

    `run`: function that trains one rank. `before_exit`: function that the watchdog calls before it
    ends this process.
    """
    start_clock.end("launch")
    kill_on_parent_exit()
    report_descriptor()
    keep_compiled_code_private()
    stacks = _set_up_output(log_file(folder, ranks.rank), ranks)
    for number in heeded_signals():
        signal.signal(number, stop_handler)
    try:
        with (
            closing(RunFolder(folder)) as place,
            Watchdog(config.parallel, folder, ranks, store, stacks, before_exit) as heartbeats,
        ):
            # Exit after a signal if no code handles the signal yet, because there is nothing to
            # save before training. Also exit if another rank has left, because no rank can save
            # without the others.
            exit_after_stop_signal(
                STUCK_SECONDS, lambda: stop_handler.request is None or heartbeats.peer_has_left()
            )
            try:
                with slow_imports():
                    from torch.optim.optimizer import register_optimizer_step_post_hook
                register_optimizer_step_post_hook(liveness.count_step)
                run(config, folder, ranks, store)
                return 0
            except Exception as error:
                # Ignore stop signals from here on. The agent sends them to all ranks of a failed
                # run, but this rank must first write its failure record.
                ignore_stop_signals()
                log.exception("rank %d failed", ranks.rank)
                record = failure_record(error, config, ranks, folder)
                if store is not None:
                    publish_failure(store, record)
                report_failure(record)
                # Another run may have a folder of this name by now.
                if not place.problem():
                    write_failure(folder, record)
                if record["is_echo"] and ranks.nodes > 1:
                    heartbeats.wait_for_cause()
                return int(record["exit_code"])
    except Stopped as stop:
        log.info("stopped by %s", stop)
        return 128 + stop.number


def keep_compiled_code_private() -> None:
    """Move the cache of torch.compile from /tmp to the home folder. In /tmp another user could
    place code in the cache.
    """
    # Replace TORCHINDUCTOR_CACHE_DIR also if it has torch's default, because the agent may have set
    # the default for this rank.
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_")).name.startswith(
        "torchinductor_"
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_private_cache())


def _private_cache() -> Path:
    """Create the cache folder in the home folder, or else a temporary one, which is deleted when
    this process exits.
    """
    # Path.home raises RuntimeError for a user without an entry in the password file.
    with suppress(OSError, RuntimeError):
        cache = Path.home() / ".cache" / "torchinductor"
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    cache = Path(tempfile.mkdtemp(prefix="compiled_"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    return cache


class Stdout(logging.StreamHandler[TextIO]):
    """Log handler that writes to the current `sys.stdout`. A standard handler would keep the first
    stream, but rich replaces `sys.stdout` while it shows a progress bar.
    """

    def __init__(self) -> None:
        # Skip StreamHandler.__init__, which would store the present stream.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _set_up_output(rank_log: Path, ranks: Ranks) -> TextIO:
    """Send log lines to the log file of this rank, and those of rank 0 also to the console. Return
    the open log file, for dumps of the thread stacks.
    """
    rank_log.parent.mkdir(parents=True, exist_ok=True)
    stream = open(rank_log, "a", encoding="utf-8", buffering=1)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    if ranks.is_first:
        console = Stdout()
        # Leave errors to the launcher, which prints the first failure.
        console.addFilter(lambda record: record.levelno < logging.ERROR)
        console.setFormatter(HidingFormatter("%(message)s"))
        handlers.append(console)
    else:
        # Redirect the file descriptors 1 and 2, so that output of C++ code reaches the log file
        # too.
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    handlers[0].setFormatter(HidingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for name in (package(), "timm_parallel"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    faulthandler.enable(stream, all_threads=True)
    return stream
