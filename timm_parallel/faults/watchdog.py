"""Watchdog thread. It ends a run that makes no progress, and records the rank that is stuck, not
the ranks that wait for it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from timm_parallel.faults.failure import report_failure, write_failure
from timm_parallel.faults.heartbeat import (
    NODE_LOST,
    NODE_SILENT,
    TICK,
    Heartbeat,
    Heartbeats,
    fetch_failures,
    publish_failure,
)
from timm_parallel.faults.liveness import liveness
from timm_parallel.keys import ParallelConfig
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import exit_at_once

if TYPE_CHECKING:
    from torch.distributed import Store

# The constants below are in seconds. If a check comes this late, the whole process was suspended
# (Ctrl-Z, scontrol suspend), and the main thread is not stuck.
SUSPENDED = 10.0
# Time for the other ranks to publish their progress.
COMPARE = 3.0
# Time to wait until the rank that records the failure has written its record.
WRITE = 10.0
# Time for this rank to exit by itself after a rank of another node has failed.
LEAVE = 5.0
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")


class Watchdog:
    """Thread that ends this process if its main thread makes no progress during the `with`
    block.
    """

    def __init__(
        self,
        config: ParallelConfig,
        folder: Path,
        ranks: Ranks,
        store: Store | None,
        log: TextIO,
        before_exit: Callable[[], object] | None = None,
    ) -> None:
        """`store`: the key-value store of the run; None if the run has one rank. `log`: file for
        dumps of the thread stacks. `before_exit`: function to call before the process ends.
        """
        self.config, self.folder, self.ranks, self.log = config, folder, ranks, log
        self.before_exit = before_exit or (lambda: None)
        # Clone the client of the key-value store, because each thread needs its own client.
        self.store = None if store is None else store.clone()
        self.heartbeats = Heartbeats(ranks, None if store is None else store.clone(), folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Heartbeats:
        self.heartbeats.start()
        self._thread.start()
        return self.heartbeats

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.heartbeats.close()
        self._thread.join(timeout=COMPARE)

    @property
    def limit(self) -> int:
        """Seconds without progress after which the main thread counts as stuck. The limit is longer
        before the first step.
        """
        return self.config.timeout if liveness.steps_done else self.config.start_timeout

    def _watch(self) -> None:
        ticks, moved_at, checked_at = -1, time.monotonic(), time.monotonic()
        leave_at = None
        while not self._over.wait(TICK):
            now = time.monotonic()
            if now - checked_at > SUSPENDED / 3:
                self.heartbeats.forgive(now - checked_at)
            if now - checked_at > SUSPENDED:
                moved_at += now - checked_at
            if liveness.ticks != ticks or _is_in_debugger():
                ticks, moved_at = liveness.ticks, now
            checked_at = now
            if self.heartbeats.alarm or now - moved_at > self.limit:
                self._end(now - moved_at)
                return
            if (lost := self.heartbeats.silent_node()) is not None:
                self._end_without(lost)
                return
            # Exit if a rank of another node has failed. On one machine, torch's agent ends the
            # other ranks. A rank that has failed itself is already leaving.
            if self.ranks.nodes > 1 and self.heartbeats.failed and not self.heartbeats.is_leaving:
                leave_at = leave_at or now + LEAVE
                if now > leave_at or self.heartbeats.lost:
                    self.before_exit()
                    _exit()

    def _end_without(self, lost: Heartbeat) -> None:
        """Record that a node sends no heartbeat, and exit. Sockets to that node would otherwise
        block for minutes. `lost`: last heartbeat of the node.
        """
        reason = (
            f"{lost.node_and_rank} sent no heartbeat for {NODE_SILENT:.0f} s, last seen in {lost}"
        )
        # Exit in `finally`, because writing the log fails if the disk is full.
        try:
            self._log_stacks(reason)
            self._record(
                lost, f"{reason}; it is dead, stopped, or cut off from the network", NODE_LOST
            )
        finally:
            self.before_exit()
            _exit()

    def _end(self, silent: float) -> None:
        """Write the stacks of all threads to the log, record the stuck rank, and exit. The other
        ranks do the same. `silent`: seconds without progress.
        """
        # Exit by a timer if the key-value store does not respond.
        killer = threading.Timer(COMPARE + 2 * WRITE, _exit)
        killer.daemon = True
        killer.start()
        # Exit in `finally`, because the code above fails if the key-value store has closed or the
        # disk is full.
        try:
            self._log_stacks(f"no progress for {silent:.0f} s while {self.heartbeats.mine()}")
            self._name_the_failed()
        finally:
            _exit()

    def _name_the_failed(self) -> None:
        """Find the stuck rank by comparing the progress of all ranks. One rank records the failure.
        The other ranks wait for the record.
        """
        mine = self.heartbeats.mine()
        before = after = [mine]
        if self.store is not None:
            self.store.set("watchdog/alarm", str(self.ranks.rank))
            before = self.heartbeats.all()
            time.sleep(COMPARE)
            after = self.heartbeats.all()
        failed, recorder, reason = judge(before, after, self.limit)
        if recorder == self.ranks.rank:
            limit_key = "timeout" if liveness.steps_done else "start_timeout"
            self._record(
                failed, f"{reason}; if it is only slow, raise parallel.{limit_key}", "NoProgress"
            )
            if failed.rank != recorder and failed.machine == mine.machine and failed.pid:
                _kill(failed.pid)
            self.before_exit()
            if self.store is not None:
                self.store.set("watchdog/recorded", "")
        elif self.store is not None:
            # The rank that records the failure may be late, or its exit may have closed the
            # key-value store.
            with suppress(RuntimeError):
                self.store.wait(["watchdog/recorded"], timedelta(seconds=WRITE))
                fetch_failures(self.store, self.folder, self.ranks.world_size)
            # Call before_exit on the first rank of each node, except the node whose rank has
            # recorded the failure and called it already. Rank 0 writes result.json in before_exit,
            # so rank 0 must not exit earlier.
            if self.ranks.is_first_of_node and after[recorder].node != self.ranks.node:
                self.before_exit()

    def _log_stacks(self, reason: str) -> None:
        self.log.write(f"{reason}; the stacks of all threads:\n")
        self.log.flush()
        faulthandler.dump_traceback(file=self.log, all_threads=True)

    def _record(self, failed: Heartbeat, reason: str, exception: str) -> None:
        record = self.heartbeats.record_of(failed, reason, exception)
        if failed.rank == self.ranks.rank:
            stack = traceback.format_stack(_main_frame())
            record["traceback"] = "".join(
                ["Stack of the main thread (most recent call last):\n", *stack]
            )
        # Do not use the key-value store if the failed rank is on node 0 and this rank is not,
        # because the store is on node 0.
        has_store = failed.node != 0 or self.ranks.node == 0
        if self.store is not None and self.ranks.nodes > 1 and has_store:
            publish_failure(self.store, record)
        report_failure(record)
        write_failure(self.folder, record)


def judge(
    before: list[Heartbeat], after: list[Heartbeat], limit: int
) -> tuple[Heartbeat, int, str]:
    """Compare two heartbeats of each rank and find the stuck rank. Return (heartbeat of the stuck
    rank, rank that records the failure, reason).

    `before`, `after`: heartbeats of all ranks, some seconds apart. `limit`: seconds without
    progress, which the reason states.
    """
    pairs = list(zip(before, after, strict=True))
    ticking = [new for old, new in pairs if new.ticks > old.ticks]
    silent = [new for old, new in pairs if new.ticks == old.ticks]
    has_nodes = len({heartbeat.node for heartbeat in after}) > 1

    def name(heartbeat: Heartbeat) -> str:
        return heartbeat.node_and_rank if has_nodes else f"rank {heartbeat.rank}"

    # A rank whose heartbeat does not change is stopped, gone, or stuck in native code that holds
    # the interpreter's lock.
    if silent and ticking:
        reason = (
            f"{name(silent[0])} does not answer (stopped, or stuck in native code), last "
            f"seen in {silent[0]}"
        )
        return silent[0], min(heartbeat.rank for heartbeat in ticking), reason
    # If the heartbeats of all ranks change, or of none, the rank with the least progress has
    # failed, because the others wait for it in a collective.
    failed = min(after, key=lambda heartbeat: (heartbeat.position, heartbeat.rank))
    reason = f"{name(failed)} made no progress for {limit} s, last seen in {failed}"
    if len(after) > 1:
        is_alone = all(
            other.position > failed.position for other in after if other.rank != failed.rank
        )
        reason += "; the others waited for it" if is_alone else "; other ranks stopped there too"
    return failed, failed.rank, reason


def _exit() -> None:
    """Exit at once with code 1. `finally` blocks of the main thread are skipped, because that
    thread may be stuck.
    """
    exit_at_once(1)


def _is_in_debugger() -> bool:
    """Return True if the main thread is in a debugger. Waiting for the user is then no failure."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(_main_frame())]
    return any(debugger in file for file in files for debugger in DEBUGGERS)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _kill(pid: int) -> None:
    """Kill the process of a stuck rank. SIGABRT comes first, because faulthandler then writes the
    stacks of that process to its log.
    """
    for number, pause in ((signal.SIGABRT, 1.0), (signal.SIGKILL, 0.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        time.sleep(pause)
