"""Repeats of a sweep. Each repeat, called block in the code, runs every configuration once, in
random order and with another seed.

If the machine becomes slower or faster over time, this order favors no configuration. With equal
seeds, accuracies can be compared in pairs (Fisher 1935, The Design of Experiments).
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from pathlib import Path

from timm_parallel.keys import SweepConfig, leaves
from timm_parallel.lab.jobs.folders import claim_job_folder
from timm_parallel.lab.sweep.points import Point, freeze_job, names_of
from timm_parallel.record.jobs import Job, Jobs, new_jobs


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Raise ValueError if a sweep with repeats also varies the seed, or if sweep.baseline matches
    no configuration.
    """
    if settings.num_repeats != 1 and len({point.config.seed for point in points}) > 1:
        raise ValueError(
            f"sweep.repeats={settings.repeats}: each repeat gets its own seed, but the sweep also "
            "varies seed; leave sweep.repeats out, or give seed a single value"
        )
    if settings.baseline is not None:
        # Import this module only if sweep.baseline is set, because the import is slow.
        from timm_parallel.lab.analysis.settings import check_baseline

        configs = [{key: value for key, value, _ in leaves(point.config)} for point in points]
        check_baseline(settings.baseline, [point.overrides for point in points], configs)


def freeze_jobs(
    folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None
) -> Jobs:
    """Write jobs.json of a new sweep, and the config of each configuration. Jobs start from these
    configs, so later edits of conf/ do not change waiting jobs.

    `order_seed`: seed of the random order, which tests set.
    """
    repeated = settings.num_repeats != 1
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
    for _ in range(1, settings.num_repeats):
        append_block(jobs)
    jobs.write()
    return jobs


def append_block(jobs: Jobs) -> None:
    """Append jobs that run every configuration once more, except the configurations that were
    skipped.
    """
    block, repeated = jobs.num_blocks, []
    for first in jobs.jobs:
        if first.block == 0 and first.status != "skipped":
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
