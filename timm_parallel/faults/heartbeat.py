"""Heartbeats. Once a second, each rank publishes its progress in the run's key-value store and
reads the progress of other nodes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.faults.failure import cause_is_known, failure_file, write_failure
from timm_parallel.faults.liveness import PHASES, liveness
from timm_parallel.machine.ranks import Ranks, host_name

if TYPE_CHECKING:
    from torch.distributed import Store

# Value of `exception` in the failure record of a lost node, in place of an exception's name.
NODE_LOST = "NodeLost"
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
# Seconds to wait for the cause of a lost connection. A silent node is found earlier.
CAUSE = 10.0
# Seconds for the key-value store to accept a failure record.
PUBLISH = 2.0


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
        # Node -> newest heartbeat of its first rank. A rank without a host has not started yet, and
        # parallel.start_timeout limits its start.
        nodes: dict[int, tuple[Heartbeat, int]] = {}
        for heartbeat, tick in dict(self._seen).values():
            if heartbeat.host:
                nodes.setdefault(heartbeat.node, (heartbeat, tick))
        # Node 0 counts as silent if the key-value store does not respond, because the store is on
        # node 0.
        if self.ranks.node > 0 and (self.gone or self.unanswered > NODE_SILENT):
            return nodes[0][0] if 0 in nodes else Heartbeat(0)
        # Do not count another node as silent while the key-value store responds late, because
        # heartbeats of all nodes then arrive late.
        if self.unanswered > NODE_SILENT / 3:
            return None
        for heartbeat, tick in nodes.values():
            # Use the shorter limit once this rank has done a step. Every rank has then done a step,
            # because a step sums the gradients of all ranks. A rank that has lost a connection uses
            # it too.
            has_trained = heartbeat.step or liveness.steps_done or self.is_leaving
            if self.ticks - tick > (NODE_SILENT if has_trained else START_SILENT):
                return heartbeat
        return None

    def wait_for_cause(self) -> None:
        """Wait after a lost connection, at most CAUSE seconds, until another rank has recorded its
        failure. Meanwhile the watchdog ends this process if a node is silent.
        """
        self.is_leaving = True
        deadline = time.monotonic() + CAUSE
        while self.ranks.is_first_of_node and not self.gone and time.monotonic() < deadline:
            if cause_is_known(self.folder):
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


def publish_failure(store: Store, record: dict[str, Any]) -> None:
    """Publish a failure record to all nodes through the key-value store. The store numbers the
    records in the order of their arrival, because the clocks of two hosts may differ.
    """

    def publish() -> None:
        with suppress(RuntimeError):
            client, key = store.clone(), f"failure/{record['rank']}"
            # Keep a record that the rank itself has published, because the launcher knows only the
            # exit code.
            if not client.check([key]):
                record["order"] = client.add("failures", 1)
                client.set(key, json.dumps(record))
                client.set("failed", "")
                # Tell the other ranks that a node is lost, because only the first rank of each node
                # watches the other nodes.
                if record.get("exception") == NODE_LOST:
                    client.set("lost", "")

    _try_for_a_while(publish)


def _try_for_a_while(call: Callable[[], object]) -> None:
    """Run a call to a key-value store in a thread, because it may not return behind a broken
    network connection. Return when it has ended, or after PUBLISH seconds.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=PUBLISH)


def fetch_failures(store: Store, folder: Path, world_size: int) -> None:
    """Copy the failure records of all ranks from the key-value store to the run folder of this
    node. This is needed because nodes may have no shared disk.
    """
    for rank, record in _published(store, world_size):
        if not failure_file(folder, rank).exists():
            write_failure(folder, record)


def published_failures(store: Store, world_size: int) -> list[dict[str, Any]]:
    """Read the failure records that ranks of all nodes have published in the key-value store. The
    list is empty if the store does not respond.
    """
    records: list[dict[str, Any]] = []

    def read() -> None:
        with suppress(RuntimeError):
            records.extend(record for _, record in _published(store.clone(), world_size))

    _try_for_a_while(read)
    return records


def _published(store: Store, world_size: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(world_size):
        if store.check([f"failure/{rank}"]):
            yield rank, json.loads(store.get(f"failure/{rank}"))
