"""Confirmation of a search (`search.confirm`): train its best trial and the default settings again,
with new seeds.

The default settings are those of the search's command without the searched keys. Chance helped to
choose the best trial, so its value is too good. The new seeds took no part in the choice.
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

# Names of the folders of the two configurations. The report takes the configuration with the lowest
# number as the baseline.
DEFAULT, BEST = "0_default", "1_best"


def check_confirmation(config: Config, base: DictConfig, space: list[Dimension]) -> list[Config]:
    """Raise ValueError if the settings of a search do not allow `search.confirm`. Return a list
    with the config of the default settings, so that its data can be checked. The list is empty if
    search.confirm is not set.
    """
    settings, train = config.search, config.train
    if settings.confirm is None:
        return []
    if any(dimension.name == "seed" for dimension in space):
        raise ValueError(
            f"search.confirm={settings.confirm}: trains the best trial with new seeds, but the "
            "search varies seed; leave out search.confirm, or give seed a single value"
        )
    if config.sweep.baseline is not None:
        raise ValueError(
            f"search.confirm={settings.confirm}: compares the best trial with the default "
            "settings, so another baseline is not possible; leave sweep.baseline out"
        )
    is_timed = config.sweep.timed or train.evaluate_every == 0
    if config.objective == "images_per_sec" or (is_timed and train.max_steps is not None):
        raise ValueError(
            f"search.confirm={settings.confirm}: compares accuracy or loss, but this search "
            "measures speed; leave search.confirm out"
        )
    default = trial_point(base, [], 0)
    if default.reason:
        raise ValueError(
            f"search.confirm={settings.confirm}: also trains the default settings, which cannot "
            f"run on this machine: {default.reason}"
        )
    return [default.config]


def confirm_best(
    trials: Jobs, number: int, overrides: list[str], num_seeds: int, max_jobs: int | None
) -> int:
    """Train the best trial of a search and the default settings with new seeds, and write a report.
    Return the exit code.

    `number`: number of the best trial. `overrides`: values of the searched keys in the best trial.
    `num_seeds`: runs per configuration. `max_jobs`: largest number of concurrent jobs. The jobs are
    in the folder `confirm_<number>` of the search. A search that later finds another best trial
    therefore confirms that trial too.
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
    """Runner of the jobs that confirm the best trial of a search. After a stop, the command that
    resumes the search also continues its confirmation.
    """

    def _say_stopped(self, number: int, folder: Path | None = None, *keys: str) -> int:
        return super()._say_stopped(
            number, self.jobs.folder.parent, f"search.confirm={self.jobs.num_blocks}"
        )


def _points(base: DictConfig, overrides: list[str], first_seed: int) -> list[Point]:
    """Return the two configurations of a confirmation: the default settings, which are the baseline
    of the report, and the best trial of the search.

    `first_seed`: seed of the first repeat.
    """
    settings: dict[str, list[str]] = {DEFAULT: [], BEST: overrides}
    points = []
    for number, (subdir, values) in enumerate(settings.items()):
        point = trial_point(base, [*values, f"seed={first_seed}"], number)
        # Leave the seed out of the overrides, because they must be equal in all repeats. The config
        # of each job has its own seed.
        point.subdir, point.overrides = subdir, [*task_overrides(base), *values]
        points.append(point)
    return points
