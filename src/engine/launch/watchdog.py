"""Ends a rank that no longer moves, and names the rank that stopped first instead of those that wait for it.

A thread in every rank looks at its main thread's pulse and shows it to the other ranks through the rendezvous store,
once a second. No collective, nothing in the hot loop. A rank that has been silent for too long writes down its stacks,
asks the others for theirs, and compares where everybody is: the one that is furthest behind has failed.
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

from src.engine.launch.failure import write_failure
from src.engine.launch.heartbeat import NODE_SILENT, TICK, Heartbeat, Heartbeats, publish_failure
from src.engine.machine.platform import KILL
from src.engine.machine.pulse import pulse
from src.engine.machine.ranks import Ranks
from src.schema import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import Store

SUSPENDED = 10.0  # a tick this late: the whole process was stopped (Ctrl-Z, scontrol suspend), not its main thread
ANSWER = 3.0  # seconds for the other ranks to show where they are
WRITE = 10.0  # seconds for the rank that writes down who has failed
LEAVE = 5.0  # seconds for this rank to leave by itself after another node's rank has failed
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")


class Watchdog:
    """This rank's side, for as long as the `with` block lasts."""

    def __init__(
        self,
        config: ParallelConfig,
        folder: Path,
        ranks: Ranks,
        store: Store | None,
        log: TextIO,
        before_exit: Callable[[], object] | None = None,
    ) -> None:
        """`store`: None for the only rank. `log`: where stacks go. `before_exit`: before leaving."""
        self.config, self.folder, self.ranks, self.log, self.before_exit = config, folder, ranks, log, before_exit
        self.store = None if store is None else store.clone()  # each thread has a client of its own
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
        self._thread.join(timeout=ANSWER)

    @property
    def limit(self) -> int:
        """Seconds that the main thread may be silent now."""
        return self.config.timeout if pulse.steps_done else self.config.start_timeout

    def _watch(self) -> None:
        beats, moved_at, looked_at = -1, time.monotonic(), time.monotonic()
        leave_at = None
        while not self._over.wait(TICK):
            now = time.monotonic()
            if now - looked_at > SUSPENDED / 3:
                self.heartbeats.forgive(now - looked_at)
            if now - looked_at > SUSPENDED:
                moved_at += now - looked_at
            if pulse.beats != beats or _at_a_debugger():
                beats, moved_at = pulse.beats, now
            looked_at = now
            if self.heartbeats.alarm or now - moved_at > self.limit:
                self._end(now - moved_at)
                return
            if (lost := self.heartbeats.silent_node()) is not None:
                self._end_without(lost)
                return
            # Of one machine the agent ends the others, and a rank that has failed itself is waiting for the cause.
            if self.ranks.nodes > 1 and self.heartbeats.failed and not self.heartbeats.is_leaving:
                leave_at = leave_at or now + LEAVE
                if now > leave_at:
                    self._leave()

    def _leave(self) -> None:
        if self.before_exit is not None:
            self.before_exit()
        os._exit(1)

    def _end_without(self, lost: Heartbeat) -> None:
        """A node has not been heard of for too long: say which, and leave. What it holds open would wait for minutes."""
        where = f"node {lost.node} ({lost.host or 'where rank 0 is'})"
        told = f"{where}: rank {lost.rank} has not been heard of for {NODE_SILENT:.0f} s, last seen in {lost}"
        try:
            self._log_stacks(told)
            self._record(lost, f"{told}; it is dead, stopped, or cut off from the network", "NodeLost")
        finally:  # also where the disk is full
            self._leave()

    def _end(self, silent: float) -> None:
        """The alarm: stacks of all ranks into their logs, a record of the rank that has failed, and out."""
        at_last = threading.Timer(ANSWER + 2 * WRITE, os._exit, (1,))  # where the store does not answer any more
        at_last.daemon = True
        at_last.start()
        try:
            self._log_stacks(f"no progress for {silent:.0f} s while {self.heartbeats.mine()}")
            self._name_the_failed()
        finally:  # also where the store has closed meanwhile, or the disk is full
            os._exit(1)

    def _name_the_failed(self) -> None:
        """Compare where the ranks are; one of them records which has failed, and the others wait for that."""
        mine = self.heartbeats.mine()
        before = after = [mine]
        if self.store is not None:
            self.store.set("watchdog/alarm", str(self.ranks.rank))
            before = self.heartbeats.all()
            time.sleep(ANSWER)
            after = self.heartbeats.all()
        failed, recorder, reason = judge(before, after, self.limit)
        if recorder == self.ranks.rank:
            limit_key = "timeout" if pulse.steps_done else "start_timeout"
            self._record(failed, f"{reason}; if it is only slow, raise parallel.{limit_key}", "NoProgress")
            if failed.rank != recorder and failed.machine == mine.machine and failed.pid:
                _kill(failed.pid)
            if self.before_exit is not None:
                self.before_exit()
            if self.store is not None:
                self.store.set("watchdog/recorded", "")
        elif self.store is not None:
            self.store.wait(["watchdog/recorded"], timedelta(seconds=WRITE))

    def _log_stacks(self, reason: str) -> None:
        self.log.write(f"{reason}; the stacks of all threads:\n")
        self.log.flush()
        faulthandler.dump_traceback(file=self.log, all_threads=True)

    def _record(self, failed: Heartbeat, reason: str, exception: str) -> None:
        record = self.heartbeats.record_of(failed, reason, exception)
        if failed.rank == self.ranks.rank:
            stack = traceback.format_stack(_main_frame())
            record["traceback"] = "".join(["Stack of the main thread (most recent call last):\n", *stack])
        reachable = failed.node != 0 or self.ranks.node == 0  # node 0 has the store
        if self.store is not None and self.ranks.nodes > 1 and reachable:
            publish_failure(self.store, record)
        write_failure(self.folder, record)


def judge(before: list[Heartbeat], after: list[Heartbeat], limit: int) -> tuple[Heartbeat, int, str]:
    """(the rank that has failed, the rank that writes this down, why), from two looks after `limit` silent seconds.

    A rank whose watchdog does not tick is stopped, gone, or stuck in native code that keeps the interpreter's lock.
    Otherwise it is the one furthest behind: the others have come further and wait for it in a collective.
    """
    ticking = [new for new, old in zip(after, before, strict=True) if new.ticks > old.ticks]
    silent = [new for new, old in zip(after, before, strict=True) if new.ticks == old.ticks]
    if silent and ticking:
        reason = f"rank {silent[0].rank} does not answer (stopped, or stuck in native code), last seen in {silent[0]}"
        return silent[0], min(heartbeat.rank for heartbeat in ticking), reason
    failed = min(after, key=lambda heartbeat: (heartbeat.place, heartbeat.rank))
    reason = f"rank {failed.rank} made no progress for {limit} s, last seen in {failed}"
    if len(after) > 1:
        alone = all(heartbeat.place > failed.place for heartbeat in after if heartbeat.rank != failed.rank)
        reason += "; the others waited for it" if alone else "; other ranks stopped there too"
    return failed, failed.rank, reason


def _at_a_debugger() -> bool:
    """True if the main thread is in a debugger: a person may think for longer than any limit."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(_main_frame())]
    return any(debugger in file for file in files for debugger in DEBUGGERS)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _kill(pid: int) -> None:
    """SIGABRT first: faulthandler then writes the stacks of a rank that is stuck in native code."""
    for number, pause in ((signal.SIGABRT, 1.0), (KILL, 0.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        time.sleep(pause)
