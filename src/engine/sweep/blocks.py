"""Randomised complete blocks: a block runs every point once, in an order drawn anew and with a seed of its own.

So a drifting machine favours no point, accuracies are paired within a block and independent between blocks, and what
blocks differ by can be taken out of a comparison (Fisher 1935, The Design of Experiments). One more run of the baseline
before the first block and one after the last belong to no block: they warm the machine up, and show how far it drifted.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.config.rules import check_values
from src.engine.machine.files import claim_folder, write_text
from src.engine.record.jobs import Job, Jobs, config_hash, new_jobs
from src.engine.sweep.points import Point, freeze_job
from src.schema import SweepConfig

if TYPE_CHECKING:
    from src.engine.report.statistics import Contrast

FEWEST = 3  # blocks of sweep.repeats=auto: fewer leave the intervals too few degrees of freedom to be of use


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Refuse repeats whose blocks cannot each have a seed of their own."""
    if settings.repeats == 1:
        return
    seeds = {point.config.seed for point in points}
    if len(seeds) > 1:
        raise ValueError(
            f"sweep.repeats={settings.repeats}: block b has the seed + b, but seed is swept; leave one of the two out"
        )
    most = settings.max_repeats if settings.repeats == "auto" else int(settings.repeats)
    check_values(dataclasses.replace(points[0].config, seed=max(seeds) + most - 1))


def freeze_jobs(folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None) -> Jobs:
    """Write every job's config into its folder, and the list of jobs beside them: nothing changes what is queued any more.

    `order_seed` is drawn unless given.
    """
    repeated = settings.repeats != 1
    blocks = min(FEWEST, settings.max_repeats) if settings.repeats == "auto" else int(settings.repeats)
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
    """The job that shows how the machine drifts: the first point with single that can run here, else the first that can."""
    can_run = [(job, point) for job, point in zip(jobs, points, strict=True) if job.status == "waiting"]
    return min(can_run, key=lambda pair: pair[1].config.parallel.strategy != "single")[0]


def append_block(jobs: Jobs) -> None:
    """One more block of the points that could run in the first; with `sweep.repeats=auto`, of those that are done."""
    first = [job for job in jobs.jobs if job.block == 0]
    block = 1 + max(job.block for job in jobs.jobs if job.block is not None)
    again = [job for job in first if job.status in ("waiting", "done")]
    copies = [_copy(jobs, job, block, job.folder.replace("_block_0", f"_block_{block}", 1)) for job in again]
    _append(jobs, copies, block)


def append_baseline(jobs: Jobs) -> None:
    """The baseline once more: the last job of a sweep that began with it."""
    first = jobs.jobs[0]
    if first.block is None and jobs.jobs[-1].block is not None:
        _append(jobs, [_copy(jobs, first, None, "baseline_last")])


def wants_block(jobs: Jobs, settings: SweepConfig) -> bool:
    """True if `sweep.repeats=auto` asks for one more block: an interval that the report states is wider than `precision`.

    All blocks so far must have been recorded.
    """
    from src.engine.report.collect import collect  # takes a while to import, and only this needs it
    from src.engine.report.comparison import group_runs
    from src.engine.report.decisions import SPEED, with_contrasts

    if jobs.jobs[-1].block is None or 1 + max(job.block or 0 for job in jobs.jobs) >= settings.max_repeats:
        return False
    groups = with_contrasts(group_runs(collect([jobs.folder])), settings.smallest_difference)
    stated = [contrast for one in groups for contrast in one.contrasts[SPEED] if contrast.ratio is not None]
    return any(_reach(contrast) > settings.precision for contrast in stated)


def _reach(contrast: Contrast) -> float:
    """How far the interval of a ratio reaches from it, as a share of it."""
    if contrast.ratio is None or contrast.low is None or contrast.high is None:
        return math.inf
    return max(contrast.high / contrast.ratio, contrast.ratio / contrast.low) - 1


def _append(jobs: Jobs, more: list[Job], block: int | None = None) -> None:
    """Put `more` at the end; those of a block in the order drawn for it, as written where nothing is shuffled."""
    if block is not None and jobs.order_seed is not None:
        random.Random(f"{jobs.order_seed} {block}").shuffle(more)
    for job in more:
        job.id = job.position = len(jobs.jobs)
        jobs.jobs.append(job)


def _copy(jobs: Jobs, source: Job, block: int | None, subdir: str) -> Job:
    """A job with an earlier one's frozen files, but for the seed. They are copied: composing again might read edited YAML."""
    assert source.seed is not None
    seed = source.seed + (block or 0) - (source.block or 0)
    old, new = jobs.folder / source.folder, claim_folder(jobs.folder / subdir)
    header, config = (old / "config.yaml").read_text(encoding="utf-8").split("\n", 1)
    write_text(new / "config.yaml", header.replace(str(old.resolve()), str(new.resolve())) + "\n" + _with(seed, config))
    shutil.copytree(old / ".hydra", new / ".hydra")
    if seed != source.seed:
        for name, change in (("config", _with), ("overrides", _overriding)):
            path = new / ".hydra" / f"{name}.yaml"
            write_text(path, change(seed, path.read_text(encoding="utf-8")))
    name = str(new.relative_to(jobs.folder))
    return Job(0, source.name, name, source.overrides, block, seed, config_hash=config_hash(new / "config.yaml"))


def _with(seed: int, config: str) -> str:
    """The YAML text of a config, with this seed."""
    text, count = re.subn(r"^seed: \d+$", f"seed: {seed}", config, flags=re.MULTILINE)
    assert count == 1, config
    return text


def _overriding(seed: int, overrides: str) -> str:
    """The YAML list of a run's overrides, with this seed as the last."""
    return ("" if overrides.strip() == "[]" else overrides) + f"- seed={seed}\n"
