"""The signals that ask a run to stop, and what each process does about them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from src.engine.machine.platform import STOP_SIGNALS

ECHO_SECONDS = 0.5  # one Ctrl-C may arrive twice: from the terminal and from the agent


class Stopped(BaseException):
    """A signal asks this rank to leave. Not an Exception, so that no `except Exception` on the way keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopHandler:
    """The first stop signal is handed to `request`, to stop at the next step; without one, or a second time, leave at once."""

    def __init__(self) -> None:
        self.request: Callable[[int], None] | None = None
        self.heard_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first, now = self.heard_at is None, time.monotonic()
        self.heard_at = self.heard_at or now
        if first and self.request is not None:
            self.request(number)
        elif first or now - self.heard_at > ECHO_SECONDS:
            ignore_stop_signals()
            raise Stopped(number)


stop_handler = StopHandler()


def exit_after_stop_signal(seconds: float, is_stuck: Callable[[], bool]) -> None:
    """After a stop signal that `stop_handler` has not heard, leave with exit code 128 + signal once `is_stuck` for `seconds`.

    Python's own handlers run between bytecodes of the main thread, so a rank that waits in a collective for ranks that
    have left would never see the signal; the C-level handler writes to this pipe at once. A long call that is no such
    wait ends by itself, and then the run is saved: the seconds do not count for it.
    """
    reading, writing = os.pipe()
    if hasattr(os, "set_blocking"):  # Windows got it with Python 3.12, and does not ask for it
        os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(reading, 64):
                if number in STOP_SIGNALS:
                    _leave_if_stuck(number, seconds, is_stuck)

    threading.Thread(target=watch, name="stop-signal", daemon=True).start()


def _leave_if_stuck(number: int, seconds: float, is_stuck: Callable[[], bool]) -> None:
    stuck_since = None
    while stop_handler.heard_at is None:
        now = time.monotonic()
        stuck_since = (stuck_since or now) if is_stuck() else None
        if stuck_since is not None and now - stuck_since >= seconds:
            os._exit(128 + number)
        time.sleep(min(1.0, seconds / 4))


def ignore_stop_signals() -> None:
    """For loader workers: a signal to the whole process group must not kill them before their rank has saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
