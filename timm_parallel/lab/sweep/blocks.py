"""Repeats of a sweep. Each repeat, called block in the code, runs every configuration once, in
random order and with another seed.

If the machine becomes slower or faster over time, this order favors no configuration. With equal
seeds, accuracies can be compared in pairs (Fisher 1935, The Design of Experiments).
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from timm_parallel.keys import SweepConfig, leaves
from timm_parallel.lab.jobs.folders import claim_job_folder
from timm_parallel.lab.sweep.points import Point, freeze_job, names_of
from timm_parallel.record.jobs import Job, Jobs, new_jobs


def count_repeats(points: list[Point], settings: SweepConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of repeats. They differ if the sweep stops by
    itself: with sweep.repeats=auto and a baseline, repeats are added until each comparison with it
    is decided. The jobs of a cluster are submitted all at once, so they have one repeat.
    """
    is_local = points[0].config.cluster.scheduler == "local"
    if settings.repeats == "auto" and settings.baseline is not None and is_local:
        # Import these modules only if sweep.baseline is set, because the import is slow.
        from timm_parallel.lab.analysis.sequential import FIRST
        from timm_parallel.lab.analysis.settings import can_stop

        if can_stop(_values(point) for point in points if not point.reason):
            return FIRST, settings.max_repeats
    return settings.num_repeats, settings.num_repeats


def _values(point: Point) -> dict[str, object]:
    return {key: value for key, value, _ in leaves(point.config)}


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Raise ValueError if a sweep with repeats also varies the seed, if sweep.baseline matches no
    configuration, or if a cluster is asked to add repeats.
    """
    scheduler = points[0].config.cluster.scheduler
    if "sweep.repeats=auto" in points[0].overrides and scheduler != "local":
        raise ValueError(
            f"sweep.repeats=auto: cluster={scheduler} submits all jobs at once, so it cannot add "
            "repeats; give a number"
        )
    if settings.num_repeats != 1 and len({point.config.seed for point in points}) > 1:
        raise ValueError(
            f"sweep.repeats={settings.repeats}: each repeat gets its own seed, but the sweep also "
            "varies seed; leave sweep.repeats out, or give seed a single value"
        )
    if settings.baseline is not None:
        from timm_parallel.lab.analysis.settings import check_baseline

        given = [point.overrides for point in points]
        check_baseline(settings.baseline, given, [_values(point) for point in points])


def freeze_jobs(
    folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None
) -> Jobs:
    """Write jobs.json of a new sweep, and the config of each configuration. Jobs start from these
    configs, so later edits of conf/ do not change waiting jobs.

    `order_seed`: seed of the random order, which tests set.
    """
    repeats, _ = count_repeats(points, settings)
    repeated = repeats != 1
    jobs = new_jobs(folder)
    if repeated:
        jobs.order_seed = secrets.randbits(32) if order_seed is None else order_seed
    first = []
    for number, (name, point) in enumerate(zip(names_of(points), points, strict=True)):
        subdir = f"{point.subdir}_block_0" if repeated else point.subdir
        first.append(
            Job(0, name, subdir, point.overrides, seed=point.config.seed, configuration=number)
        )
        freeze_job(folder, first[-1], point)
    append_shuffled(jobs, first, block=0)
    for _ in range(1, repeats):
        append_block(jobs, set(range(len(points))))
    jobs.write()
    return jobs


def append_block(jobs: Jobs, configurations: Collection[int | None]) -> None:
    """Append jobs that run each of the configurations once more, except those that were skipped."""
    block, repeated = jobs.num_blocks, []
    for first in jobs.jobs:
        if first.block or first.status == "skipped":
            continue
        if first.configuration in configurations:
            assert first.seed is not None
            subdir = first.folder.replace("_block_0", f"_block_{block}", 1)
            job = replace(first, folder=subdir, block=block, seed=first.seed + block)
            job.reset()
            claim_job_folder(jobs.folder, job)
            repeated.append(job)
    append_shuffled(jobs, repeated, block)


def append_shuffled(jobs: Jobs, more: list[Job], block: int) -> None:
    """Append the jobs `more` as one repeat of a sweep. They are put into random order first, unless
    the sweep has no repeats.
    """
    if jobs.order_seed is not None:
        random.Random(f"{jobs.order_seed} {block}").shuffle(more)
    for job in more:
        job.id = len(jobs.jobs)
        jobs.jobs.append(job)
