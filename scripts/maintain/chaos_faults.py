"""Faults that scripts/maintain/chaos.py injects into a running training, and access to the
processes of the run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

# Seconds after which a process that still runs counts as hanging.
GRACE = 90.0


@dataclass
class Life:
    """The processes of a run from a start or resume until they end, by themselves or because of a
    fault.
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        ranks = []
        for child in self.family():
            try:
                if child.ppid() == self.process.pid and "timm_parallel.rank" in child.cmdline():
                    ranks.append(child)
            except psutil.NoSuchProcess:
                continue
        return ranks

    def ranks_in_training(self) -> int:
        """Wait until the run trains, and return its number of ranks. A number above 0 shows that
        faults will hit processes that train.
        """
        while self.process.poll() is None and not (self.folder / "metrics.jsonl").exists():
            time.sleep(0.02)
        return len(self.ranks())

    def end(self) -> tuple[int, str]:
        """Wait until the run has ended, and kill it if it hangs. Return (exit code, complaint)."""
        try:
            return self.process.wait(timeout=GRACE), ""
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(), f"still there after {GRACE:.0f} s"

    def loader_workers(self) -> list[psutil.Process]:
        direct = {rank.pid for rank in self.ranks()}
        return [child for child in self.family() if child.pid not in direct]


def _signal(
    number: int, to_group: bool = False
) -> Callable[[random.Random, Life], tuple[int, ...]]:
    def send(draw: random.Random, life: Life) -> tuple[int, ...]:
        if to_group:
            os.killpg(life.process.pid, number)
        else:
            life.process.send_signal(number)
        # Exit codes that are right: 128 + signal; 0 if the run was about to end; -signal if the
        # process did not handle signals yet, or no longer.
        return (128 + number, 0, -number)

    return send


def _kill_one(which: str, number: int) -> Callable[[random.Random, Life], tuple[int, ...]]:
    def kill(draw: random.Random, life: Life) -> tuple[int, ...]:
        processes = [life.process] if which == "launcher" else getattr(life, which)()
        # The list of processes is empty if the run is about to end.
        if processes:
            draw.choice(processes).send_signal(number)
        return (-9,) if which == "launcher" else (1, 0)

    return kill


KINDS: dict[str, Callable[[random.Random, Life], tuple[int, ...]]] = {
    "kill -9 a rank": _kill_one("ranks", signal.SIGKILL),
    "kill -9 the launcher": _kill_one("launcher", signal.SIGKILL),
    "kill -9 a loader worker": _kill_one("loader_workers", signal.SIGKILL),
    "crash of a rank": _kill_one("ranks", signal.SIGSEGV),
    "stop of a rank (SIGSTOP)": _kill_one("ranks", signal.SIGSTOP),
    "SIGINT": _signal(signal.SIGINT),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGINT to the group": _signal(signal.SIGINT, to_group=True),
    "SIGTERM to the group": _signal(signal.SIGTERM, to_group=True),
}
