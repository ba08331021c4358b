"""Job folders of a resumed sweep: refuses an edited config.yaml, composes a deleted folder again."""

from __future__ import annotations

import copy
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf, read_write

from src.engine.config.arguments import parse_command_line
from src.engine.config.compose import load_config, save_config
from src.engine.record.jobs import Job, Jobs, config_hash
from src.engine.sweep.points import Point, expand, save_job_files
from src.schema import Config


def check_folders(jobs: Jobs) -> None:
    """Refuse unfinished jobs whose config was edited, and recreate deleted job folders from the sweep's command."""
    points: list[Point] = []
    for job in jobs.jobs:
        folder = jobs.folder / job.folder
        # A skipped job has no folder, and no hash.
        if not job.config_hash:
            continue
        if not (folder / "config.yaml").exists():
            # Compose `python train.py …` from today's files.
            points = points or expand(parse_command_line(shlex.split(jobs.command)[2:]))[1]
            _rebuild(job, folder, points)
        elif job.status != "done" and _is_edited(job, folder):
            raise ValueError(f"{folder / 'config.yaml'}: edited; undo the edit, or delete {folder} to compose it again")


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


def _rebuild(job: Job, folder: Path, points: list[Point]) -> None:
    """Recreate a job's folder, with the seed of its block. Raises ValueError if its config differs from the sweep's."""
    point = next((copy.deepcopy(point) for point in points if point.overrides == job.overrides), None)
    if point is not None and job.seed is not None and job.seed != point.config.seed:
        point.config.seed = job.seed
        OmegaConf.update(point.tree, "seed", job.seed)
        with read_write(point.tree.hydra):
            point.tree.hydra.overrides.task.append(f"seed={job.seed}")
    if point is None or point.reason or _hash_of(point.config) != job.config_hash:
        reason = "its command composes another config today, because conf/ or this machine has changed"
        raise ValueError(f"{folder}: deleted, and {reason}; restore the folder, or start a new sweep")
    print(f"{folder}: deleted while its job was {job.status}; composed again, and the job runs again", flush=True)
    save_job_files(point, folder)
    job.reset()
