"""Console output of sweeps: tables and lines, the headline result, a line for each job that has
ended, and a progress bar if the output is a terminal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from timm_parallel.machine.files import read_json
from timm_parallel.record.result import UNFINISHED, Job, Jobs

# Largest number of rows of a printed table. The report has all.
MOST_ROWS = 20


class PipeSafeConsole(Console):
    """Console that ignores a closed pipe. Ctrl-C in `train.py … | tee log` ends tee first, but the
    sweep must still record its jobs.
    """

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def plain_console(stderr: bool = False) -> Console:
    """Build the console of a sweep. It prints texts as they are, and does not break lines."""
    console = PipeSafeConsole(
        stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False
    )
    # Give a table enough room in a log file.
    if not console.is_terminal:
        console.width = 200
    return console


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, whose cells may be broken into several lines."""
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    plain_console().print(table, soft_wrap=False)


def show_results(rows: Sequence[Mapping[str, str]]) -> None:
    """Print the first rows of a table of a report, and how many rows are left out."""
    if rows:
        show_table(list(rows[0]), (list(row.values()) for row in rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        plain_console().print(f"… {len(rows) - MOST_ROWS} more rows in the report")


def show_headline(folder: Path) -> None:
    """Print the table and the headline result of report.json in `folder`, and the command that the
    report recommends.
    """
    # Import this module only at the end of a sweep, because the import is slow.
    from timm_parallel.lab.report.report import FORMAT

    report = read_json(folder / "report.json", FORMAT, "was a report written here?")
    show_results(report["table"])
    # A report without a finished job has no headline result. An inconclusive one has no command.
    lead = report["lead"] or {"sentence": "", "command": ""}
    for line in filter(None, (lead["sentence"], lead["command"])):
        plain_console().print(line)


def progress_bar(console: Console) -> Progress:
    """Build a progress bar, which is shown only in a terminal. Its time left is estimated from all
    items so far.
    """
    # Switch off the refresh thread of rich, because a sweep forks jobs, and threads do not survive
    # a fork.
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        speed_estimate_period=math.inf,
        transient=True,
        disable=not console.is_terminal,
    )


class Board:
    """Console output of a running sweep: a line for each job that has ended, and a progress bar in
    a terminal.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._console = plain_console()
        self._bar = progress_bar(self._console)
        self._task = self._bar.add_task("")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress bar while the code of the `with` statement runs."""
        self.say(f"sweep of {len(self._jobs.jobs)} jobs in {self._jobs.folder}")
        with self._bar:
            yield

    def update(self) -> None:
        """Redraw the progress bar."""
        self._bar.update(
            self._task,
            total=len(self._jobs.jobs),
            completed=self._count_ended(),
            description=self._jobs.counts(),
            refresh=True,
        )

    def say(self, line: str) -> None:
        self._console.print(line)

    def ended(self, job: Job, outcome: str = "") -> None:
        """Print how a job ended, for example `1/4 done 18.7 s seed=1`. `outcome`: text to print
        instead of `1/4 done`.
        """
        total = str(len(self._jobs.jobs))
        outcome = outcome or f"{self._count_ended():{len(total)}}/{total} {job.status}"
        reason = f": {job.reason}" if job.reason else ""
        self.say(f"{outcome}  {job.seconds or 0:.1f} s  {job.name}{reason}")
        self.update()

    def _count_ended(self) -> int:
        return sum(job.status not in UNFINISHED for job in self._jobs.jobs)
