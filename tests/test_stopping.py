"""A signal stops all ranks after the same step, and a rank that cannot is ended; what was saved: promises/test_resume.py."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import in_ranks
from torch.distributed import HashStore

from src.engine.launch import heartbeat
from src.engine.machine.ranks import Ranks
from src.engine.machine.signals import exit_after_stop_signal, stop_handler
from src.parallel.stopping import Stopping


def test_alone_the_step_under_way_is_the_last() -> None:
    stopping = Stopping()
    assert not stopping.is_due() and not stopping.is_over
    stopping.request(15)
    assert stopping.is_due() and stopping.is_over
    assert stopping.signal == 15


def test_a_rank_that_has_left_a_step_is_waited_for_in_the_next() -> None:
    """It may close an epoch's books for minutes before its next step begins; nobody may stop before that step."""
    store = HashStore()
    early, late = [Stopping(rank, 2, store) for rank in range(2)]
    assert not early.is_due()
    late.request(15)
    while not late.is_asked():
        time.sleep(0.01)
    assert not late.is_due()
    assert early.is_due() and late.is_due()
    assert early.is_asked() and early.is_over and late.is_over


@pytest.mark.parametrize("asked_by", [[0], [2], [0, 1, 2]])
def test_all_ranks_stop_after_the_same_step(asked_by: list[int]) -> None:
    """Three threads play ranks that step at their own pace, within one step of each other as in ddp."""
    store = HashStore()
    ranks = [Stopping(rank, 3, store) for rank in range(3)]
    barrier = threading.Barrier(3)
    last = [0, 0, 0]

    def train(rank: int) -> None:
        for step in range(1, 10_000):
            barrier.wait(20)  # the all-reduce of the step
            time.sleep(0.001 * rank)
            if step == 20 and rank in asked_by:
                ranks[rank].request(15)
            if ranks[rank].is_due():
                last[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert last[0] >= 20
    assert len(set(last)) == 1
    assert [stopping.signal for stopping in ranks] == [15, 15, 15]


@contextmanager
def own_stop_handler() -> Iterator[list[int]]:
    """What `stop_handler` is asked for, here, as in training."""
    heard: list[int] = []
    stop_handler.request, stop_handler.heard_at = heard.append, None
    signal.signal(signal.SIGTERM, stop_handler)
    yield heard


def in_a_long_call(ranks: Ranks, store: Any, is_stuck: bool) -> list[int]:
    """A signal in the middle of a call of 2 s that runs no Python, with a limit of half a second."""
    with own_stop_handler() as heard:
        exit_after_stop_signal(0.5, lambda: is_stuck)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        until = time.monotonic() + 2.5
        rounds = 100_000
        while time.monotonic() < until and not heard:
            began = time.monotonic()
            hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
            rounds = int(rounds * 2 / max(0.02, time.monotonic() - began))  # the next takes 2 s
        time.sleep(0.1)
        return heard


@pytest.mark.processes
def test_a_long_call_is_waited_for_and_a_wait_for_ranks_that_have_left_is_not() -> None:
    assert in_ranks(in_a_long_call, 1, False) == [[signal.SIGTERM]]
    with pytest.raises(pytest.fail.Exception, match=r"rank 0: 143"):
        in_ranks(in_a_long_call, 1, True)


def test_a_rank_that_says_nothing_any_more_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "TICK", 0.05)
    monkeypatch.setattr(heartbeat, "LEFT", 0.4)
    store = HashStore()
    pair = [heartbeat.Heartbeats(Ranks(rank, 2, rank, 2), store, tmp_path) for rank in range(2)]
    for each in pair:
        each.start()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert not pair[0].peer_has_left()
        time.sleep(0.05)
    pair[1].close()
    while not pair[0].peer_has_left():
        time.sleep(0.05)
    pair[0].close()
    assert not heartbeat.Heartbeats(Ranks(), None, tmp_path).peer_has_left()
