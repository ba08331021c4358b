"""Tests of the watchdog."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from timm_parallel.faults import failure, watchdog
from timm_parallel.faults.failure import (
    PUBLISH,
    RankExits,
    failure_files,
    first_failure,
    publish_failure,
    record_of,
    write_failure,
)
from timm_parallel.faults.liveness import BACKWARD, FORWARD, liveness
from timm_parallel.faults.watchdog import (
    LEAVE,
    LEFT,
    NODE_SILENT,
    START_SILENT,
    TICK,
    Heartbeat,
    Heartbeats,
    judge,
)
from timm_parallel.launch.rank import run_rank
from timm_parallel.machine.files import RunFolder
from timm_parallel.machine.ranks import Ranks
from timm_parallel.testing.configs import resolved
from timm_parallel.testing.ranks import in_ranks

PLACES = st.tuples(st.integers(5, 7), st.integers(1, 6))


def heartbeats(places: list[tuple[int, int]], ticks: list[int]) -> list[Heartbeat]:
    return [
        Heartbeat(rank, "here", 100 + rank, *place, tick)
        for rank, (place, tick) in enumerate(zip(places, ticks, strict=True))
    ]


@given(st.lists(PLACES, min_size=1, max_size=8))
def test_watchdog_blames_the_rank_furthest_behind_when_all_ranks_respond(
    places: list[tuple[int, int]],
) -> None:
    failed, recorder, reason = judge(
        heartbeats(places, [1] * len(places)), heartbeats(places, [3] * len(places)), 120
    )
    assert failed.position == min(places)
    assert recorder == failed.rank
    assert f"rank {failed.rank} made no progress for 120 s" in reason
    assert ("the others waited for it" in reason) == (
        len(places) > 1 and places.count(min(places)) == 1
    )


# On a busy machine, Hypothesis may be too slow to generate examples in its time limit.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(PLACES, st.booleans()), min_size=2, max_size=8).filter(
        lambda ranks: {True, False} == {r[1] for r in ranks}
    )
)
def test_watchdog_blames_an_unresponsive_rank_even_when_other_ranks_are_further_behind(
    ranks: list[tuple[tuple[int, int], bool]],
) -> None:
    places, answers = [place for place, _ in ranks], [answer for _, answer in ranks]
    failed, recorder, _ = judge(
        heartbeats(places, [4] * len(ranks)),
        heartbeats(places, [4 + answer for answer in answers]),
        120,
    )
    assert not answers[failed.rank]
    assert answers[recorder]


def test_watchdog_blames_the_rank_in_the_forward_pass_when_other_ranks_are_in_backward() -> None:
    now = [
        Heartbeat(rank, f"host{rank}", 1, 7, FORWARD if rank == 1 else BACKWARD, 2, node=rank)
        for rank in range(3)
    ]
    failed, _, reason = judge(heartbeats([(7, BACKWARD)] * 3, [1, 1, 1]), now, 120)
    assert failed.rank == 1
    assert reason.startswith("node 1 (host1): rank 1 made no progress")
    assert "the forward pass of step 7" in reason


def test_watchdog_detects_that_the_main_thread_is_inside_pdb() -> None:
    """The main thread executes code of a file pdb.py while another thread looks for a debugger."""
    seen: list[bool] = []

    def look() -> None:
        watching = threading.Thread(target=lambda: seen.append(watchdog._is_in_debugger()))
        watching.start()
        watching.join()

    exec(compile("look()", "/somewhere/pdb.py", "exec"), {"look": look})
    look()
    assert seen == [True, False]


def test_watchdog_ends_a_run_after_checks_without_progress_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that was suspended by Ctrl-Z or `scontrol suspend` makes no checks meanwhile."""
    dog = object.__new__(watchdog.Watchdog)
    checks: list[float] = []
    ended: list[float] = []
    monkeypatch.setattr(watchdog.Watchdog, "limit", 100)
    for name, value in {
        "ranks": Ranks(),
        "heartbeats": Heartbeats(Ranks(), None, tmp_path),
        "_end": ended.append,
    }.items():
        monkeypatch.setattr(dog, name, value, raising=False)

    class Ticks:
        def wait(self, seconds: float) -> bool:
            checks.append(seconds)
            return len(checks) > 200

    monkeypatch.setattr(dog, "_over", Ticks(), raising=False)
    dog._watch()
    # The first check sees the counter of the main thread for the first time.
    assert (len(checks), ended) == (102, [101])


def two_nodes(folder: Path) -> tuple[Heartbeats, Heartbeats]:
    store = HashStore()
    ranks = [Ranks(rank, 2, 0, 1, node=rank, nodes=2) for rank in range(2)]
    heartbeats = [Heartbeats(place, store, folder) for place in ranks]
    for each in (*heartbeats, *heartbeats):
        exchange(each)
    return heartbeats[0], heartbeats[1]


def exchange(heartbeats: Heartbeats, count: int = 1) -> None:
    for _ in range(count):
        heartbeats.ticks += 1
        heartbeats._exchange()


def test_heartbeats_of_all_ranks_are_read_in_two_requests(tmp_path: Path) -> None:
    """Every node reads all of them every second."""
    store, requests = HashStore(), []
    for rank in range(64):
        exchange(Heartbeats(Ranks(rank, 64, 0, 1, node=rank, nodes=64), store, tmp_path))

    class Counting:
        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(store, name)

    first = Heartbeats(Ranks(0, 64, 0, 1, nodes=64), cast(Store, Counting()), tmp_path)
    assert [heartbeat.rank for heartbeat in first.all()] == list(range(64))
    assert len(requests) == 2


def test_node_without_heartbeats_is_reported_lost_only_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = two_nodes(tmp_path)
    monkeypatch.setattr(liveness, "step", 7)
    for _ in range(30):
        exchange(first)
        exchange(second)
        assert first.silent_node() is None and second.silent_node() is None
    # The first of these exchanges reads the last heartbeat of node 1.
    exchange(first, NODE_SILENT + 1)
    assert first.silent_node() is None
    exchange(first)
    lost = first.silent_node()
    assert lost is not None and (lost.rank, lost.node) == (1, 1)


def test_node_without_heartbeats_has_a_longer_limit_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first step, a rank imports libraries. On a slow disk this blocks all its threads,
    so that heartbeats stop.
    """
    monkeypatch.setattr(liveness, "step", 0)
    # Pretend that this rank has trained no step, because a step of one rank would be a step of all
    # ranks.
    monkeypatch.setattr(liveness, "steps_done", 0)
    first, _ = two_nodes(tmp_path)
    exchange(first, START_SILENT + 1)
    assert first.silent_node() is None
    exchange(first)
    assert first.silent_node() is not None


def test_node_1_but_not_node_0_reports_a_loss_when_the_torch_store_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = two_nodes(tmp_path)
    # The limit is longer before the first step.
    monkeypatch.setattr(liveness, "steps_done", 1)
    exchange(first, NODE_SILENT + 1)
    first.unanswered = second.unanswered = NODE_SILENT + 1
    lost = second.silent_node()
    assert lost is not None and lost.rank == 0
    assert first.silent_node() is None, "the heartbeats of node 0 itself were delayed"


def test_rank_that_looked_for_others_after_a_stop_signal_reports_no_lost_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the first rank of a node reads the heartbeats of others in every exchange. The other
    ranks read them once more after a stop signal, and then save a checkpoint for many seconds.
    """
    monkeypatch.setattr(liveness, "steps_done", 1)
    store = HashStore()
    ranks = [
        Heartbeats(Ranks(r, 4, r % 2, 2, node=r // 2, nodes=2), store, tmp_path) for r in range(4)
    ]
    for each in ranks:
        exchange(each)
    assert not ranks[3].peer_has_left()
    for _ in range(NODE_SILENT + 2):
        for each in ranks:
            exchange(each)
            assert each.silent_node() is None


def test_first_rank_waits_for_a_cause_longer_while_a_node_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The watchdog reports the node when it has been silent for NODE_SILENT heartbeats."""
    first, _ = two_nodes(tmp_path)
    monkeypatch.setattr(watchdog, "CAUSE", 0.0)
    first.wait_for_cause()
    exchange(first, LEFT + 1)
    waiting = threading.Thread(target=first.wait_for_cause)
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    write_failure(tmp_path, record_of(1, tmp_path, "the cause"))
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_heartbeat_thread_marks_the_run_failed_when_the_failure_record_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error ends the heartbeat thread of node 0. Without the mark, other nodes would think that
    node 0 is dead.
    """

    def full(folder: Path, record: dict[str, object]) -> None:
        raise OSError(28, "No space left on device")

    _, second = two_nodes(tmp_path)
    monkeypatch.setattr(failure, "write_failure", full)
    assert second.store is not None
    for key, value in (("failure/0", "{}"), ("failed", "")):
        second.store.set(key, value)
    with pytest.raises(OSError, match="No space"):
        exchange(second)
    assert second.failed and second.peer_has_left()


def test_leaving_the_watchdog_waits_until_the_heartbeat_thread_has_left_the_torch_store(
    tmp_path: Path,
) -> None:
    """A thread that is inside a store call at interpreter shutdown aborts the process. A completed
    run would then count as failed.
    """
    inside, leave = threading.Event(), threading.Event()

    def wait_inside(*_: str) -> None:
        inside.set()
        leave.wait(10)

    store = MagicMock(set=wait_inside, check=lambda keys: False)
    store.clone.return_value = store
    ranks, before = Ranks(0, 2, 0, 2), threading.active_count()
    with watchdog.Watchdog(resolved().parallel, tmp_path, ranks, store, sys.stderr):
        assert inside.wait(10)
        timer = threading.Timer(0.3, leave.set)
        timer.start()
    timer.join()
    assert threading.active_count() == before


def test_first_failure_is_chosen_by_order_of_arrival_instead_of_clock_time(tmp_path: Path) -> None:
    for rank, order, clock in ((0, 2, 100.0), (1, 1, 900.0)):
        write_failure(tmp_path, record_of(rank, tmp_path, "") | {"order": order, "time": clock})
    assert first_failure(tmp_path, RankExits(world_size=2))["rank"] == 1


def test_failure_record_of_a_rank_reaches_another_node_through_the_torch_store(
    tmp_path: Path,
) -> None:
    first, second = two_nodes(tmp_path)
    assert second.store is not None
    publish_failure(second.store, record_of(1, tmp_path, "it broke"))
    exchange(first)
    assert first.failed
    (record,) = [path.read_text() for path in failure_files(tmp_path)]
    assert "it broke" in record and '"order": 1' in record


@pytest.mark.parametrize(("exception", "limit"), [("NodeLost", 3.0), ("RuntimeError", LEAVE + 3.0)])
def test_all_ranks_of_a_node_end_within_seconds_after_one_rank_detects_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exception: str, limit: float
) -> None:
    """Only the first rank of a node watches the other nodes. The other ranks of the node wait in a
    collective for the lost node.
    """
    clock, ended = [0.0], []
    store = HashStore()
    peer = Heartbeats(Ranks(1, 4, 1, 2, node=0, nodes=2), store, tmp_path)
    dog = object.__new__(watchdog.Watchdog)
    for name, value in {
        "ranks": peer.ranks,
        "heartbeats": peer,
        "before_exit": lambda: None,
    }.items():
        monkeypatch.setattr(dog, name, value, raising=False)
    monkeypatch.setattr(watchdog.Watchdog, "limit", 1000)
    monkeypatch.setattr(watchdog, "exit_at_once", lambda code: ended.append(clock[0]))

    class Ticks:
        def wait(self, seconds: float) -> bool:
            clock[0] += watchdog.TICK
            exchange(peer)
            return bool(ended) or clock[0] > 60

    monkeypatch.setattr(dog, "_over", Ticks(), raising=False)
    publish_failure(store, {"rank": 0, "exception": exception})
    dog._watch()
    assert ended and ended[0] <= limit
    # 15 s, within which a lost node ends the run, is the sum of: two ticks until the first rank
    # detects the loss, the time limits of the store, two ticks until the other ranks notice, and
    # the time limit of the launcher.
    assert 2 * TICK + NODE_SILENT + PUBLISH + 2 * TICK + 2.0 <= 15


def _replace(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    (folder / "config.yaml").touch()


@pytest.mark.parametrize(
    "change",
    [
        shutil.rmtree,
        _replace,
        # `rm -rf` leaves such a folder if a rank writes a file at the same time.
        lambda folder: (folder / "config.yaml").unlink(),
    ],
)
def test_run_folder_counts_as_gone_only_when_it_is_deleted_moved_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, "the file system does not respond")

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    with closing(RunFolder(folder)) as place:
        assert not place.problem()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", fail)
            assert not place.problem()
        change(folder)
        assert place.problem()


def steps_counted_in_own_loop(ranks: Ranks, store: Any, folder: Path) -> int:
    """Run a training loop that does not report its steps to the library, and return their number
    as the watchdog sees it.
    """

    def loop(*given: object) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            weight.grad = torch.ones(1)
            optimizer.step()

    (folder / "logs").mkdir()
    assert run_rank(loop, resolved(), folder, Ranks(), None) == 0
    return liveness.steps_done


def fail_in_replaced_folder(ranks: Ranks, store: Any, folder: Path) -> int:
    """Run a training loop that fails after another run has taken the name of its folder."""

    def loop(*given: object) -> None:
        folder.rename(folder.with_name("moved"))
        (folder / "logs").mkdir(parents=True)
        raise ValueError("no data")

    (folder / "logs").mkdir(parents=True)
    return run_rank(loop, resolved(), folder, Ranks(), None)


@pytest.mark.processes
def test_failed_rank_writes_nothing_into_the_folder_of_another_run(tmp_path: Path) -> None:
    assert in_ranks(fail_in_replaced_folder, 1, tmp_path / "run") == [1]
    assert list((tmp_path / "run/logs").iterdir()) == []


@pytest.mark.processes
def test_optimizer_steps_of_any_training_loop_count_as_progress(tmp_path: Path) -> None:
    assert in_ranks(steps_counted_in_own_loop, 1, tmp_path) == [3]
