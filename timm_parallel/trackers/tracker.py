"""Tracker: base class of experiment trackers such as TensorBoard and MLflow, which show a run's
numbers and images.

A Channel calls a tracker in a thread, so that a tool that is slow, hangs or fails does not affect
the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine import process
from timm_parallel.machine.files import write_text
from timm_parallel.machine.process import import_name
from timm_parallel.machine.secrets import mask

log = logging.getLogger(__name__)
LONGEST_QUEUE = 10_000  # calls
# The thread sleeps between two deliveries, so that it does not compete with training for Python's
# lock all the time.
REST_SECONDS = 0.5
END_SECONDS = 8.0  # for all trackers together to end the run


class Tracker:
    """Tracker of a run, on rank 0. Override the methods that your tool needs; all but `__init__`
    may block or raise.
    """

    view = ""  # command or URL that shows the run, for the end of the console output

    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        """Import the tool here, before the first step; connect in `start`. `resume_step`: last step
        of the checkpoint.
        """
        self.config, self.folder, self.resume_step = config, folder, resume_step
        self.name = (
            f"{folder.parent.name} {folder.name}"  # of the run: date and time, or sweep and job
        )

    def start(self) -> None:
        """Open the run in the tool; after a resume, open the earlier attempt's run again (see
        `run_id`).
        """

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        """Write the finite numbers of a step, by name such as `train/loss`. `time`: Unix time in
        seconds.
        """

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        """Write an RGB image, uint8 [height, width, 3]."""

    def flush(self) -> None:
        """Send the numbers and images collected since the last flush, if your tool is faster with
        several at once.
        """

    def end(self, status: str, summary: dict[str, float]) -> None:
        """End the run in the tool. `status`: done, failed or interrupted; `summary`: its speed and
        seconds.
        """

    def run_id(self, create: Callable[[], str]) -> str:
        """Return the tool's id of this run from the run folder. Without one, call `create` and
        store its result.
        """
        path = self.folder / "trackers" / f"{type(self).__name__.lower()}.txt"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, create())
        return path.read_text(encoding="utf-8")

    @property
    def sweep(self) -> str | None:
        """Name, date and time of the sweep or search to which the run belongs; None for a single
        run.
        """
        sweep = next(
            (path for path in self.folder.resolve().parents[:4] if (path / "jobs.json").exists()),
            None,
        )
        return (
            None if sweep is None else f"{self.config.task_name} {sweep.parent.name} {sweep.name}"
        )


class Channel:
    """Bounded queue of calls on one tracker. A daemon thread makes the calls; the first error
    disables the tracker.
    """

    def __init__(
        self, name: str, path: str, config: ResolvedConfig, folder: Path, resume_step: int
    ) -> None:
        """Create the tracker of class `path`, such as `timm_parallel.trackers.wandb.Wandb`, and
        start the thread.
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
        """Queue a call of the tracker's `method`, and return at once. Calls after `end` have no
        effect.
        """
        if len(self._calls) >= LONGEST_QUEUE:
            self._give_up(f"is too slow: {LONGEST_QUEUE} calls are waiting")
        elif not (self._ending.is_set() or self._has_failed):
            self._calls.append((method, arguments))
        if method == "end":
            self._ending.set()

    def close(self, until: float) -> None:
        """Wait until the thread has made all calls, at most until time.monotonic() is `until`."""
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
        # Also SystemExit, which some tools raise.
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = process.exit_handlers_may_block = True
            log.warning(
                "tracker %s: %s; the run continues without it",
                self.name,
                mask(" ".join(problem.split()))[:300],
            )
