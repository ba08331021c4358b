"""Run `train.py --multirun`: compose the jobs of a sweep or search, then start, resume or only list
the jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm_parallel.data.build import check_batch, check_data, training_size
from timm_parallel.keys import Config, DataConfig, ResolvedConfig
from timm_parallel.lab.search.space import FROZEN
from timm_parallel.lab.search.tune import settings_to_try
from timm_parallel.lab.sweep.dry_run import show_points
from timm_parallel.lab.sweep.points import check_jobs_data, expand
from timm_parallel.lab.sweep.sweep import resume_sweep, start_sweep
from timm_parallel.record.jobs import VERDICT


def main(arguments: Any) -> int:
    """Start, resume or list the sweep or search of a parsed command line. Return the exit code."""
    return run_multirun(arguments, training_size, _check)


def _check(config: Config) -> None:
    check_data(config)
    # A configuration that cannot run on this machine has no batch, and is skipped.
    if isinstance(config, ResolvedConfig):
        check_batch(config)


def run_multirun(
    arguments: Any,
    training_size: Callable[[DataConfig], int | None],
    check_data: Callable[[Config], None],
) -> int:
    """Start, resume or list the sweep or search of a parsed command line. Return the exit code.

    `training_size`: function that returns the number of training images, which a dry run shows.
    `check_data`: function that raises ValueError if the data of a config cannot be used.
    """
    command, points = expand(arguments)
    settings = command.config.sweep
    earlier = None if settings.resume is None else Path(settings.resume)
    if earlier is None:
        for line in dict.fromkeys(line for point in points for line in point.notices):
            print(line, flush=True)
    if settings.tune and earlier is None:
        points = settings_to_try(command, points)
    if command.config.search.sampler is not None or (
        earlier is not None and (earlier / FROZEN).exists()
    ):
        # Import Optuna only for a search, because the import is slow.
        from timm_parallel.lab.search.search import resume_search, start_search

        if earlier is None:
            return start_search(command, points[0], check_data)
        return resume_search(earlier, command, check_data)
    if earlier is not None and (earlier / VERDICT).is_file():
        # Import this module only to continue a verdict, because the import is slow.
        from timm_parallel.lab.verdict.verdict import continue_verdict

        return continue_verdict(earlier, command)[0]
    if earlier is not None:
        return resume_sweep(earlier, command, check_data)
    check_jobs_data([point.config for point in points if not point.reason], check_data)
    if settings.dry_run:
        show_points(points, settings, training_size)
        return 0
    return start_sweep(command, points)
