"""The watchdog names the rank that stopped first, not one that waits for it, and lets people think at a debugger."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.engine.launch import watchdog
from src.engine.launch.watchdog import Sign, judge
from src.engine.machine.pulse import BACKWARD, FORWARD

PLACES = st.tuples(st.integers(5, 7), st.integers(1, 6))


def signs(places: list[tuple[int, int]], ticks: list[int]) -> list[Sign]:
    return [
        Sign(rank, "here", 100 + rank, *place, tick)
        for rank, (place, tick) in enumerate(zip(places, ticks, strict=True))
    ]


@given(st.lists(PLACES, min_size=1, max_size=8))
def test_among_ranks_that_answer_the_one_furthest_behind_has_failed(places: list[tuple[int, int]]) -> None:
    failed, recorder, reason = judge(signs(places, [1] * len(places)), signs(places, [3] * len(places)), 120)
    assert failed.place == min(places)
    assert recorder == failed.rank
    assert f"rank {failed.rank} made no progress for 120 s" in reason
    assert ("the others waited for it" in reason) == (len(places) > 1 and places.count(min(places)) == 1)


@given(
    st.lists(st.tuples(PLACES, st.booleans()), min_size=2, max_size=8).filter(
        lambda ranks: {True, False} == {r[1] for r in ranks}
    )
)
def test_a_rank_that_does_not_answer_has_failed_wherever_it_is(ranks: list[tuple[tuple[int, int], bool]]) -> None:
    places, answers = [place for place, _ in ranks], [answer for _, answer in ranks]
    failed, recorder, _ = judge(signs(places, [4] * len(ranks)), signs(places, [4 + answer for answer in answers]), 120)
    assert not answers[failed.rank]
    assert answers[recorder]


def test_the_one_in_the_forward_pass_is_behind_those_in_the_backward_pass() -> None:
    now = signs([(7, BACKWARD), (7, FORWARD), (7, BACKWARD)], [2, 2, 2])
    failed, _, reason = judge(signs([(7, BACKWARD)] * 3, [1, 1, 1]), now, 120)
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


def test_a_suspended_process_is_not_taken_for_a_stalled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z or `scontrol suspend`: the clock jumps between two ticks, which says nothing about the main thread."""
    dog = object.__new__(watchdog.Watchdog)
    clock = [0.0]
    ended: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog.Watchdog, "limit", 100)
    monkeypatch.setattr(dog, "_show", lambda: False, raising=False)
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
