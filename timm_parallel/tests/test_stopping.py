"""A stop signal must stop all ranks after the same step, and end a rank that is stuck. A launcher
ends all processes that it has started, also grandchildren. test_small_project.py tests the
checkpoint that a stop saves.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore

from timm_parallel.faults import watchdog
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.launch import job
from timm_parallel.machine.process import terminate_descendants
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import exit_after_stop_signal, stop_handler
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import resolved, start_run


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(("max_steps", "logged"), [(3, [2, 3]), ("null", [2, 4, 6])])
def test_epoch_ends_after_the_last_batch_or_at_max_steps_and_logs_means_since_the_last_logged_step(
    tmp_path: Path, max_steps: int | str, logged: list[int]
) -> None:
    config = resolved(
        "data.batch_size=4",
        "data.limit_train=24",
        "train.epochs=1",
        "train.log_every=2",
        f"train.max_steps={max_steps}",
    )
    run = start_run(config, tmp_path)
    losses: list[float] = []
    means: dict[int, float | None] = {}
    with run.training() as training:
        for step in training.steps():
            [batch] = step.batches()
            losses.append(step.backward(batch).item())
            numbers = step.update()
            training.log(numbers)
            if numbers:
                means[step.number] = numbers["train/loss"]
    assert list(means) == logged
    for end, start in zip(logged, [0, *logged], strict=False):
        of_window = losses[start:end]
        assert means[end] == pytest.approx(sum(of_window) / len(of_window), rel=1e-6)
    assert run.parts.progress.step == len(losses) == logged[-1]


def test_stop_request_stops_all_ranks_after_the_last_step_announced_by_the_fastest_rank() -> None:
    """A slow rank may need minutes for a step. The fastest rank has then already announced and
    begun a later step, which all ranks must train.
    """
    store = HashStore()
    early, late = [StopCoordinator(rank, 2, store) for rank in range(2)]
    assert not early.should_stop()
    late.request(15)
    while not late.stop_requested():
        time.sleep(0.01)
    assert not late.should_stop()
    assert early.should_stop() and late.should_stop()
    assert early.stop_requested()


@pytest.mark.parametrize("requested_by", [[2], [0, 1, 2]])
def test_all_ranks_stop_after_the_same_step_when_any_rank_requests_a_stop(
    requested_by: list[int],
) -> None:
    """Three threads simulate ranks of different speed. As in ddp, no rank is more than one step
    ahead of another.
    """
    store = HashStore()
    ranks = [StopCoordinator(rank, 3, store) for rank in range(3)]
    barrier = threading.Barrier(3)
    last = [0, 0, 0]

    def train(rank: int) -> None:
        for step in range(1, 10_000):
            # The barrier stands for the all-reduce of gradients, at which all ranks wait.
            barrier.wait(20)
            time.sleep(0.001 * rank)
            if step == 20 and rank in requested_by:
                ranks[rank].request(15)
            if ranks[rank].should_stop():
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


def in_a_long_call(ranks: Ranks, store: Any, is_stuck: bool) -> list[int]:
    """Send SIGTERM to this rank during a call of a C function that takes 2 s. The limit for a
    stuck rank is 0.5 s. Return the signals that were handled.
    """
    heard: list[int] = []
    stop_handler.request, stop_handler.heard_at = heard.append, None
    signal.signal(signal.SIGTERM, stop_handler)
    exit_after_stop_signal(0.5, lambda: is_stuck)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    until = time.monotonic() + 2.5
    rounds = 100_000
    while time.monotonic() < until and not heard:
        began = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
        # Choose the number of rounds so that the next call takes 2 s.
        rounds = int(rounds * 2 / max(0.02, time.monotonic() - began))
    time.sleep(0.1)
    return heard


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_rank_finishes_a_long_c_call_after_sigterm_unless_another_rank_has_exited() -> None:
    assert in_ranks(in_a_long_call, 1, False) == [[signal.SIGTERM]]
    with pytest.raises(pytest.fail.Exception, match=r"rank 0: 143"):
        in_ranks(in_a_long_call, 1, True)


@pytest.mark.slow(seconds=2)
def test_rank_detects_that_another_rank_has_left_when_the_heartbeats_of_that_rank_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "TICK", 0.05)
    store = HashStore()
    pair = [watchdog.Heartbeats(Ranks(rank, 2, rank, 2), store, tmp_path) for rank in range(2)]
    over = [threading.Event(), threading.Event()]
    for each, end in zip(pair, over, strict=True):
        threading.Thread(target=each.publish, args=(end,), daemon=True).start()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert not pair[0].peer_has_left()
        time.sleep(0.05)
    over[1].set()
    while not pair[0].peer_has_left():
        time.sleep(0.05)
    over[0].set()
    assert not watchdog.Heartbeats(Ranks(), None, tmp_path).peer_has_left()


LIBRARY = Path(__file__).parents[2]
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
    "flush=True); time.sleep(600)"
)
# Script that starts a child process in a new session, prints its process ID and exits. The child
# ignores SIGTERM and becomes an orphan.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""  # noqa: E501


def _launch(answers: Any) -> None:
    spared = subprocess.Popen(["sleep", "600"])
    with terminate_descendants(seconds=0.3):
        orphan = int(
            subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True).stdout
        )
        child = subprocess.Popen(["sleep", "600"]).pid
    answers.put([psutil.pid_exists(pid) for pid in (orphan, child)] + [spared.poll() is None])
    spared.kill()
    spared.wait()


# Script of a launcher that starts a rank and exits at once. At this time the rank has not yet asked
# the kernel for a signal at the death of its parent.
LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "RUN_LAUNCHER": str(os.getpid())}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment).pid, flush=True)
os._exit(0)
"""
RANK = """
import time
time.sleep(0.5)
from timm_parallel.machine.process import kill_on_parent_exit
kill_on_parent_exit()
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_rank_ends_when_the_launcher_dies_during_startup() -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK]
    done = subprocess.run(
        command, cwd=LIBRARY, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == "", "the rank must end by the signal, not by an exception"
    rank, until = psutil.Process(int(done.stdout)), time.monotonic() + 60
    try:
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return
    finally:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def test_environment_of_ranks_contains_the_pid_of_the_launcher() -> None:
    assert job._environment(resolved().parallel)["RUN_LAUNCHER"] == str(os.getpid())


@pytest.mark.processes
def test_terminate_descendants_ends_orphans_but_no_children_started_before_the_with_block() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    launcher = context.Process(target=_launch, args=(answers,))
    launcher.start()
    assert answers.get(timeout=300) == [False, False, True]
    launcher.join()
