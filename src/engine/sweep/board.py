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

from src.engine.config.compose import read_frozen
from src.engine.record.jobs import Job, Jobs
from src.engine.sweep.packing import Packing
from src.engine.sweep.points import Point
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
        self._progress: dict[int, Progress] = {}

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
            left = self.seconds_left()
            more = f", about {left:.0f} s left" if left else ""
            reason = f": {job.reason}" if job.reason else ""
            self.say(f"{job.status} in {job.seconds or 0:.1f} s: {job.name}{reason}{more}")
        self.update(now=True)

    def seconds_left(self) -> float | None:
        """Estimated from the jobs done since this start, with the shares of those under way; None before anything is done."""
        running = [job for job in self._jobs.jobs if job.status == "running"]
        shares = sum(self._share(job) for job in running)
        done = self._done + shares
        left = sum(job.status in ("waiting", "running") for job in self._jobs.jobs) - shares
        return (time.monotonic() - self._began) * left / done if done > 0 and left > 0 else None

    def _share(self, job: Job) -> float:
        """How much of its training a running job has done, in 0..1."""
        if job.id not in self._progress:
            self._progress[job.id] = Progress(self._jobs.folder / job.folder)
        return self._progress[job.id].share()

    def _table(self) -> Table:
        counts = ", ".join(f"{count} {status}" for status, count in self._jobs.counts().items())
        left = self.seconds_left()
        title = counts + (f"; about {left:.0f} s left" if left else "")
        if self._packing.most != 1:
            title += f"; free: {self._packing.describe_free()}"
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


class Progress:
    """How far a job has got, by its config and the newest line of its metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        train = read_frozen(folder).train
        self._path, self._epochs, self._steps = folder / "metrics.jsonl", train.epochs, train.max_steps

    def share(self) -> float:
        line = last_line(self._path)
        by_epochs = line.get("epoch", 0) / self._epochs
        return min(1.0, max(by_epochs, line.get("step", 0) / self._steps) if self._steps else by_epochs)


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
        config = point.config
        if point.reason:
            table.add_row(str(number), " ".join(point.overrides), "", "", "", "", f"skipped: {point.reason}")
            continue
        assert isinstance(config, ResolvedConfig)  # whoever has no reason against it has resolved it
        batch, devices, size = config.global_batch, config.parallel.devices, training_size(config.data)
        steps = "?"
        if size is not None:
            per_epoch = size // batch // config.train.accumulate
            total = config.train.epochs * per_epoch
            steps = str(min(total, config.train.max_steps or total))
        per_device = f"{batch / devices:g}"
        table.add_row(
            str(number), " ".join(point.overrides), str(batch), per_device, f"{config.learning_rate:g}", steps, "yes"
        )
    Console(width=None if Console().is_terminal else 200, markup=False, emoji=False).print(table)
