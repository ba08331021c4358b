"""Repeats of a sweep. Each repeat (block) runs every configuration once, in a random order and with another seed.

Drift of the machine then favors no configuration, and accuracies are paired (Fisher 1935, The Design of Experiments).
"""

from __future__ import annotations

import random
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import ListConfig, OmegaConf

from src.engine.keys import SweepConfig, leaves
from src.engine.machine.files import claim_folder, write_text
from src.engine.record.jobs import Job, Jobs, config_hash, new_jobs
from src.engine.sweep.board import counted
from src.engine.sweep.points import Point, freeze_job, names_of


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Raise ValueError if a repeated sweep also varies the seed, or if no configuration matches sweep.baseline."""
    if settings.repeats != 1 and len({point.config.seed for point in points}) > 1:
        fix = "repeats differ in their seeds, but the sweep also varies seed; drop one of the two"
        raise ValueError(f"sweep.repeats={settings.repeats}: {fix}")
    if settings.baseline is not None:
        from src.engine.analysis.settings import check_baseline  # slow to import

        configs = [{key: value for key, value, _ in leaves(point.config)} for point in points]
        check_baseline(settings.baseline, [point.overrides for point in points], configs)


def freeze_jobs(folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None) -> Jobs:
    """Write jobs.json and every job's config, so that later edits do not change queued jobs. Tests set `order_seed`."""
    repeated = settings.repeats != 1
    shuffled = repeated if settings.shuffle is None else settings.shuffle
    jobs = new_jobs(folder)
    jobs.order_seed = (secrets.randbits(32) if order_seed is None else order_seed) if shuffled else None
    first = []
    for name, point in zip(names_of(points), points, strict=True):
        subdir = f"{point.subdir}_block_0" if repeated else point.subdir
        job = Job(0, name, subdir, point.overrides, seed=point.config.seed, reason=point.reason, code=point.code)
        first.append(job)
        first[-1].status = "skipped" if point.reason else "waiting"
    _append(jobs, first, block=0)
    for _ in range(1, settings.repeats):
        append_block(jobs)
    # First, so that a sweep that is killed while it writes the folders can be resumed.
    jobs.write()
    write_folders(jobs, points)
    jobs.write()
    return jobs


def write_folders(jobs: Jobs, points: Sequence[Point] = ()) -> None:
    """Write the missing job folders: of the first repeat from `points`, of later ones as copies with another seed."""
    first = {tuple(job.overrides): job for job in jobs.jobs if job.block == 0}
    todo = [job for job in [*first.values(), *jobs.jobs] if job.status == "waiting"]
    by_overrides = {tuple(point.overrides): point for point in points}
    with counted("writing configs", len(todo)) as count:
        for job in todo:
            source = first[tuple(job.overrides)]
            if not job.config_hash and job is source:
                freeze_job(jobs.folder, job, by_overrides[tuple(job.overrides)])
            elif not job.config_hash:
                _copy(jobs, source, job)
            count()


def append_block(jobs: Jobs) -> None:
    """Append jobs that repeat all configurations once more, except failed and skipped ones. Writes no folders."""
    first = [job for job in jobs.jobs if job.block == 0]
    block = jobs.num_blocks
    again = [job for job in first if job.status in ("waiting", "done")]
    _append(jobs, [_repeat(job, block) for job in again], block)


def _append(jobs: Jobs, more: list[Job], block: int) -> None:
    """Append `more` jobs as repeat number `block`; if the sweep is shuffled, in the random order of this repeat."""
    if jobs.order_seed is not None:
        random.Random(f"{jobs.order_seed} {block}").shuffle(more)
    for job in more:
        job.id = job.position = len(jobs.jobs)
        jobs.jobs.append(job)


def _repeat(source: Job, block: int) -> Job:
    """Return the job that repeats `source`, of repeat 0, in repeat number `block`. Writes no folder."""
    assert source.seed is not None
    folder = source.folder.replace("_block_0", f"_block_{block}", 1)
    return Job(0, source.name, folder, source.overrides, block, source.seed + block)


def _copy(jobs: Jobs, source: Job, job: Job) -> None:
    """Write the folder of `job`, a repeat of `source`, as a copy. Composing it again might read edited YAML."""
    old, new = jobs.folder / source.folder, claim_folder(jobs.folder / job.folder)
    shutil.copytree(old / ".hydra", new / ".hydra")
    for path in (Path("config.yaml"), Path(".hydra", "config.yaml")):
        text = (old / path).read_text(encoding="utf-8").replace(str(old.resolve()), str(new.resolve()))
        write_text(new / path, re.sub(r"^seed: .*", f"seed: {job.seed}", text, flags=re.MULTILINE))
    if job.seed != source.seed:
        overrides = OmegaConf.load(new / ".hydra" / "overrides.yaml")
        assert isinstance(overrides, ListConfig)
        overrides.append(f"seed={job.seed}")
        write_text(new / ".hydra" / "overrides.yaml", OmegaConf.to_yaml(overrides))
    job.folder, job.config_hash = str(new.relative_to(jobs.folder)), config_hash(new / "config.yaml")
