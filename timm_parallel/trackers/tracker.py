"""Base class of experiment trackers such as TensorBoard and MLflow, which show numbers and images.

A Channel calls each tracker in a thread. So a tracker that is slow, hangs or fails does not affect
the training run.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine import signals
from timm_parallel.machine.files import write_text
from timm_parallel.machine.imports import import_name
from timm_parallel.machine.secrets import hide_in, mask

log = logging.getLogger(__name__)
# Largest number of calls that may wait for a tracker. The run continues without a slower tracker.
LONGEST_QUEUE = 10_000
# Seconds that the thread sleeps between two deliveries, so that it rarely competes with training
# for Python's global interpreter lock.
REST_SECONDS = 0.5
# Seconds that all trackers together may take to end the run.
END_SECONDS = 8.0


class Tracker:
    """Base class of trackers, each of which shows the run in a tracking tool such as TensorBoard.

    A subclass overrides the methods that its tool needs. All methods except `__init__` may block or
    raise errors. Only rank 0 has trackers.
    """

    # Command or URL that shows the run in the tracking tool. It is printed when the run ends.
    view = ""

    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        """Import the package of the tracking tool, so that a missing package is noticed before the
        first step.

        The connection is opened later, in `start`. `resume_step`: last step of the checkpoint from
        which the run continues; 0 for a new run.
        """
        self.config, self.folder, self.resume_step = config, folder, resume_step
        # Copy of the config in which secrets are replaced, so that it may leave the machine.
        self.settings: dict[str, Any] = hide_in(dataclasses.asdict(config))
        # Name of the run: its date and time, or its sweep and job.
        self.name = f"{folder.parent.name} {folder.name}"

    def start(self) -> None:
        """Open the run in the tracking tool.

        A resumed run must continue the same run, whose id `run_id` returns.
        """

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        """Write the finite numbers of a step to the tracking tool.

        `values`: dictionary from name, such as `train/loss`, to number. `time`: Unix time in
        seconds.
        """

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        """Write an RGB image, a uint8 array [height, width, 3], to the tracking tool."""

    def flush(self) -> None:
        """Send the numbers and images that were collected since the last flush to the tracking
        tool.

        Override this method if the tool is faster with several values per call.
        """

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Mark the run as ended in the tracking tool.

        `status`: done, failed or interrupted. `summary`: dictionary from name to number, with the
        speed and the seconds of the run.
        """

    def run_id(self, create: Callable[[], str]) -> str:
        """Return the id of the run in the tracking tool, which a file in the run folder stores.

        If there is no such file, `create` is called to create a run in the tool and return its id.
        """
        path = self.folder / "trackers" / f"{type(self).__name__.lower()}.txt"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, create())
        return path.read_text(encoding="utf-8")

    @property
    def sweep(self) -> str | None:
        """Return the name of the sweep or search to which the run belongs, with date and time.

        Returns None for a single run.
        """
        sweep = next(
            (path for path in self.folder.resolve().parents[:4] if (path / "jobs.json").exists()),
            None,
        )
        return (
            None if sweep is None else f"{self.config.task_name} {sweep.parent.name} {sweep.name}"
        )


class Channel:
    """Queue of calls to one tracker, which a daemon thread makes.

    The length of the queue is limited. After the first error, the run continues without this
    tracker.
    """

    def __init__(
        self, name: str, path: str, config: ResolvedConfig, folder: Path, resume_step: int
    ) -> None:
        """Build a tracker and start the thread that calls it.

        `path`: the class of the tracker, such as `timm_parallel.trackers.wandb.Wandb`.
        """
        self.name, self.tracker, self._has_failed = (
            name,
            Tracker(config, folder, resume_step),
            False,
        )
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        try:
            self.tracker = import_name(path)(config, folder, resume_step)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> None:
        """Queue a call of a method of the tracker, and return without waiting for it.

        Calls after a call of `end` have no effect.
        """
        if len(self._calls) >= LONGEST_QUEUE:
            self._give_up(f"is too slow: {LONGEST_QUEUE} calls are waiting")
        elif not (self._ending.is_set() or self._has_failed):
            self._calls.append((method, arguments))
        if method == "end":
            self._ending.set()

    def close(self, until: float) -> None:
        """Wait until the thread has made all queued calls.

        `until`: the latest time, on the clock of time.monotonic(), at which this function returns.
        """
        if not self._has_failed:
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up("did not end in time")

    def _work(self) -> None:
        is_last = False
        try:
            self.tracker.start()
            while not (is_last or self._has_failed):
                is_last = self._ending.wait(REST_SECONDS)
                while self._calls:
                    method, arguments = self._calls.popleft()
                    getattr(self.tracker, method)(*arguments)
                self.tracker.flush()
        # Catch SystemExit too, because some tools raise it.
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = signals.exit_handlers_may_block = True
            log.warning(
                "tracker %s: %s; the run continues without it",
                self.name,
                mask(" ".join(problem.split()))[:300],
            )
