"""Tuning (`sweep.tune`): find the settings that train one configuration fastest on this machine.

First each setting runs alone, with few repeats: the screening. Then a sweep measures the best
setting and combinations again, and the report uses this sweep only, because the screening's figures
of the settings that it chose are too good.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import median

from omegaconf import OmegaConf

from timm_parallel.config.compose import Command
from timm_parallel.keys import ResolvedConfig
from timm_parallel.lab.search.space import read_frozen, trial_point
from timm_parallel.lab.sweep.blocks import freeze_jobs
from timm_parallel.lab.sweep.dry_run import show_points
from timm_parallel.lab.sweep.points import Point, keys_that_may_change
from timm_parallel.lab.sweep.sweep import Sweep, reset_unfinished
from timm_parallel.machine import hardware
from timm_parallel.machine.files import claim_folder, write_text
from timm_parallel.record.jobs import FAILED, UNFINISHED, Jobs, read_jobs

FROZEN = "tune.yaml"  # the current settings, in the sweep folder
SCREENING = "screening"  # folder of the screening, in the sweep folder
SCREENING_BLOCKS = 3


def start_tuning(command: Command, points: list[Point]) -> int:
    """Screen the settings of `sweep.tune`, measure the best ones again, and write the report.
    Return the exit code.
    """
    settings, config = command.config.sweep, points[0].config
    if len(points) > 1:
        raise ValueError(
            "sweep.tune: tunes one configuration, but the command sweeps over several; set one "
            "value per key"
        )
    if config.cluster.scheduler != "local":
        raise ValueError(
            "sweep.tune: measures this machine; run it with cluster=local on the node that will "
            "train"
        )
    if command.config.search.sampler is not None:
        raise ValueError(
            "sweep.tune: tries a list of settings, and search=… searches values; use one of the two"
        )
    if settings.jobs != 1:
        raise ValueError(
            f"sweep.jobs={settings.jobs}: sweep.tune times its jobs, so each runs alone; use "
            "sweep.jobs=1"
        )
    if settings.repeats == 1:
        raise ValueError("sweep.repeats=1: sweep.tune needs 2 or more; use sweep.repeats=5")
    if config.train.max_steps is None or config.train.evaluate_every != 0:
        raise ValueError(
            "sweep.tune: measures short runs; set train.max_steps, and train.evaluate_every=0"
        )
    if points[0].reason:
        raise ValueError(points[0].reason)
    alone, screening = (
        _settings_alone(points[0]),
        dataclasses.replace(settings, repeats=SCREENING_BLOCKS),
    )
    if settings.dry_run:
        show_points(alone, screening, lambda data: None)
        print(
            "then the current settings and at most 3 of these or their combinations, "
            f"{settings.repeats} repeats"
        )
        return 0
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    try:
        write_text(folder / FROZEN, OmegaConf.to_yaml(points[0].tree))
        jobs = freeze_jobs(claim_folder(folder / SCREENING), alone, screening)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(folder)
        raise
    return _run(folder, jobs)


def is_tuning(folder: Path) -> bool:
    """Return True if a command with `sweep.tune` created this sweep folder."""
    return (folder / FROZEN).is_file()


def resume_tuning(folder: Path, command: Command) -> int:
    """Continue a stopped tuning with its saved settings. Return the exit code."""
    keys_that_may_change(command, folder)
    screening = read_jobs(folder / SCREENING)
    if not (folder / "jobs.json").is_file():
        reset_unfinished(screening)
    return _run(folder, screening)


class _Screening(Sweep):
    needed_at_end = ()

    def _close(self) -> int:
        if self.stopped_by is not None:
            return self._say_stopped(self.stopped_by, self.jobs.folder.parent)
        for job in self.jobs.jobs:
            if job.block == 0 and job.status in ("skipped", *FAILED):
                print(f"{job.status.replace('_', ' '):<13}{job.name}: {job.reason}")
        return 0


def _run(folder: Path, screening: Jobs) -> int:
    if any(job.status in UNFINISHED for job in screening.jobs):
        code = _Screening(screening).run()
        if code:
            return code
    if (folder / "jobs.json").is_file():
        jobs = read_jobs(folder)
        reset_unfinished(jobs)
    else:
        jobs = _freeze_finalists(folder, screening)
    return Sweep(jobs).run()


def _freeze_finalists(folder: Path, screening: Jobs) -> Jobs:
    """Write the configs of the current settings, and of the best settings and combinations of the
    screening.
    """
    tree = read_frozen(folder / FROZEN)
    current = trial_point(tree, [], 0)
    chosen = _finalists(screening, current)
    points = [
        trial_point(tree, list(overrides), number) for number, overrides in enumerate(chosen, 1)
    ]
    # Settings that can run alone may contradict each other.
    points = [current, *(point for point in points if not point.reason)]
    return freeze_jobs(folder, points, current.config.sweep)


def _settings_alone(current: Point) -> list[Point]:
    """Return the current configuration, and a copy with each setting of `sweep.tune` that changes
    something here.
    """
    points = [current]
    for number, text in enumerate(current.config.sweep.tune, 1):
        try:
            point = trial_point(current.tree, shlex.split(text), number)
        except ValueError as error:
            raise ValueError(f"sweep.tune: {text}: {error}") from error
        if point.reason or (_fits(point) and all(point.config != other.config for other in points)):
            points.append(point)
    if all(point.reason for point in points[1:]):
        raise ValueError(
            f"sweep.tune={current.config.sweep.tune}: none of these differs from the current "
            "settings here"
        )
    return points


def _fits(point: Point) -> bool:
    """Return False if a configuration on CPU has more threads than cores, because it is never
    faster.
    """
    assert isinstance(point.config, ResolvedConfig)
    parallel = point.config.parallel
    return (
        parallel.accelerator != "cpu"
        or parallel.threads_per_device * parallel.devices <= hardware.cores()
    )


def _finalists(screening: Jobs, current: Point) -> list[tuple[str, ...]]:
    """Return the overrides of the best settings and combinations of a screening, which are to be
    measured again.
    """
    from timm_parallel.lab.analysis.tuning import finalists
    from timm_parallel.lab.report.collect import collect  # slow to import

    speeds: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for run in collect([screening.folder]):
        speed = run.measure("images_per_sec")
        if run.comparable and speed is not None:
            speeds[run.overrides[len(current.overrides) :]][run.block] = speed
    of_current = speeds.pop((), {})
    # The median, because one disturbed run should not decide.
    gains = {
        setting: median(
            of_setting[block] / of_current[block] for block in of_setting.keys() & of_current.keys()
        )
        for setting, of_setting in speeds.items()
        if of_setting.keys() & of_current.keys()
    }
    if not gains:
        reason = (
            "no repeat has finished both a setting and the current settings, so nothing can "
            "be compared"
        )
        raise ValueError(f"{screening.folder}: {reason}; see the logs/ folders of its jobs")
    return finalists(gains, current.config.sweep.smallest_difference)
