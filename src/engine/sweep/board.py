"""What people see of a sweep: a live table in a terminal, a line per ended job elsewhere; and the plan of a dry run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from src.engine.record.jobs import Job, Jobs
from src.engine.sweep.packing import Packing
from src.engine.sweep.points import Point, frozen_config
from src.schema import DataConfig, ResolvedConfig

SHOWN = 20  # rows; long sweeps show what is around the running jobs
UPDATE_SECONDS = 0.25


class Lines(Console):
    """A console that outlives its reader: at Ctrl-C `| tee` ends first, and the jobs are still to be recorded."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Board:
    """The jobs of a sweep while they run."""

    def __init__(self, jobs: Jobs, packing: Packing) -> None:
        self._jobs, self._packing = jobs, packing
        self._console = Lines(soft_wrap=True, markup=False, emoji=False, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._updated = 0.0
        self._began = time.monotonic()
        self._done = 0  # jobs, since this start

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the jobs run."""
        self.say(f"sweep of {len(self._jobs.jobs)} jobs in {self._jobs.folder}")
        with self._live or nullcontext():
            yield
            self.update(now=True)

    def update(self, now: bool = False) -> None:
        """Draw the table, at most a few times a second unless `now`. Called all the time."""
        if self._live is not None and (now or time.monotonic() - self._updated > UPDATE_SECONDS):
            self._updated = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line)

    def ended(self, job: Job) -> None:
        self._done += 1
        if self._live is None:
            reason = f": {job.reason}" if job.reason else ""
            said = f"{job.status} in {job.seconds or 0:.1f} s: {job.name}{reason}"
            self.say(", ".join(filter(None, (said, self._time_left()))))
        self.update(now=True)

    def _time_left(self) -> str:
        """Estimated from the jobs done since this start, with the shares of those under way; empty before anything is done."""
        shares = sum(self._share(job) for job in self._jobs.jobs if job.status == "running")
        done = self._done + shares
        left = sum(job.status in ("waiting", "running") for job in self._jobs.jobs) - shares
        return f"about {(time.monotonic() - self._began) * left / done:.0f} s left" if done > 0 and left > 0 else ""

    def _share(self, job: Job) -> float:
        """How much of its training a running job has done, in 0..1, by the newest line of its metrics.jsonl."""
        folder = self._jobs.folder / job.folder
        train, line = frozen_config(folder).train, last_line(folder / "metrics.jsonl")
        by_steps = line.get("step", 0) / train.max_steps if train.max_steps else 0.0
        return min(1.0, max(line.get("epoch", 0) / train.epochs, by_steps))

    def _table(self) -> Table:
        free = f"free: {self._packing.describe_free()}" if self._packing.most != 1 else ""
        title = "; ".join(filter(None, (self._jobs.counts(), self._time_left(), free)))
        table = Table(title=title, title_justify="left")
        for column in ("job", "what", "status", "s"):
            table.add_column(column, justify="right" if column in ("job", "s") else "left")
        for job in self._shown():
            seconds = f"{job.seconds:.1f}" if job.seconds is not None else ""
            status = f"running {self._share(job):4.0%}" if job.status == "running" else job.status
            table.add_row(str(job.id), job.name, status, seconds)
        return table

    def _shown(self) -> list[Job]:
        """All running jobs, and as many of those before and after the first of them as there is room for."""
        jobs = self._jobs.jobs
        running = [place for place, job in enumerate(jobs) if job.status == "running"]
        middle = running[0] if running else len(jobs) - 1
        first = max(0, min(middle - SHOWN // 2, len(jobs) - SHOWN))
        places = sorted({*range(first, min(len(jobs), first + SHOWN)), *running})
        return [jobs[place] for place in places]


def last_line(path: Path) -> dict[str, Any]:
    """The newest whole line of a metrics.jsonl, read from its end; empty before there is one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().split(b"\n")[:-1]
            return dict(json.loads(lines[-1]))
    except (OSError, IndexError, ValueError):
        return {}


def show_points(points: list[Point], training_size: Callable[[DataConfig], int | None]) -> None:
    """The plan: each job with the values that follow from its config. Batches in images, steps of the optimizer.

    `training_size`: how many training images there are, None where only reading them would tell.
    """
    table = Table("job", "overrides", "global batch", "per device", "lr", "steps", "can run here")
    for number, point in enumerate(points):
        config, overrides = point.config, " ".join(point.overrides)
        if point.reason:
            table.add_row(str(number), overrides, "", "", "", "", f"skipped: {point.reason}")
            continue
        assert isinstance(config, ResolvedConfig)  # whoever has no reason against it has resolved it
        batch, size, steps = config.global_batch, training_size(config.data), "?"
        if size is not None:
            total = config.train.epochs * (size // batch // config.train.accumulate)
            steps = str(min(total, config.train.max_steps or total))
        per_device, rate = f"{batch / config.parallel.devices:g}", f"{config.learning_rate:g}"
        table.add_row(str(number), overrides, str(batch), per_device, rate, steps, "yes")
    Console(width=None if Console().is_terminal else 200, markup=False, emoji=False).print(table)
