"""A launcher ends all processes that it has started, also grandchildren."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from timm_parallel.launch import job
from timm_parallel.machine.process import terminate_descendants
from timm_parallel.tests.small_runs import resolved

LIBRARY = Path(__file__).parents[3]
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
        answers.put((orphan, child, spared.pid))
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
    orphan, child, _ = answers.get(timeout=300)
    assert answers.get(timeout=300) == [False, False, True]
    launcher.join()
    until = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in (orphan, child)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in (orphan, child))
