"""Repeats a sweep in blocks: a block runs every configuration once, in a random order and with a different seed.

So drift of the machine favors none, and accuracies are paired per block (Fisher 1935, The Design of Experiments).
The baseline also runs before the first block and after the last, to warm the machine up and to measure its drift.
"""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import ListConfig, OmegaConf

from src.engine.config.compose import load_config, save_config
from src.engine.machine.files import claim_folder, write_text
from src.engine.record.jobs import Job, Jobs, config_hash, new_jobs
from src.engine.sweep.points import Point, freeze_job
from src.schema import SweepConfig

if TYPE_CHECKING:
    from src.engine.analysis.statistics import Contrast

MIN_BLOCKS = 3  # of sweep.repeats=auto; fewer leave the intervals too few degrees of freedom


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Refuse sweep.repeats if the sweep also varies the seed."""
    if settings.repeats != 1 and len({point.config.seed for point in points}) > 1:
        raise ValueError(f"sweep.repeats={settings.repeats}: block b has seed + b, but seed is swept; drop one of them")


def freeze_jobs(folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None) -> Jobs:
    """Write jobs.json and every job's config, so that later edits do not change queued jobs. Tests set `order_seed`."""
    repeated = settings.repeats != 1
    blocks = min(MIN_BLOCKS, settings.max_repeats) if settings.repeats == "auto" else int(settings.repeats)
    shuffled = repeated if settings.shuffle is None else settings.shuffle
    jobs = new_jobs(folder)
    jobs.order_seed = (secrets.randbits(32) if order_seed is None else order_seed) if shuffled else None
    common = set.intersection(*(set(point.overrides) for point in points))
    first = []
    for point in points:
        name = ",".join(override for override in point.overrides if override not in common) or "the only point"
        subdir = f"{point.subdir}_block_0" if repeated else point.subdir
        first.append(Job(0, name, subdir, point.overrides, seed=point.config.seed))
        freeze_job(folder, first[-1], point)
    if repeated:
        _append(jobs, [_copy(jobs, _baseline(first, points), None, "baseline_first")])
    _append(jobs, first, block=0)
    for _ in range(1, blocks):
        append_block(jobs)
    if settings.repeats != "auto":
        append_baseline(jobs)
    jobs.write()
    return jobs


def _baseline(jobs: list[Job], points: list[Point]) -> Job:
    """Return the job whose repeats measure the machine's drift: the first that can run here, preferably on 1 device."""
    can_run = [(job, point) for job, point in zip(jobs, points, strict=True) if job.status == "waiting"]
    return min(can_run, key=lambda pair: not pair[1].config.parallel.has_one_device)[0]


def append_block(jobs: Jobs) -> None:
    """Append a block that repeats all jobs that could run in the first one; with sweep.repeats=auto, all done jobs."""
    first = [job for job in jobs.jobs if job.block == 0]
    block = 1 + max(job.block for job in jobs.jobs if job.block is not None)
    again = [job for job in first if job.status in ("waiting", "done")]
    copies = [_copy(jobs, job, block, job.folder.replace("_block_0", f"_block_{block}", 1)) for job in again]
    _append(jobs, copies, block)


def append_baseline(jobs: Jobs) -> None:
    """Append the baseline again as the last job, if the sweep began with it."""
    first = jobs.jobs[0]
    if first.block is None and jobs.jobs[-1].block is not None:
        _append(jobs, [_copy(jobs, first, None, "baseline_last")])


def wants_block(jobs: Jobs, settings: SweepConfig) -> bool:
    """Return True if a confidence interval of the report is wider than `precision`. All jobs so far must have ended."""
    from src.engine.analysis.contrasts import SPEED, with_contrasts
    from src.engine.analysis.groups import group_runs
    from src.engine.report.collect import collect  # slow to import

    if jobs.jobs[-1].block is None or 1 + max(job.block or 0 for job in jobs.jobs) >= settings.max_repeats:
        return False
    groups = with_contrasts(group_runs(collect([jobs.folder])), settings.smallest_difference)
    contrasts = [contrast for group in groups for contrast in group.contrasts[SPEED]]
    return any(_half_width(contrast) > settings.precision for contrast in contrasts)


def _half_width(contrast: Contrast) -> float:
    """Return the distance from a ratio to the farther end of its interval, relative to the ratio; 0 if it is None."""
    if contrast.ratio is None:
        return 0.0
    if contrast.low is None or contrast.high is None:
        return math.inf
    return max(contrast.high / contrast.ratio, contrast.ratio / contrast.low) - 1


def _append(jobs: Jobs, more: list[Job], block: int | None = None) -> None:
    """Append `more` jobs as block `block`; in the random order of that block if the sweep is shuffled."""
    if block is not None and jobs.order_seed is not None:
        random.Random(f"{jobs.order_seed} {block}").shuffle(more)
    for job in more:
        job.id = job.position = len(jobs.jobs)
        jobs.jobs.append(job)


def _copy(jobs: Jobs, source: Job, block: int | None, subdir: str) -> Job:
    """Return a copy of the job `source` with the seed of `block`. Composing it again might read edited YAML."""
    assert source.seed is not None
    seed = source.seed + (block or 0) - (source.block or 0)
    old, new = jobs.folder / source.folder, claim_folder(jobs.folder / subdir)
    shutil.copytree(old / ".hydra", new / ".hydra")
    if seed != source.seed:
        for name in ("config", "overrides"):
            path = new / ".hydra" / f"{name}.yaml"
            tree = OmegaConf.load(path)
            if isinstance(tree, ListConfig):
                tree.append(f"seed={seed}")
            else:
                tree.seed = seed
            write_text(path, OmegaConf.to_yaml(tree))
    save_config(dataclasses.replace(load_config(old), seed=seed), new)
    name = str(new.relative_to(jobs.folder))
    return Job(0, source.name, name, source.overrides, block, seed, config_hash=config_hash(new / "config.yaml"))
