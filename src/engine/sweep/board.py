"""Progress of a sweep on the console: a line per ended job, and a bar in a terminal. Also the table of a dry run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from src.engine.record.jobs import UNFINISHED, Job, Jobs
from src.engine.sweep.points import Point
from src.schema import DataConfig, ResolvedConfig

UPDATE_SECONDS = 0.25


class PipeSafeConsole(Console):
    """Console that ignores a closed pipe: at Ctrl-C `| tee` exits first, but the jobs must still be recorded."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Board:
    """Shows the jobs of a sweep while they run."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._console = PipeSafeConsole(soft_wrap=True, markup=False, emoji=False, highlight=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        # Without rich's refresh thread, because jobs are forked from this process.
        hide_bar = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True, disable=hide_bar)
        self._task = self._bar.add_task("")
        self._updated = 0.0
        self._began = time.monotonic()
        self._ended = 0  # jobs that have ended since this process started

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context: show the progress bar while the `with` block runs."""
        self.say(f"sweep of {len(self._jobs.jobs)} jobs in {self._jobs.folder}")
        with self._bar:
            yield

    def update(self, now: bool = False) -> None:
        """Redraw the progress bar, at most a few times a second unless `now`."""
        if now or time.monotonic() - self._updated > UPDATE_SECONDS:
            self._updated = time.monotonic()
            ended = sum(job.status not in UNFINISHED for job in self._jobs.jobs)
            description = ", ".join(filter(None, (self._jobs.counts(), self._time_left())))
            self._bar.update(self._task, total=len(self._jobs.jobs), completed=ended, description=description)
            self._bar.refresh()

    def say(self, line: str) -> None:
        self._console.print(line)

    def ended(self, job: Job) -> None:
        self._ended += 1
        reason = f": {job.reason}" if job.reason else ""
        line = f"{job.status} in {job.seconds or 0:.1f} s: {job.name}{reason}"
        self.say(", ".join(filter(None, (line, self._time_left()))))
        self.update(now=True)

    def _time_left(self) -> str:
        """Estimate the time left from the jobs that this process has finished; empty before the first."""
        left = sum(job.status in ("waiting", "running") for job in self._jobs.jobs)
        seconds = (time.monotonic() - self._began) * left / max(1, self._ended)
        return f"about {seconds:.0f} s left" if self._ended and left else ""


def show_points(points: list[Point], training_size: Callable[[DataConfig], int | None]) -> None:
    """Print a row per configuration for a dry run. `training_size`: training images, None if unknown."""
    table = Table("job", "overrides", "global batch", "per device", "lr", "steps", "can run here")
    for number, point in enumerate(points):
        config, overrides = point.config, " ".join(point.overrides)
        if point.reason:
            table.add_row(str(number), overrides, "", "", "", "", f"skipped: {point.reason}")
            continue
        assert isinstance(config, ResolvedConfig)  # always, if it can run here
        batch, size, steps = config.global_batch, training_size(config.data), "?"
        if size is not None:
            total = config.train.epochs * (size // batch // config.train.accumulate)
            steps = str(min(total, config.train.max_steps or total))
        per_device, rate = f"{batch / config.parallel.devices:g}", f"{config.learning_rate:g}"
        table.add_row(str(number), overrides, str(batch), per_device, rate, steps, "yes")
    Console(width=None if Console().is_terminal else 200, markup=False, emoji=False).print(table)
