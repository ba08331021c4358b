"""When to stop: after one step on all ranks alike, once a signal has reached any of them.

An agreement through a collective would cost every step one. Here a thread per rank talks through the rendezvous store,
and a step pays for two attributes. Each rank promises not to go beyond the step it is in, tells the others, and the
latest of these steps is the last one for all; a rank that gets there early waits for the others' word.
"""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.25
ANSWER_SECONDS = 10.0  # for ranks that have died: then this one stops where it is


class Stopping:
    """This rank's side of the agreement. Steps are counted from the start of the process, so alike on all ranks."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None) -> None:
        self.signal: int | None = None
        self.is_over = False  # `is_due` has said so
        self._rank, self._world_size, self._store = rank, world_size, store
        self._step = 1  # the step under way, or the next one: this rank will do it
        self._hold: int | None = None  # no step beyond it before the last one is decided
        self._last: int | None = None
        self._decided = threading.Event()
        self._wake = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(target=self._follow, name="stopping", daemon=True)
        if store is not None:
            self._thread.start()
            atexit.register(self.close, 1.0)  # where nobody has: after an exception, a signal

    def close(self, seconds: float = ANSWER_SECONDS) -> None:
        """End the thread: inside the store while the interpreter shuts down, it would abort the process."""
        if self._thread.is_alive():
            self._leaving = True
            self._wake.set()
            self._thread.join(timeout=seconds)

    def request(self, number: int) -> None:
        """A signal has come; safe in a signal handler of the main thread."""
        self.signal = number
        if self._store is None:
            self._hold = self._last = self._step
            self._decided.set()
        self._wake.set()

    def is_due(self) -> bool:
        """True if the step that has just been done was the last, on all ranks alike. To be asked once after each step."""
        # The next step is promised before the look at _hold, and _agree looks again after it has set _hold: whoever is
        # second sees the other. Otherwise a rank could promise to end with a step that it has left already.
        self._step += 1
        if self._hold is not None and self._hold < self._step:
            self._decided.wait()
            assert self._last is not None
            self.is_over = self._last < self._step
        return self.is_over

    def is_asked(self) -> bool:
        """True once a signal has reached any rank, and all ranks know of it. Not at the same moment on all ranks."""
        if self._hold is None:
            return False
        self._decided.wait()
        return True

    def _follow(self) -> None:
        store = self._store
        assert store is not None
        while not self._wake.wait(POLL_SECONDS):
            try:
                if store.check(["stop/signal"]):
                    self.signal = int(store.get("stop/signal"))
                    break
            except RuntimeError:  # the store is gone, and the run with it
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
        while self._hold != self._step:  # the main thread may go on to the next one meanwhile
            self._hold = self._step
        store.set(f"stop/{self._rank}", str(self._hold))
        keys = [f"stop/{rank}" for rank in range(self._world_size)]
        store.wait(keys, timedelta(seconds=ANSWER_SECONDS))
        self._last = max(int(store.get(key)) for key in keys)
