"""Watchdog thread. It ends a run that makes no progress, and records the rank that is stuck, not
the ranks that wait for it.

A second thread publishes heartbeats. Once a second, each rank publishes its progress in the run's
key-value store and reads the progress of other nodes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from timm_parallel.faults.failure import (
    NODE_LOST,
    cause_is_known,
    fetch_failures,
    publish_failure,
    record_of,
    report_failure,
    write_failure,
)
from timm_parallel.faults.liveness import PHASES, liveness
from timm_parallel.keys import ParallelConfig
from timm_parallel.machine.ranks import Ranks, host_name
from timm_parallel.machine.signals import exit_at_once

if TYPE_CHECKING:
    from torch.distributed import Store

# Seconds between two heartbeats. A silence is counted in heartbeats of this rank, which stop while
# the process is suspended (Ctrl-Z, scontrol suspend), and not by a clock.
TICK = 1.0
# Heartbeats after which a node that sends none counts as dead, stopped, or cut off.
NODE_SILENT = 7
# Heartbeats that replace NODE_SILENT before the first step, because importing torch from a slow
# disk blocks all threads.
START_SILENT = 60
# Heartbeats after which a rank that sends none counts as exited.
LEFT = 3
# Seconds to wait for the cause of a lost connection, unless a node is silent. They are not longer
# than LEAVE, so that the first rank of a node reports the failure before its other ranks leave.
CAUSE = 5.0
# The constants below are in seconds.
# Time for the other ranks to publish their progress.
COMPARE = 3.0
# Time to wait until the rank that records the failure has written its record.
WRITE = 10.0
# Time for this rank to exit by itself after a rank of another node has failed.
LEAVE = 5.0
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")


@dataclass
class Heartbeat:
    """State of one rank: its process, and the step and phase of its main thread. Each rank
    publishes its heartbeat every second.
    """

    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    phase: int = 0
    ticks: int = 0
    node: int = 0

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.phase

    @property
    def node_and_rank(self) -> str:
        return f"node {self.node} ({self.host or 'unknown host'}): rank {self.rank}"

    def __str__(self) -> str:
        return f"{PHASES[self.phase]} of step {self.step}" if self.step else PHASES[self.phase]


@dataclass
class Heartbeats:
    """Heartbeats of this rank, and those that it reads of other ranks. A thread for them alone is
    needed, because a call to the key-value store may never return.
    """

    ranks: Ranks
    # Client of the key-value store for this thread alone; None if the run has one rank.
    store: Store | None
    folder: Path
    ticks: int = 0
    # True if a rank has made no progress for too long.
    alarm: bool = False
    # True if a rank has published a failure.
    failed: bool = False
    # True if a rank has published that a node is lost, so that waiting for that node is useless.
    lost: bool = False
    # True if the key-value store has closed, because the launcher of node 0 has ended.
    gone: bool = False
    # True if this rank has failed and is about to exit.
    is_leaving: bool = False
    # Seconds without an answer of the key-value store, which the watchdog counts.
    unanswered: float = 0.0
    # Rank -> its newest heartbeat, and the number of heartbeats of this rank when it changed.
    _seen: dict[int, tuple[Heartbeat, int]] = field(default_factory=dict)

    def mine(self) -> Heartbeat:
        return Heartbeat(
            self.ranks.rank,
            host_name(),
            os.getpid(),
            liveness.step,
            liveness.phase,
            self.ticks,
            self.ranks.node,
        )

    def all(self) -> list[Heartbeat]:
        """Read the newest heartbeat of each rank from the key-value store, in order of rank. Raises
        RuntimeError if the store has closed.
        """
        assert self.store is not None
        keys = [f"watchdog/{rank}" for rank in range(self.ranks.world_size)]
        # Read all heartbeats in one request as soon as each rank has sent one, because every node
        # reads all of them every second.
        if self.store.check(keys):
            return [Heartbeat(**json.loads(text)) for text in self.store.multi_get(keys)]
        return [
            Heartbeat(**json.loads(self.store.get(key)))
            if self.store.check([key])
            else Heartbeat(rank)
            for rank, key in enumerate(keys)
        ]

    def peer_has_left(self) -> bool:
        """Return True if another rank has failed or exited. A rank counts as exited if its
        heartbeat does not change during LEFT heartbeats of this rank, over repeated calls of this
        method.
        """
        if self.store is None or self.failed or self.gone:
            return self.failed or self.gone
        try:
            self._look()
        # The key-value store has closed, so the launcher of node 0, which hosts the store, has
        # ended.
        except RuntimeError:
            return True
        return any(self.ticks - tick > LEFT for _, tick in dict(self._seen).values())

    def silent_node(self) -> Heartbeat | None:
        """Return the last heartbeat of a node that has sent none for too long. Return None if there
        is no such node.
        """
        if self.ranks.nodes == 1:
            return None
        nodes = self._first_ranks()
        # Node 0 counts as silent if the key-value store does not respond, because the store is on
        # node 0.
        if self.ranks.node > 0 and (self.gone or self.unanswered > NODE_SILENT):
            return nodes[0][0] if 0 in nodes else Heartbeat(0)
        # Do not count another node as silent while the key-value store responds late, because
        # heartbeats of all nodes then arrive late. Only the first rank of a node reads them all the
        # time.
        if self.unanswered > NODE_SILENT / 3 or not self.ranks.is_first_of_node:
            return None
        for heartbeat, tick in nodes.values():
            # Use the shorter limit once this rank has done a step. Every rank has then done a step,
            # because a step sums the gradients of all ranks. A rank that has lost a connection uses
            # it too.
            has_trained = heartbeat.step or liveness.steps_done or self.is_leaving
            if self.ticks - tick > (NODE_SILENT if has_trained else START_SILENT):
                return heartbeat
        return None

    def _first_ranks(self) -> dict[int, tuple[Heartbeat, int]]:
        """Return node -> newest heartbeat of its first rank, with the tick of this rank at which it
        was read. A rank without a host has not started yet, and parallel.start_timeout limits its
        start.
        """
        nodes: dict[int, tuple[Heartbeat, int]] = {}
        for heartbeat, tick in dict(self._seen).values():
            if heartbeat.host:
                nodes.setdefault(heartbeat.node, (heartbeat, tick))
        return nodes

    def wait_for_cause(self) -> None:
        """Wait after a lost connection, for CAUSE seconds, until another rank has recorded its
        failure. Wait longer while a node or the key-value store seems to be silent, because the
        watchdog ends this process if it stays so.
        """
        self.is_leaving = True
        deadline = time.monotonic() + CAUSE
        while self.ranks.is_first_of_node and not self.gone and not cause_is_known(self.folder):
            silent = [self.ticks - tick for _, tick in self._first_ranks().values()]
            if time.monotonic() > deadline and max([self.unanswered, *silent]) <= LEFT - 1:
                return
            time.sleep(TICK / 4)

    def publish(self, over: threading.Event) -> None:
        """Publish a heartbeat every TICK seconds, until `over` is set or the store closes."""
        while not over.is_set():
            self.ticks += 1
            try:
                self._exchange()
            except RuntimeError:
                self.gone = True
                return
            self.unanswered = 0.0
            over.wait(TICK)

    def _exchange(self) -> None:
        store, ranks = self.store, self.ranks
        assert store is not None
        store.set(f"watchdog/{ranks.rank}", json.dumps(asdict(self.mine())))
        self.alarm = store.check(["watchdog/alarm"])
        if ranks.nodes > 1 and ranks.is_first_of_node:
            self._look()
        if store.check(["failed"]):
            # Set `failed` before the records are written, because writing fails on a full disk.
            self.failed = True
            if ranks.is_first_of_node:
                fetch_failures(store, self.folder, ranks.world_size)
            self.lost = store.check(["lost"])

    def _look(self) -> None:
        """Read the heartbeats of all ranks, and note which have changed."""
        for heartbeat in self.all():
            last = self._seen.get(heartbeat.rank)
            if last is None or last[0].ticks != heartbeat.ticks:
                self._seen[heartbeat.rank] = heartbeat, self.ticks


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
        loops: list[Callable[[], None]] = [self._watch]
        if store is not None:
            loops.append(partial(self.heartbeats.publish, self._over))
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def __enter__(self) -> Heartbeats:
        for thread in self._threads:
            thread.start()
        return self.heartbeats

    def __exit__(self, *error: object) -> None:
        """Stop the threads. The process would abort if one of them used the key-value store while
        the interpreter shuts down.
        """
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=COMPARE)

    @property
    def limit(self) -> int:
        """Seconds without progress after which the main thread counts as stuck. The limit is longer
        before the first step.
        """
        return self.config.timeout if liveness.steps_done else self.config.start_timeout

    def _watch(self) -> None:
        # Count checks instead of reading a clock, because a process that was suspended (Ctrl-Z,
        # scontrol suspend) has made none. Its main thread is not stuck.
        ticks, silent, leaving = -1, 0.0, 0.0
        while not self._over.wait(TICK):
            self.heartbeats.unanswered += TICK
            is_alive = liveness.ticks != ticks or _is_in_debugger()
            ticks, silent = liveness.ticks, 0.0 if is_alive else silent + TICK
            if self.heartbeats.alarm or silent > self.limit:
                self._end(silent)
                return
            if (lost := self.heartbeats.silent_node()) is not None:
                self._end_without(lost)
                return
            # Exit if a rank of another node has failed. On one machine, torch's agent ends the
            # other ranks. A rank that has failed itself is already leaving.
            if self.ranks.nodes > 1 and self.heartbeats.failed and not self.heartbeats.is_leaving:
                leaving += TICK
                if leaving > LEAVE or self.heartbeats.lost:
                    self.before_exit()
                    exit_at_once(1)

    def _end_without(self, lost: Heartbeat) -> None:
        """Record that a node sends no heartbeat, and exit. Sockets to that node would otherwise
        block for minutes. `lost`: last heartbeat of the node.
        """
        reason = f"{lost.node_and_rank} has stopped sending heartbeats, last seen in {lost}"
        # Exit in `finally`, because writing the log fails if the disk is full.
        try:
            self._log_stacks(reason)
            self._record(
                lost, f"{reason}; it is dead, stopped, or cut off from the network", NODE_LOST
            )
        finally:
            self.before_exit()
            exit_at_once(1)

    def _end(self, silent: float) -> None:
        """Write the stacks of all threads to the log, record the stuck rank, and exit. The other
        ranks do the same. `silent`: seconds without progress.
        """
        # Exit by a timer if the key-value store does not respond.
        killer = threading.Timer(COMPARE + 2 * WRITE, exit_at_once, (1,))
        killer.daemon = True
        killer.start()
        # Exit in `finally`, because the code above fails if the key-value store has closed or the
        # disk is full.
        try:
            self._log_stacks(f"no progress for {silent:.0f} s while {self.heartbeats.mine()}")
            self._name_the_failed()
        finally:
            exit_at_once(1)

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
            if failed.rank != recorder and failed.node == mine.node and failed.pid:
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
        record = record_of(
            failed.rank,
            self.folder,
            reason,
            host=failed.host,
            attempt=self.ranks.restart_count,
            exception=exception,
        )
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
