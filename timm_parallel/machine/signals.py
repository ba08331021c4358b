"""Stop signals of ranks: the signal handler, and the exit of a rank whose main thread cannot run
the handler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from timm_parallel.machine.platform import STOP_SIGNALS
from timm_parallel.machine.process import exit_at_once

ECHO_SECONDS = 0.5  # the same Ctrl-C may arrive twice: from the terminal and from the agent


class Stopped(BaseException):
    """Raised on a stop signal. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopHandler:
    """Signal handler: calls `request` at the first stop signal. Without it, and at a later signal,
    raises Stopped.
    """

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
    """Start a thread that exits with code 128 + signal if `is_stuck` returns True for `seconds`
    after a stop signal.

    Python runs signal handlers in the main thread, so never while that thread waits in a collective
    for ranks that have exited. Python's C handler writes the signal's number to a pipe at once,
    which the thread reads.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(reading, 64):
                if number in STOP_SIGNALS:
                    _exit_if_stuck(number, seconds, is_stuck)

    threading.Thread(target=watch, name="stop-signal", daemon=True).start()


def _exit_if_stuck(number: int, seconds: float, is_stuck: Callable[[], bool]) -> None:
    stuck_since = None
    while stop_handler.heard_at is None:
        now = time.monotonic()
        stuck_since = (stuck_since or now) if is_stuck() else None
        if stuck_since is not None and now - stuck_since >= seconds:
            exit_at_once(128 + number)
        time.sleep(min(1.0, seconds / 4))


def heeded_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore. By convention, what `nohup` or `&`
    ignores stays ignored.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signal_handlers(handler: object) -> Iterator[None]:
    """Install `handler` for the heeded signals during the `with` block (None: none), then restore
    the previous handlers.
    """
    previous = {number: signal.getsignal(number) for number in heeded_signals()}
    try:
        if handler is not None:
            for number in previous:
                signal.signal(number, handler)  # type: ignore[arg-type]
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


def ignore_stop_signals() -> None:
    """Ignore all stop signals in this process,
    for example in a loader worker while its rank saves.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
