"""Coordinated stop: after a signal to any rank, all ranks stop after the same step."""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

SIGNAL_POLL_SECONDS = 0.25
# Seconds to wait for the steps of other ranks, which may have exited. After that, this rank stops
# after its current step.
PROMISE_SECONDS = 10.0


class StopCoordinator:
    """Coordinator with which all ranks agree on the last step before they stop. Steps are counted
    from the start of the process.
    """

    # One thread per rank reads and writes the key-value store, so a step needs no collective. After
    # a signal, each rank publishes its current step and waits at its end. The largest published
    # step is the last step of all ranks.
    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None) -> None:
        self.signal: int | None = None
        self._rank, self._world_size, self._store = rank, world_size, store
        # Number of the step in progress, or of the next one.
        self._step = 1
        # Step after which this rank waits until the last step is decided.
        self._hold: int | None = None
        self._last: int | None = None
        self._decided = threading.Event()
        self._wake = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(
            target=self._follow, args=(store,), name="stopping", daemon=True
        )
        if store is not None:
            self._thread.start()
            # Stop the thread at exit too, for a process that ends by an exception or a signal.
            atexit.register(self.close, 1.0)

    def close(self, seconds: float = PROMISE_SECONDS) -> None:
        """Stop the thread of the coordinator. The process would abort if the thread used the
        key-value store while the interpreter shuts down.
        """
        if self._thread.is_alive():
            self._leaving = True
            self._wake.set()
            self._thread.join(timeout=seconds)

    def request(self, number: int) -> None:
        """Ask all ranks to stop because of a signal. A signal handler in the main thread may call
        this method.
        """
        self.signal = number
        if self._store is None:
            self._hold = self._last = self._step
            self._decided.set()
        self._wake.set()

    def should_stop(self) -> bool:
        """Return True if the step that has just ended is the last one. All ranks return the same
        value for the same step. Call this method once after each step.
        """
        # Set _step before reading _hold. The method _agree sets _hold and then reads _step again,
        # so at least one of the two threads sees the other's value. No rank can then publish a step
        # that it has already finished.
        self._step += 1
        if self._hold is None or self._hold >= self._step:
            return False
        self._decided.wait()
        assert self._last is not None
        return self._last < self._step

    def stop_requested(self) -> bool:
        """Return True if a signal has reached any rank and the last step is decided. Ranks may
        return True at different steps.
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
            # The run has ended, because its key-value store has closed.
            except RuntimeError:
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
        # Repeat the assignment if the main thread has started the next step meanwhile.
        while self._hold != self._step:
            self._hold = self._step
        store.set(f"stop/{self._rank}", str(self._hold))
        keys = [f"stop/{rank}" for rank in range(self._world_size)]
        store.wait(keys, timedelta(seconds=PROMISE_SECONDS))
        self._last = max(int(store.get(key)) for key in keys)
