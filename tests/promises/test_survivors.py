"""Whatever a launcher starts is gone after it: children, grandchildren that left its group, and those deaf to SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest
from conftest import ROOT, resolved

from src.engine.launch import supervisor
from src.engine.machine.process import no_survivors

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
# A child that starts a deaf grandchild in a session of its own, says its pid, and ends: the grandchild is an orphan.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


def _launch(answers: Any) -> None:
    spared = subprocess.Popen(["sleep", "600"])
    with no_survivors(seconds=0.3):
        orphan = int(subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True).stdout)
        child = subprocess.Popen(["sleep", "600"]).pid
        answers.put((orphan, child, spared.pid))
    answers.put([psutil.pid_exists(pid) for pid in (orphan, child)] + [spared.poll() is None])
    spared.kill()
    spared.wait()


# A launcher that starts a rank and is gone before that has asked the kernel to die with it.
LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "RUN_LAUNCHER": str(os.getpid())}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment).pid, flush=True)
os._exit(0)
"""
RANK = "import time; time.sleep(0.5); from src.engine.machine.process import die_with_parent; die_with_parent(); time.sleep(600)"


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_a_rank_does_not_outlive_a_launcher_that_dies_while_it_starts() -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
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


def test_ranks_are_told_who_has_started_them() -> None:
    assert supervisor._environment(resolved("parallel=single").parallel)["RUN_LAUNCHER"] == str(os.getpid())


@pytest.mark.processes
def test_orphans_and_the_deaf_are_found_and_others_spared() -> None:
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
