"""Print the table of a dry run: the number of runs of a sweep, and the values that differ between
its configurations.
"""

from __future__ import annotations

from collections.abc import Callable

from timm_parallel.keys import DataConfig, ResolvedConfig, SweepConfig
from timm_parallel.lab.sweep.blocks import count_repeats
from timm_parallel.lab.sweep.board import plain_console, show_table
from timm_parallel.lab.sweep.points import Point, names_of
from timm_parallel.machine.text import plural

HEADINGS = ("overrides", "global batch", "per device", "lr", "steps", "can run here")


def show_points(
    points: list[Point], settings: SweepConfig, training_size: Callable[[DataConfig], int | None]
) -> None:
    """Print a table with a row per configuration of a sweep and a column per value that differs.

    `training_size`: function that returns the number of training images, or None if it is unknown.
    """
    sizes: dict[str, int | None] = {}
    rows = []
    for point, name in zip(points, names_of(points), strict=True):
        if not point.reason and (key := repr(point.config.data)) not in sizes:
            sizes[key] = training_size(point.config.data)
        rows.append((name, *_derived(point, sizes.get(repr(point.config.data)))))
    # Ignore empty cells, because a configuration that cannot run on this machine has no resolved
    # values.
    values = [{row[column] for row in rows} - {""} for column in range(len(HEADINGS))]
    varying = [0, *(column for column in range(1, 5) if len(values[column]) > 1)]
    if any(point.reason for point in points):
        varying.append(5)
    same = [
        f"{HEADINGS[column]} {min(values[column])}"
        for column in range(1, 5)
        if len(values[column]) == 1
    ]
    show_table(
        ["job", *(HEADINGS[column] for column in varying)],
        ([str(number), *(row[column] for column in varying)] for number, row in enumerate(rows)),
    )
    plain_console().print(", ".join([count_runs(points, settings), *same]))


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
        total = config.train.epochs * (size // batch // config.train.accumulate)
        steps = str(min(total, config.train.max_steps or total))
    return (
        str(batch),
        f"{batch / config.parallel.devices:g}",
        config.learning_rate_text.partition(",")[0].partition(" ")[0],
        steps,
        "yes",
    )
