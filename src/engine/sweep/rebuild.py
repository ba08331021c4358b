"""Check the job folders of a resumed sweep: refuse an edited config.yaml, and compose deleted folders again."""

from __future__ import annotations

import copy
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf, read_write

from src.engine.config.arguments import parse_command_line
from src.engine.config.compose import load_config, save_config
from src.engine.record.jobs import Job, Jobs, config_hash
from src.engine.sweep.blocks import write_folders
from src.engine.sweep.points import Point, expand, save_job_files
from src.schema import Config

CHANGED = "the sweep's command composes another config today, because conf/ or this machine has changed"


def check_folders(jobs: Jobs, points: Sequence[Point] = ()) -> None:
    """Raise ValueError if the config of an unfinished job was edited. Write deleted folders again, from `points` if given."""
    if any(job.status == "waiting" and not job.config_hash for job in jobs.jobs):
        _write_first_folders(jobs, points or _composed_again(jobs))
    for job in jobs.jobs:
        folder = jobs.folder / job.folder
        # A skipped job has no folder, and no hash.
        if not job.config_hash:
            continue
        if not (folder / "config.yaml").exists():
            points = points or _composed_again(jobs)
            _rebuild(job, folder, points)
        elif job.status != "done" and _is_edited(job, folder):
            fix = f"undo the edit, or delete {folder} to compose its config again"
            raise ValueError(f"{folder / 'config.yaml'}: was edited since the sweep began; {fix}")


def _write_first_folders(jobs: Jobs, points: Sequence[Point]) -> None:
    """Write all job folders again, from one version of conf/, after the sweep was killed while it wrote them."""
    possible = [point.overrides for point in points if not point.reason]
    if any(job.overrides not in possible for job in jobs.jobs if job.status == "waiting"):
        raise ValueError(
            f"{jobs.folder}: the sweep was killed while its files were written, and {CHANGED}; start a new sweep"
        )
    for job in jobs.jobs:
        shutil.rmtree(jobs.folder / job.folder, ignore_errors=True)
    write_folders(jobs, points)
    jobs.write()


def _composed_again(jobs: Jobs) -> list[Point]:
    """Compose the sweep's command, `python train.py …`, from today's files."""
    return expand(parse_command_line(shlex.split(jobs.command)[2:]))[1]


def _is_edited(job: Job, folder: Path) -> bool:
    if config_hash(folder / "config.yaml") == job.config_hash:
        return False
    # A job that was resumed with `python train.py resume=` differs in these keys.
    config = load_config(folder)
    unresumed = [replace(config, resume=None, print_config=value) for value in (True, False, "full")]
    return job.config_hash not in map(_hash_of, unresumed)


def _hash_of(config: Config) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        save_config(config, Path(scratch))
        return config_hash(Path(scratch, "config.yaml"))


def _rebuild(job: Job, folder: Path, points: Sequence[Point]) -> None:
    """Write a job's deleted folder again. Raises ValueError if conf/ gives another config today than at the start."""
    point = next((copy.deepcopy(point) for point in points if point.overrides == job.overrides), None)
    if point is not None and job.seed is not None and job.seed != point.config.seed:
        point.config.seed = job.seed
        OmegaConf.update(point.tree, "seed", job.seed)
        with read_write(point.tree.hydra):
            point.tree.hydra.overrides.task.append(f"seed={job.seed}")
    if point is None or point.reason or _hash_of(point.config) != job.config_hash:
        raise ValueError(f"{folder}: was deleted, and {CHANGED}; restore the folder, or start a new sweep")
    print(f"{folder}: was deleted (job {job.status}); its config is composed again, and the job runs again", flush=True)
    save_job_files(point, folder)
    job.reset()
