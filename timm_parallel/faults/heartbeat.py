"""Heartbeats: once a second, each rank publishes its progress in the store and reads that of other
nodes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.faults.failure import cause_is_known, failure_file, record_of, write_failure
from timm_parallel.faults.liveness import PHASES, liveness
from timm_parallel.machine.ranks import Ranks, host_name, machine_id

if TYPE_CHECKING:
    from torch.distributed import Store

NODE_LOST = "NodeLost"  # in place of the name of an exception, in failure records
# All in seconds.
TICK = 1.0  # between two heartbeats
NODE_SILENT = 7.0  # without a heartbeat: the node is dead, stopped, or cut off
# Replaces NODE_SILENT before the first step: importing torch from a slow disk blocks all threads.
START_SILENT = 60.0
LEFT = 3.0  # without a heartbeat: the rank has exited
CAUSE = 5.0  # to wait for the cause of a lost connection
PUBLISH = 2.0  # for the store to accept a failure, and for the thread to end


@dataclass
class Heartbeat:
    """State of a rank: its process, and the step and phase of its main thread. Each rank publishes
    its own every second.
    """

    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    phase: int = 0
    ticks: int = 0
    machine: str = ""  # machine_id(); the pid is valid there
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
    """Thread that publishes and reads heartbeats. Calls to the store are in a thread, because they
    may never return.
    """

    ranks: Ranks
    store: Store | None  # a client for this thread alone; None if there is only one rank
    folder: Path
    ticks: int = 0
    alarm: bool = False  # a rank has made no progress for too long
    failed: bool = False  # a rank has published a failure
    lost: bool = (
        False  # a rank has published that a node is lost, so waiting for that node is useless
    )
    gone: bool = False  # the store has closed: the launcher of node 0 has ended
    is_leaving: bool = False  # this rank has failed and is about to exit
    answered_at: float = field(default_factory=time.monotonic)
    # Node -> newest heartbeat of its first rank, and the time when its `ticks` last changed.
    _nodes: dict[int, tuple[Heartbeat, float]] = field(default_factory=dict)
    # Rank -> its newest `ticks`, and the time when they last changed.
    _ticks: dict[int, tuple[int, float]] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        if self.store is not None:
            self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread: it would abort the process if it used the store while the interpreter
        shuts down.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=PUBLISH)

    def mine(self) -> Heartbeat:
        progress = (liveness.step, liveness.phase, self.ticks)
        return Heartbeat(
            self.ranks.rank, host_name(), os.getpid(), *progress, machine_id(), self.ranks.node
        )

    def all(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each rank, in order of rank. Raises RuntimeError if the
        store has closed.
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
        """Return True if a rank has failed, or has sent no heartbeat for LEFT seconds while this
        function was called.
        """
        if self.store is None or self.failed or self.gone:
            return self.failed or self.gone
        now = time.monotonic()
        try:
            for heartbeat in self.all():
                if self._ticks.get(heartbeat.rank, (-1, now))[0] != heartbeat.ticks:
                    self._ticks[heartbeat.rank] = (heartbeat.ticks, now)
        except RuntimeError:  # the store has closed
            return True
        return any(now - moved_at > LEFT for _, moved_at in self._ticks.values())

    def silent_node(self) -> Heartbeat | None:
        """Return the last heartbeat of a node that has sent none for too long; None if there is no
        such node.
        """
        if self.ranks.nodes == 1:
            return None
        now, nodes = time.monotonic(), dict(self._nodes)
        store_silence = now - self.answered_at
        # The store is on node 0.
        if self.ranks.node > 0 and (self.gone or store_silence > NODE_SILENT):
            return nodes[0][0] if 0 in nodes else Heartbeat(0, node=0)
        # A late store is no evidence against other nodes.
        if store_silence > NODE_SILENT / 3:
            return None
        for heartbeat, moved_at in nodes.values():
            # If this rank has done a step, so has every rank, because the step sums the gradients
            # of all ranks.
            limit = NODE_SILENT if heartbeat.step or liveness.steps_done else START_SILENT
            if now - moved_at > limit:
                return heartbeat
        return None

    def wait_for_cause(self) -> None:
        """Wait after a lost connection for the record of another rank's failure; without one,
        record a silent node as lost.
        """
        self.is_leaving = True
        deadline = time.monotonic() + CAUSE
        while self.ranks.is_first_of_node and not self.gone and not cause_is_known(self.folder):
            now = time.monotonic()
            if now > deadline:
                lost = [
                    last
                    for last, moved_at in dict(self._nodes).values()
                    if now - moved_at > CAUSE / 2
                ]
                if lost:
                    reason = (
                        f"{lost[0].node_and_rank} exited without a record; it was killed, or its "
                        "node died"
                    )
                    write_failure(self.folder, self.record_of(lost[0], reason, NODE_LOST))
                return
            time.sleep(TICK / 4)

    def record_of(self, other: Heartbeat, reason: str, exception: str) -> dict[str, Any]:
        """Return a failure record for the rank with heartbeat `other`, because that rank cannot
        write one itself.
        """
        attempt = self.ranks.restart_count
        return record_of(
            other.rank, self.folder, reason, host=other.host, attempt=attempt, exception=exception
        )

    def forgive(self, seconds: float) -> None:
        """Shift all times by `seconds` in which this process was suspended, so that other nodes do
        not count as silent.
        """
        self.answered_at += seconds
        for node, (heartbeat, moved_at) in dict(self._nodes).items():
            self._nodes[node] = heartbeat, moved_at + seconds

    def _run(self) -> None:
        while not self._over.is_set():
            self.ticks += 1
            try:
                self._exchange()
            except RuntimeError:
                self.gone = True
                return
            self.answered_at = time.monotonic()
            self._over.wait(TICK)

    def _exchange(self) -> None:
        store, ranks = self.store, self.ranks
        assert store is not None
        message = json.dumps(asdict(self.mine()))
        store.set(f"watchdog/{ranks.rank}", message)
        self.alarm = store.check(["watchdog/alarm"])
        if ranks.nodes > 1 and ranks.is_first_of_node:
            store.set(f"node/{ranks.node}", message)
            for node in set(range(ranks.nodes)) - {ranks.node}:
                self._read_node(node, store)
        if store.check(["failed"]):
            # Set before the records are written, which fails on a full disk.
            self.failed = True
            if ranks.is_first_of_node:
                fetch_failures(store, self.folder, ranks.world_size)
            self.lost = store.check(["lost"])

    def _read_node(self, node: int, store: Store) -> None:
        # A node that has not started yet has parallel.start_timeout instead.
        if not store.check([f"node/{node}"]):
            return
        heartbeat = Heartbeat(**json.loads(store.get(f"node/{node}")))
        if node not in self._nodes or heartbeat.ticks != self._nodes[node][0].ticks:
            self._nodes[node] = heartbeat, time.monotonic()


def publish_failure(store: Store, record: dict[str, Any]) -> None:
    """Publish a failure record to all nodes, with a number from the store: clocks of hosts differ,
    so times do not order.
    """

    def publish() -> None:
        with suppress(RuntimeError):
            client, key = store.clone(), f"failure/{record['rank']}"
            # The launcher knows only the exit code, and the rank may have published the reason.
            if not client.check([key]):
                record["order"] = client.add("failures", 1)
                client.set(key, json.dumps(record))
                client.set("failed", "")
                # Only the first rank of a node watches the other nodes.
                if record.get("exception") == NODE_LOST:
                    client.set("lost", "")

    # In a thread, because a call to a store behind a cut link does not return.
    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(timeout=PUBLISH)


def fetch_failures(store: Store, folder: Path, world_size: int) -> None:
    """Write the failure records that ranks of all nodes have published into `folder`, which other
    nodes may not share.
    """
    for rank, record in _published(store, world_size):
        if not failure_file(folder, rank).exists():
            write_failure(folder, record)


def published_failures(store: Store, world_size: int) -> list[dict[str, Any]]:
    """Return the failure records that ranks of all nodes have published; [] if the store does not
    answer.
    """
    records: list[dict[str, Any]] = []

    def read() -> None:
        with suppress(RuntimeError):
            records.extend(record for _, record in _published(store.clone(), world_size))

    # In a thread, as publish_failure.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=PUBLISH)
    return records


def _published(store: Store, world_size: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(world_size):
        if store.check([f"failure/{rank}"]):
            yield rank, json.loads(store.get(f"failure/{rank}"))
