"""Stop signals of ranks, and how a process exits. A rank whose main thread is blocked cannot run
its signal handler; a thread ends it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from timm_parallel.machine.files import remove_lock_files
from timm_parallel.machine.platform import STOP_SIGNALS

# Seconds in which a second signal counts as the same one. Ctrl-C may arrive twice, from the
# terminal and from torch's agent.
ECHO_SECONDS = 0.5


class Stopped(BaseException):
    """Exception for a stop signal. It is not a subclass of Exception, so that no `except Exception`
    catches it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopHandler:
    """Signal handler for stop signals. The first signal calls `request`, which asks all ranks to
    stop. A later signal raises Stopped, and so does the first one while `request` is None.
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
    """Start a thread that ends this process with exit code 128 + signal number if the process stays
    stuck after a stop signal.

    `is_stuck`: returns True if the main thread cannot handle the signal. `seconds`: how long it
    must return True. Python runs signal handlers only in the main thread, so they never run while
    that thread waits in a collective for ranks that have exited. Python's C code writes the number
    of each signal to a pipe at once, and the thread reads the pipe.
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
    """Return the stop signals that this process does not ignore. Signals that `nohup` or `&`
    ignores are left out, and so stay ignored.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signal_handlers(handler: object) -> Iterator[None]:
    """Install a handler for the stop signals during the `with` block, then restore the previous
    handlers. Ignored signals stay ignored. `handler`: None if the code in the block installs
    handlers itself. Only the previous handlers are then restored.
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
    """Ignore all stop signals in this process from now on, e.g. in a loader worker while its rank
    saves.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# True after a tracker has failed. The exit handlers of its library may then wait for a server that
# does not respond.
exit_handlers_may_block = False


def exit_process(code: int) -> NoReturn:
    """Exit with a code. After a failure in a process group, skip the destructors of NCCL and CUDA,
    which may wait for other ranks forever. The shutdown of the interpreter is then skipped too,
    because it aborts if a thread is inside torch's store.
    """
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    if exit_handlers_may_block or (code and has_group):
        if not exit_handlers_may_block:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """Exit with a code, without `finally` blocks and exit handlers, which may block. Lock files and
    temporary folders are deleted first.
    """
    remove_lock_files()
    # Delete the temporary folder of multiprocessing, in which loader workers have their sockets.
    # The module is not imported here, because any thread may call this function at any time.
    util = sys.modules.get("multiprocessing.util")
    # Keep a folder that a parent process has created. Only the process that creates it has the
    # finalizer.
    finalizers = [] if util is None else list(util._finalizer_registry.values())
    if util is not None and any(each._callback is util._remove_temp_dir for each in finalizers):
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)
