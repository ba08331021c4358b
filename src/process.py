"""Manners of the processes that a run starts: they die with their parent and leave signals to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that `kill -9` of a launcher leaves nothing behind."""
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def exit_after_stop_signal(seconds: float) -> None:
    """Leave `seconds` after a stop signal at the latest, with exit code 128 + signal.

    Python's own handlers run between bytecodes of the main thread, so a rank that waits in a collective would never
    see the signal; the C-level handler writes to this pipe at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(reading, 64):
                if number in STOP_SIGNALS:
                    time.sleep(seconds)
                    os._exit(128 + number)

    threading.Thread(target=watch, name="stop-signal", daemon=True).start()


def ignore_stop_signals() -> None:
    """For loader workers: a signal to the whole process group must not kill them before their rank has saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
