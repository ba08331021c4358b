"""Coordinated shutdown: after a signal on any rank, all ranks stop after the same step."""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

SIGNAL_POLL_SECONDS = 0.25
PROMISE_SECONDS = (
    10.0  # to wait for ranks that may have died; then this rank stops after its present step
)


class StopCoordinator:
    """Agreement of all ranks on the last step before they stop. Steps count from the start of the
    process.
    """

    # A thread per rank uses the store, so no step needs a collective. After a signal, each rank
    # publishes its present step and waits at the end of it. The largest of these steps is the last
    # step for all ranks.
    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None) -> None:
        self.signal: int | None = None
        self.stopped = False  # the last result of `should_stop`
        self._rank, self._world_size, self._store = rank, world_size, store
        self._step = 1  # the step in progress, or the next one
        self._hold: int | None = (
            None  # the step after which this rank waits until the last step is decided
        )
        self._last: int | None = None
        self._decided = threading.Event()
        self._wake = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(
            target=self._follow, args=(store,), name="stopping", daemon=True
        )
        if store is not None:
            self._thread.start()
            atexit.register(self.close, 1.0)  # for a process that ends by an exception or a signal

    def close(self, seconds: float = PROMISE_SECONDS) -> None:
        """Stop the thread: it would abort the process if it used the store while the interpreter
        shuts down.
        """
        if self._thread.is_alive():
            self._leaving = True
            self._wake.set()
            self._thread.join(timeout=seconds)

    def request(self, number: int) -> None:
        """Ask all ranks to stop because of signal `number`. May be called in a signal handler of
        the main thread.
        """
        self.signal = number
        if self._store is None:
            self._hold = self._last = self._step
            self._decided.set()
        self._wake.set()

    def should_stop(self) -> bool:
        """Return True, on all ranks alike, if the step that has just ended is the last. Call it
        once after each step.
        """
        # _step is set before _hold is read, and _agree reads _step again after it has set _hold. So
        # at least one of the two threads sees the value of the other, and no rank publishes a step
        # that it has already finished.
        self._step += 1
        if self._hold is not None and self._hold < self._step:
            self._decided.wait()
            assert self._last is not None
            self.stopped = self._last < self._step
        return self.stopped

    def stop_requested(self) -> bool:
        """Return True if a signal has reached any rank and the last step is decided. Ranks may
        notice at different steps.
        """
        if self._hold is None:
            return False
        self._decided.wait()
        return True

    def _follow(self, store: Store) -> None:
        while not self._wake.wait(SIGNAL_POLL_SECONDS):
            try:
                if store.check(["stop/signal"]):
                    self.signal = int(store.get("stop/signal"))
                    break
            except RuntimeError:  # the store has closed, and the run has ended
                return
        if self._leaving:
            return
        try:
            self._agree(store)
        except RuntimeError:
            self._last = self._hold
        self._decided.set()

    def _agree(self, store: Store) -> None:
        store.set("stop/signal", str(self.signal))
        while self._hold != self._step:  # the main thread may start the next step meanwhile
            self._hold = self._step
        store.set(f"stop/{self._rank}", str(self._hold))
        keys = [f"stop/{rank}" for rank in range(self._world_size)]
        store.wait(keys, timedelta(seconds=PROMISE_SECONDS))
        self._last = max(int(store.get(key)) for key in keys)
