"""The watchdog names the rank that stopped first, not one that waits for it, and lets people think at a debugger."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import in_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.engine.launch import heartbeat, watchdog
from src.engine.launch.failure import failure_files, first_failure, write_failure
from src.engine.launch.heartbeat import NODE_SILENT, START_SILENT, Heartbeat, Heartbeats, publish_failure
from src.engine.launch.supervisor import Ended
from src.engine.launch.watchdog import judge
from src.engine.machine.pulse import BACKWARD, FORWARD, pulse
from src.engine.machine.ranks import Ranks, machine_id

if TYPE_CHECKING:
    from torch.distributed import Store

PLACES = st.tuples(st.integers(5, 7), st.integers(1, 6))


def heartbeats(places: list[tuple[int, int]], ticks: list[int]) -> list[Heartbeat]:
    return [
        Heartbeat(rank, "here", 100 + rank, *place, tick)
        for rank, (place, tick) in enumerate(zip(places, ticks, strict=True))
    ]


@given(st.lists(PLACES, min_size=1, max_size=8))
def test_among_ranks_that_answer_the_one_furthest_behind_has_failed(places: list[tuple[int, int]]) -> None:
    failed, recorder, reason = judge(heartbeats(places, [1] * len(places)), heartbeats(places, [3] * len(places)), 120)
    assert failed.place == min(places)
    assert recorder == failed.rank
    assert f"rank {failed.rank} made no progress for 120 s" in reason
    assert ("the others waited for it" in reason) == (len(places) > 1 and places.count(min(places)) == 1)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(
    st.lists(st.tuples(PLACES, st.booleans()), min_size=2, max_size=8).filter(
        lambda ranks: {True, False} == {r[1] for r in ranks}
    )
)
def test_a_rank_that_does_not_answer_has_failed_wherever_it_is(ranks: list[tuple[tuple[int, int], bool]]) -> None:
    places, answers = [place for place, _ in ranks], [answer for _, answer in ranks]
    failed, recorder, _ = judge(
        heartbeats(places, [4] * len(ranks)), heartbeats(places, [4 + answer for answer in answers]), 120
    )
    assert not answers[failed.rank]
    assert answers[recorder]


def test_the_one_in_the_forward_pass_is_behind_those_in_the_backward_pass() -> None:
    now = heartbeats([(7, BACKWARD), (7, FORWARD), (7, BACKWARD)], [2, 2, 2])
    failed, _, reason = judge(heartbeats([(7, BACKWARD)] * 3, [1, 1, 1]), now, 120)
    assert failed.rank == 1
    assert "the forward pass of step 7" in reason


def test_a_debugger_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread stands in a frame of pdb.py while another thread looks."""
    seen: list[bool] = []
    look = threading.Thread(target=lambda: seen.append(watchdog._at_a_debugger()))
    code = compile("def stand(look):\n    look.start()\n    look.join()\n", "/somewhere/pdb.py", "exec")
    scope: dict[str, object] = {}
    exec(code, scope)
    scope["stand"](look)  # type: ignore[operator]
    look = threading.Thread(target=lambda: seen.append(watchdog._at_a_debugger()))
    look.start()
    look.join()
    assert seen == [True, False]


def test_a_suspended_process_is_not_taken_for_a_stalled_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-Z or `scontrol suspend`: the clock jumps between two ticks, which says nothing about the main thread."""
    dog = object.__new__(watchdog.Watchdog)
    clock = [0.0]
    ended: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog.Watchdog, "limit", 100)
    monkeypatch.setattr(dog, "ranks", Ranks(), raising=False)
    monkeypatch.setattr(dog, "heartbeats", Heartbeats(Ranks(), None, tmp_path), raising=False)
    monkeypatch.setattr(dog, "_end", ended.append, raising=False)

    class Ticks:
        jumps = iter([1.0] * 50 + [5000.0] + [1.0] * 49)

        def wait(self, seconds: float) -> bool:
            jump = next(self.jumps, None)
            clock[0] += jump or 0
            return jump is None

    monkeypatch.setattr(dog, "_over", Ticks(), raising=False)
    dog._watch()
    assert ended == [], "99 seconds of silence, and a suspension"
    Ticks.jumps = iter([1.0] * 200)
    dog._watch()
    assert len(ended) == 1


class Board:
    """A store that all heartbeats of a test share."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.words[key] = value

    def get(self, key: str) -> str:
        return self.words[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.words for key in keys)


def two_nodes(folder: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[Heartbeats, Heartbeats]:
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    board = Board()
    ranks = [Ranks(rank, 2, 0, 1, node=rank, nodes=2) for rank in range(2)]
    heartbeats = [Heartbeats(place, board, folder) for place in ranks]  # type: ignore[arg-type]
    for each in (*heartbeats, *heartbeats):
        speak(each)
    return heartbeats[0], heartbeats[1]


def speak(heartbeats: Heartbeats) -> None:
    heartbeats.ticks += 1
    heartbeats._exchange()
    heartbeats.answered_at = time.monotonic()


def test_a_node_that_falls_silent_is_named_and_one_that_speaks_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [0.0]
    first, second = two_nodes(tmp_path, clock, monkeypatch)
    monkeypatch.setattr(pulse, "step", 7)
    for clock[0] in range(1, 30):
        speak(first), speak(second)
        assert first.silent_node() is None and second.silent_node() is None
    silent_since = clock[0]
    while (lost := first.silent_node()) is None:
        clock[0] += 1
        speak(first)
    assert (lost.rank, lost.node) == (1, 1)
    assert NODE_SILENT < clock[0] - silent_since < 10


def test_a_node_that_has_not_begun_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Importing libraries from a slow disk keeps every thread of a rank waiting."""
    clock = [0.0]
    monkeypatch.setattr(pulse, "step", 0)
    monkeypatch.setattr(pulse, "steps_done", 0)  # nor has this rank: a step done here is one that all have done
    first, _ = two_nodes(tmp_path, clock, monkeypatch)
    speak(first)
    for clock[0], lost in ((30, False), (START_SILENT + 1, True)):
        speak(first)
        assert (first.silent_node() is not None) == lost


def test_a_node_whose_store_does_not_answer_blames_node_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    _, second = two_nodes(tmp_path, clock, monkeypatch)
    clock[0] += NODE_SILENT + 1
    lost = second.silent_node()
    assert lost is not None and lost.rank == 0
    second.forgive(NODE_SILENT)
    assert second.silent_node() is None, "it was suspended itself"


def test_a_late_store_is_no_proof_against_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    first, _ = two_nodes(tmp_path, clock, monkeypatch)
    clock[0] += NODE_SILENT + 1
    assert first.silent_node() is None


def test_a_failure_is_heard_also_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The thread ends with the error, and silence would be taken for the death of node 0."""

    def full(folder: Path, record: dict[str, object]) -> None:
        raise OSError(28, "No space left on device")

    _, second = two_nodes(tmp_path, [0.0], monkeypatch)
    monkeypatch.setattr(heartbeat, "write_failure", full)
    assert second.store is not None
    for key, word in (("failure/0", "{}"), ("failed", "")):
        second.store.set(key, word)
    with pytest.raises(OSError, match="No space"):
        speak(second)
    assert second.failed and second.peer_has_left()


def test_no_thread_is_inside_the_store_when_a_rank_has_come_to_its_end(tmp_path: Path) -> None:
    """One that is, while the interpreter shuts down, aborts the process: a run that is done would be lost."""
    inside, leave = threading.Event(), threading.Event()

    class Slow(Board):
        def set(self, key: str, value: str) -> None:
            inside.set()
            leave.wait(10)

    heartbeats = Heartbeats(Ranks(0, 2, 0, 2), Slow(), tmp_path)  # type: ignore[arg-type]
    heartbeats.start()
    assert inside.wait(10)
    threading.Timer(0.3, leave.set).start()
    heartbeats.close()
    assert "heartbeats" not in [thread.name for thread in threading.enumerate()]


def test_the_first_failure_is_the_first_to_arrive_whatever_the_clocks_say(tmp_path: Path) -> None:
    for rank, order, clock in ((0, 2, 100.0), (1, 1, 900.0)):
        record = {"rank": rank, "attempt": 0, "time": clock, "order": order, "is_echo": False, "reason": f"rank {rank}"}
        write_failure(tmp_path, record)
    assert first_failure(tmp_path, Ended(world_size=2))["rank"] == 1


def _fail_far_away(ranks: Ranks, store: Store, folder: str) -> list[str]:
    """Rank 1, on another node with a folder of its own, fails; what rank 0's folder then says."""
    from torch.distributed import TCPStore  # as in a run: a store in a file is removed when a clone of it goes

    place = dataclasses.replace(ranks, node=ranks.rank, nodes=2, local_rank=0, local_world_size=1)
    own = Path(folder) / f"node_{ranks.rank}"
    if ranks.rank == 0:
        meeting = store
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
    heartbeats = Heartbeats(place, store, own)
    speak(heartbeats)
    if ranks.rank == 1:
        publish_failure(store, {"rank": 1, "attempt": 0, "time": 0.0, "is_echo": False, "reason": "rank 1: it broke"})
        store.set("told", "")
    else:
        store.wait(["told"])
        speak(heartbeats)
        assert heartbeats.failed
    return [path.read_text() for path in failure_files(own)]


@pytest.mark.processes
def test_the_first_failure_travels_through_the_store(tmp_path: Path) -> None:
    told, _ = in_ranks(_fail_far_away, 2, str(tmp_path))
    assert len(told) == 1 and "it broke" in told[0] and '"order": 1' in told[0]


def test_pids_are_compared_on_one_machine_only() -> None:
    assert machine_id() == machine_id()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in machine_id()
