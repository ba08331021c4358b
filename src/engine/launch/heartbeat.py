"""What ranks show each other through the store, once a second: where each is, and which has failed.

In a thread of its own, because a store behind a cut link never answers, and never says so.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.engine.launch.failure import cause_is_known, failure_file, record_of, write_failure
from src.engine.machine.pulse import PHASES, pulse
from src.engine.machine.ranks import Ranks, host_name, machine_id

if TYPE_CHECKING:
    from torch.distributed import Store

TICK = 1.0  # seconds between two looks
NODE_SILENT = 7.0  # seconds without a word from a node: it is dead, stopped, or cut off
START_SILENT = 60.0  # the same before its first step: importing torch from a slow disk keeps all threads waiting
LEFT = 3.0  # seconds without a word from a rank: it has left
CAUSE = 5.0  # seconds to wait for the cause of a lost connection
TOLD = 2.0  # seconds for the store to take a failure, and for the thread to end


@dataclass
class Heartbeat:
    """What a rank shows of itself."""

    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    phase: int = 0
    ticks: int = 0
    machine: str = ""  # machine_id(): whose pid it is
    node: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.phase

    def __str__(self) -> str:
        return f"{PHASES[self.phase]} of step {self.step}" if self.step else PHASES[self.phase]


@dataclass
class Heartbeats:
    """This rank's side of the exchange; `store` is a client of its own, None for the only rank."""

    ranks: Ranks
    store: Store | None
    folder: Path
    ticks: int = 0
    alarm: bool = False  # a rank has made no progress for too long
    failed: bool = False  # a rank has said that it has failed
    gone: bool = False  # the store has closed, and with it node 0's launcher
    is_leaving: bool = False  # this rank has failed itself, and ends by itself
    answered_at: float = field(default_factory=time.monotonic)
    # Of each other node: its first rank's heartbeat, and when that last moved. The thread below adds to it.
    _nodes: dict[int, tuple[Heartbeat, float]] = field(default_factory=dict)
    _ticks: dict[int, tuple[int, float]] = field(default_factory=dict)  # of each rank, and when they last moved
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        if self.store is not None:
            self._thread = threading.Thread(target=self._talk, name="heartbeats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread: inside the store while the interpreter shuts down, it would abort the process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=TOLD)

    def mine(self) -> Heartbeat:
        ranks = self.ranks
        place = (pulse.step, pulse.phase, self.ticks)
        return Heartbeat(ranks.rank, host_name(), os.getpid(), *place, machine_id(), ranks.node)

    def all(self) -> list[Heartbeat]:
        """Every rank's newest heartbeat. Call it where there is a store, and it answers."""
        assert self.store is not None
        keys = [f"watchdog/{rank}" for rank in range(self.ranks.world_size)]
        return [
            Heartbeat(**json.loads(self.store.get(key))) if self.store.check([key]) else Heartbeat(rank)
            for rank, key in enumerate(keys)
        ]

    def peer_has_left(self) -> bool:
        """True if a rank has failed, or is silent: then no collective ends any more, and no rank can save.

        To be called again and again: a rank's silence counts from the first call.
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
        return any(now - moved > LEFT for _, moved in self._ticks.values())

    def silent_node(self) -> Heartbeat | None:
        """The last heartbeat of a node that has been silent for NODE_SILENT seconds; None if there is no such node."""
        if self.ranks.nodes == 1:
            return None
        now, nodes = time.monotonic(), dict(self._nodes)
        waiting = now - self.answered_at  # for the store, which is node 0's
        if self.ranks.node > 0 and (self.gone or waiting > NODE_SILENT):
            return nodes[0][0] if 0 in nodes else Heartbeat(0, node=0)
        if waiting > NODE_SILENT / 3:  # the store itself is late: no proof against others
            return None
        for heartbeat, moved_at in nodes.values():
            # Where this rank has done a step, every rank has: its gradients were in the sum.
            limit = NODE_SILENT if heartbeat.step or pulse.steps_done else START_SILENT
            if now - moved_at > limit:
                return heartbeat
        return None

    def wait_for_cause(self) -> None:
        """After a lost connection, on the first rank of each node: wait until this node's records say why it was lost.

        The rank that left has told the store why, or its launcher has; else the node that is silent is recorded as lost.
        """
        self.is_leaving = True
        until = time.monotonic() + CAUSE
        while self.ranks.is_first_of_node and not self.gone and not cause_is_known(self.folder):
            if (now := time.monotonic()) > until:
                lost = [last for last, moved_at in dict(self._nodes).values() if now - moved_at > CAUSE / 2]
                for last in lost[:1]:
                    where = f"node {last.node} ({last.host}): rank {last.rank}"
                    reason = f"{where} left without a word; it was killed, or its node died"
                    write_failure(self.folder, self.record_of(last, reason, "NodeLost"))
                return
            time.sleep(TICK / 4)

    def record_of(self, other: Heartbeat, reason: str, exception: str) -> dict[str, Any]:
        """The record of a rank that cannot write one."""
        attempt = self.ranks.restart_count
        return record_of(other.rank, self.folder, reason, host=other.host, attempt=attempt, exception=exception)

    def forgive(self, seconds: float) -> None:
        """Count the seconds for which this process was stopped, and heard nobody, against nobody."""
        self.answered_at += seconds
        for node, (heartbeat, moved_at) in dict(self._nodes).items():
            self._nodes[node] = heartbeat, moved_at + seconds

    def _talk(self) -> None:
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
        word = json.dumps(asdict(self.mine()))
        store.set(f"watchdog/{ranks.rank}", word)
        self.alarm = store.check(["watchdog/alarm"])
        if ranks.nodes > 1 and ranks.is_first_of_node:
            store.set(f"node/{ranks.node}", word)
            for node in set(range(ranks.nodes)) - {ranks.node}:
                self._look_at(node, store)
        if store.check(["failed"]):
            self.failed = True  # also where the disk is full
            if ranks.is_first_of_node:
                fetch_failures(store, self.folder, ranks.world_size)

    def _look_at(self, node: int, store: Store) -> None:
        if not store.check([f"node/{node}"]):
            return  # it has not come yet: parallel.start_timeout is for that
        heartbeat = Heartbeat(**json.loads(store.get(f"node/{node}")))
        if node not in self._nodes or heartbeat.ticks != self._nodes[node][0].ticks:
            self._nodes[node] = heartbeat, time.monotonic()


def publish_failure(store: Store, record: dict[str, Any]) -> None:
    """Tell all nodes. The store counts who came first, because the clocks of two hosts differ."""

    def tell() -> None:
        with suppress(RuntimeError):
            own = store.clone()
            record["order"] = own.add("failures", 1)
            own.set(f"failure/{record['rank']}", json.dumps(record))
            own.set("failed", "")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(timeout=TOLD)  # a call of a store behind a cut link does not return


def fetch_failures(store: Store, folder: Path, world_size: int) -> None:
    """Write down what ranks of other nodes have told: their own files may be out of reach."""
    for rank in range(world_size):
        if store.check([f"failure/{rank}"]) and not failure_file(folder, rank).exists():
            write_failure(folder, json.loads(store.get(f"failure/{rank}")))
