"""Confirmation of a search (`search.confirm`): its best trial and the default settings train again,
with new seeds.

The default settings are the search's command without the searched keys. Chance helped to choose the
best trial, so its value is too good. The new seeds took no part in the choice.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from omegaconf import DictConfig

from timm_parallel.keys import Config
from timm_parallel.lab.jobs.slurm_job import SlurmQueue
from timm_parallel.lab.search.space import Dimension, read_search, trial_point
from timm_parallel.lab.sweep.blocks import append_block, freeze_jobs
from timm_parallel.lab.sweep.points import Point, task_overrides
from timm_parallel.lab.sweep.sweep import Sweep, reset_unfinished
from timm_parallel.record.jobs import Jobs, read_jobs

# Beginnings of the folders of the jobs. The report's baseline is the configuration with the lowest
# number.
DEFAULT, BEST = "0_default", "1_best"


def check_confirmation(config: Config, base: DictConfig, space: list[Dimension]) -> list[Config]:
    """Refuse a search.confirm that could not decide. Return the default settings, whose data may
    differ.
    """
    settings, train, written = (
        config.search,
        config.train,
        f"search.confirm={config.search.confirm}",
    )
    if settings.confirm is None:
        return []
    if any(dimension.name == "seed" for dimension in space):
        raise ValueError(
            f"{written}: trains with new seeds, but seed is searched; drop one of them"
        )
    if config.sweep.baseline is not None:
        raise ValueError(f"{written}: compares with the default settings; leave sweep.baseline out")
    is_timed = config.sweep.timed or train.evaluate_every == 0
    if config.objective == "images_per_sec" or (is_timed and train.max_steps is not None):
        raise ValueError(
            f"{written}: compares accuracy or loss, but this search measures speed; leave it out"
        )
    default = trial_point(base, [], 0)
    if default.reason:
        raise ValueError(f"{written}: also trains the default settings, but {default.reason}")
    return [default.config]


def confirm_best(
    trials: Jobs, number: int, overrides: list[str], num_seeds: int, max_jobs: int | None
) -> int:
    """Train trial `number`, its values as `overrides`, and the default settings. Return the exit
    code.

    The jobs and their report are in `confirm_<number>` below the search's folder, so a search that
    continues to another best trial confirms that one, too.
    """
    config, base, _ = read_search(trials.folder)
    points = _points(base, overrides, first_seed=config.seed + 1)
    folder = trials.folder / f"confirm_{number}"
    if points[0].config == points[1].config:
        print(
            f"confirm      trial {number} equals the default settings; training it alone, with "
            f"{num_seeds} new seeds"
        )
        del points[1]
    else:
        print(
            f"confirm      trial {number} against the default settings, {num_seeds} new seeds each"
        )
    if (folder / "jobs.json").is_file():
        jobs = read_jobs(folder)
        reset_unfinished(jobs)
        for _ in range(jobs.num_blocks, num_seeds):
            append_block(jobs)
    else:
        folder.mkdir(exist_ok=True)
        settings = dataclasses.replace(config.sweep, repeats=num_seeds)
        jobs = freeze_jobs(folder, points, settings)
    jobs.command = trials.command
    for job in jobs.jobs:
        job.name = (
            "default settings" if job.folder.startswith(DEFAULT) else trials.jobs[number].name
        )
    return Confirmation(
        jobs, max_jobs, SlurmQueue() if config.cluster.scheduler == "slurm" else None
    ).run()


class Confirmation(Sweep):
    """Runner of the jobs of a confirmation, which continues with the search."""

    def _say_stopped(self, number: int, folder: Path | None = None, *keys: str) -> int:
        return super()._say_stopped(
            number, self.jobs.folder.parent, f"search.confirm={self.jobs.num_blocks}"
        )


def _points(base: DictConfig, overrides: list[str], first_seed: int) -> list[Point]:
    """Return the default settings, which are the report's baseline, and the trial, with the seed of
    the first repeat.
    """
    settings: dict[str, list[str]] = {DEFAULT: [], BEST: overrides}
    points = []
    for number, (subdir, values) in enumerate(settings.items()):
        point = trial_point(base, [*values, f"seed={first_seed}"], number)
        # As in any sweep, the overrides of all repeats are equal. The seed is in the job's folder.
        point.subdir, point.overrides = subdir, [*task_overrides(base), *values]
        points.append(point)
    return points
