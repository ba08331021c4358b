"""Tuning (`sweep.tune`): find the settings that train one configuration fastest on this machine.

The first part, the screening, measures each setting alone with few repeats. Then a sweep measures
the best settings and their combinations again. The report uses only this sweep, because chance
helped to choose settings in the screening and made their figures too good.
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

# File with the current settings, in the sweep folder.
FROZEN = "tune.yaml"
# Folder of the screening, the first part of a tuning, in the sweep folder.
SCREENING = "screening"
SCREENING_BLOCKS = 3


def start_tuning(command: Command, points: list[Point]) -> int:
    """Start a tuning: measure each setting of `sweep.tune` alone, measure the best ones again, and
    write the report. Return the exit code.

    Raises ValueError if other keys contradict a measurement of speed on this machine.
    """
    settings, config = command.config.sweep, points[0].config
    if len(points) > 1:
        raise ValueError(
            "sweep.tune: expects one configuration, but the command line gives several values for "
            "a key; give a single value for each key"
        )
    if config.cluster.scheduler != "local":
        raise ValueError(
            f"cluster={config.cluster.scheduler}: sweep.tune measures the machine on which it "
            "runs; use cluster=local on the node that will train"
        )
    if command.config.search.sampler is not None:
        raise ValueError(
            "sweep.tune: cannot be combined with a hyper-parameter search; leave out sweep.tune or "
            "search=…"
        )
    if settings.jobs != 1:
        raise ValueError(
            f"sweep.jobs={settings.jobs}: sweep.tune measures the speed of its jobs, so they must "
            "run one at a time; use sweep.jobs=1"
        )
    if settings.repeats == 1:
        raise ValueError("sweep.repeats=1: sweep.tune needs 2 repeats or more; use sweep.repeats=5")
    if config.train.max_steps is None or config.train.evaluate_every != 0:
        raise ValueError(
            "sweep.tune: measures the speed of short runs without evaluation; set train.max_steps, "
            "and train.evaluate_every=0"
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
    # Remove the folder after a Ctrl-C too, because such a tuning could not be resumed.
    except BaseException:
        shutil.rmtree(folder)
        raise
    return _run(folder, jobs)


def is_tuning(folder: Path) -> bool:
    """Return True if a sweep folder was created by a command with `sweep.tune`."""
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
    """Choose the best settings and combinations of a tuning's first part. Write their configs and
    that of the current settings, and return the jobs that measure them again.
    """
    tree = read_frozen(folder / FROZEN)
    current = trial_point(tree, [], 0)
    chosen = _finalists(screening, current)
    points = [
        trial_point(tree, list(overrides), number) for number, overrides in enumerate(chosen, 1)
    ]
    # Leave out combinations of settings that contradict each other and therefore cannot run.
    points = [current, *(point for point in points if not point.reason)]
    return freeze_jobs(folder, points, current.config.sweep)


def _settings_alone(current: Point) -> list[Point]:
    """Return the current configuration, and a copy with each setting of `sweep.tune` that differs
    from the current configuration on this machine.
    """
    points = [current]
    for number, text in enumerate(current.config.sweep.tune, 1):
        try:
            point = trial_point(current.tree, shlex.split(text), number)
        except ValueError as error:
            raise ValueError(f"sweep.tune: {text}: this setting is not valid: {error}") from error
        if point.reason or (_fits(point) and all(point.config != other.config for other in points)):
            points.append(point)
    if all(point.reason for point in points[1:]):
        raise ValueError(
            f"sweep.tune={current.config.sweep.tune}: every setting of this list either equals the "
            "current settings or cannot run on this machine; give other settings"
        )
    return points


def _fits(point: Point) -> bool:
    """Return False if a configuration on CPU uses more threads than the machine has cores, because
    such a configuration is never faster.
    """
    assert isinstance(point.config, ResolvedConfig)
    parallel = point.config.parallel
    return (
        parallel.accelerator != "cpu"
        or parallel.threads_per_device * parallel.devices <= hardware.cores()
    )


def _finalists(screening: Jobs, current: Point) -> list[tuple[str, ...]]:
    """Return the overrides of the settings and combinations that a tuning measures again: those
    that were fastest in the screening, its first part.
    """
    from timm_parallel.lab.analysis.tuning import finalists
    from timm_parallel.lab.report.collect import collect

    speeds: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for run in collect([screening.folder]):
        speed = run.measure("images_per_sec")
        if run.comparable and speed is not None:
            speeds[run.overrides[len(current.overrides) :]][run.block] = speed
    of_current = speeds.pop((), {})
    # Use the median over the repeats, because one disturbed run should not decide.
    gains = {
        setting: median(
            of_setting[block] / of_current[block] for block in of_setting.keys() & of_current.keys()
        )
        for setting, of_setting in speeds.items()
        if of_setting.keys() & of_current.keys()
    }
    if not gains:
        raise ValueError(
            f"{screening.folder}: no setting has finished in the same repeat as the current "
            "settings, so nothing can be compared; see the logs/ folders of its jobs"
        )
    return finalists(gains, current.config.sweep.smallest_difference)
