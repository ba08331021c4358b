"""Run `train.py --multirun`: compose the jobs of a sweep or search, then start, resume or only list
the jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm_parallel.data.build import training_size
from timm_parallel.keys import ResolvedConfig, SweepConfig
from timm_parallel.lab.search.space import settings_to_try
from timm_parallel.lab.sweep.board import plain_console, show_table
from timm_parallel.lab.sweep.points import Point, check_jobs_data, expand, names_of
from timm_parallel.lab.sweep.sweep import count_repeats, resume_sweep, start_sweep
from timm_parallel.machine.text import plural
from timm_parallel.record.result import SEARCH, VERDICT

# Columns of the table of a dry run.
HEADINGS = ("job", "overrides", "global batch", "per device", "lr", "steps", "can run here")


def main(arguments: Any) -> int:
    """Start, resume or list the sweep or search of a parsed command line. Return the exit code."""
    command, points = expand(arguments)
    settings = command.config.sweep
    earlier = None if settings.resume is None else Path(settings.resume)
    if earlier is None:
        for line in {point.notice for point in points if point.notice}:
            print(line, flush=True)
    if settings.tune and earlier is None:
        points = settings_to_try(command, points)
    if command.config.search.sampler is not None or (
        earlier is not None and (earlier / SEARCH).exists()
    ):
        # Import Optuna only for a search, because the import is slow.
        from timm_parallel.lab.search.search import resume_search, start_search

        if earlier is None:
            return start_search(command, points[0])
        return resume_search(earlier, command)
    if earlier is not None and (earlier / VERDICT).is_file():
        # Import this module only to continue a verdict, because the import is slow.
        from timm_parallel.lab.verdict.verdict import continue_verdict

        return continue_verdict(earlier, command)[0]
    if earlier is not None:
        return resume_sweep(earlier, command)
    check_jobs_data([point.config for point in points if not point.reason])
    if settings.dry_run:
        show_points(points, settings)
        return 0
    return start_sweep(command, points)


def show_points(points: list[Point], settings: SweepConfig) -> None:
    """Print a table with a row per configuration of a sweep, and the number of runs."""
    sizes: dict[str, int | None] = {}
    rows = []
    for number, (point, name) in enumerate(zip(points, names_of(points), strict=True)):
        if not point.reason and (key := repr(point.config.data)) not in sizes:
            sizes[key] = training_size(point.config.data)
        rows.append((str(number), name, *_derived(point, sizes.get(repr(point.config.data)))))
    show_table(HEADINGS, rows)
    plain_console().print(count_runs(points, settings))


def count_runs(points: list[Point], settings: SweepConfig) -> str:
    """Format the number of runs of all repeats of a sweep. Configurations that cannot run on this
    machine do not count.
    """
    can_run = sum(not point.reason for point in points)
    repeats = sorted({*count_repeats(points, settings)})
    if repeats == [1] or not can_run:
        return plural(can_run, "run")
    runs = " to ".join(str(can_run * count) for count in repeats)
    of_each = " to ".join(map(str, repeats))
    return f"{runs} runs ({plural(can_run, 'configuration')} × {of_each} repeats)"


def _derived(point: Point, size: int | None) -> tuple[str, ...]:
    """Compute the last cells of a configuration's row in the table of a dry run: batch sizes,
    learning rate, steps, and if it can run. `size`: number of training images, or None if it is
    unknown.
    """
    if point.reason:
        return "", "", "", "", f"skipped: {point.reason}"
    config = point.config
    # A configuration that can run on this machine is always resolved.
    assert isinstance(config, ResolvedConfig)
    batch, steps = config.global_batch, "?"
    if size is not None:
        steps = str(config.train.count_steps(size // batch)[1])
    return (
        str(batch),
        f"{batch / config.parallel.devices:g}",
        config.learning_rate_text.partition(",")[0].partition(" ")[0],
        steps,
        "yes",
    )
