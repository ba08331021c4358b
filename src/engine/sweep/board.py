"""What a person sees of a sweep: a live table in a terminal, a line per ended job when redirected; the plan of a dry run."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from src.engine.record.jobs import Job, Jobs
from src.engine.sweep.points import Point
from src.schema import DataConfig, global_batch, learning_rate

SHOWN = 20  # rows; long sweeps show what is around the running job


class Board:
    """The jobs of a sweep while they run."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._console = Console(soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Board:
        self._console.print(f"sweep of {len(self._jobs.jobs)} jobs in {self._jobs.folder}", highlight=False)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.update()
            self._live.stop()

    def update(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def ended(self, job: Job) -> None:
        if self._live is None:
            left = self._jobs.seconds_left()
            more = f", about {left:.0f} s left" if left else ""
            reason = f": {job.reason}" if job.reason else ""
            self._console.print(
                f"{job.status} in {job.seconds or 0:.1f} s: {job.name}{reason}{more}", highlight=False, markup=False
            )
        self.update()

    def _table(self) -> Table:
        counts = ", ".join(f"{count} {status}" for status, count in self._jobs.counts().items())
        left = self._jobs.seconds_left()
        table = Table(title=counts + (f"; about {left:.0f} s left" if left else ""), title_justify="left")
        for column in ("job", "what", "status", "s"):
            table.add_column(column, justify="right" if column in ("job", "s") else "left")
        running = next((job.id for job in self._jobs.jobs if job.status == "running"), len(self._jobs.jobs) - 1)
        first = max(0, min(running - SHOWN // 2, len(self._jobs.jobs) - SHOWN))
        for job in self._jobs.jobs[first : first + SHOWN]:
            seconds = f"{job.seconds:.1f}" if job.seconds is not None else ""
            table.add_row(str(job.id), job.name, job.status, seconds)
        return table


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
        batch, devices, size = global_batch(config), int(config.parallel.devices), training_size(config.data)
        steps = "?"
        if size is not None:
            per_epoch = size // batch // config.train.accumulate
            total = config.train.epochs * per_epoch
            steps = str(min(total, config.train.max_steps or total))
        per_device = f"{batch / devices:g}"
        table.add_row(
            str(number), " ".join(point.overrides), str(batch), per_device, f"{learning_rate(config):g}", steps, "yes"
        )
    Console(width=None if Console().is_terminal else 200).print(table)
