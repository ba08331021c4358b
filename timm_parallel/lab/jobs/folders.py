"""Run folders of the jobs of a sweep or search, and the saved configs from which these are made.

A configuration is saved once, in `<sweep>/configs/<number>`, before the first job starts. Its jobs
differ in their seeds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from timm_parallel.config.compose import asks_for_accumulate, copy_config, load_config
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.files import claim_folder
from timm_parallel.record.jobs import Job

CONFIGS = "configs"  # in the sweep folder


def claim_job_folder(folder: Path, job: Job) -> None:
    """Create the empty run folder of a job, under another name if hydra.sweep.subdir gives two jobs
    the same.
    """
    job.folder = str(claim_folder(folder / job.folder).relative_to(folder))


def config_folder(folder: Path, job: Job) -> Path:
    """Return the folder with the saved config of a job: that of its configuration, or its run
    folder if it has none.
    """
    return (
        folder / job.folder
        if job.configuration is None
        else folder / CONFIGS / str(job.configuration)
    )


@cache
def frozen_config(folder: Path) -> ResolvedConfig:
    """Return the config that `freeze_job` wrote into a folder, read once."""
    return load_config(folder)


def write_job_folder(folder: Path, job: Job) -> Path:
    """Write the run folder of a job that starts: the config of its configuration, with the job's
    seed. Return the folder.

    A job with a checkpoint keeps its config, which has the batches that train.accumulate=auto has
    found.
    """
    run_folder, source = folder / job.folder, config_folder(folder, job)
    has_checkpoint = any((run_folder / "checkpoints").glob("*.pt"))
    if source != run_folder and not (has_checkpoint and asks_for_accumulate(run_folder)):
        assert job.seed is not None
        copy_config(source, run_folder, job.seed)
    return run_folder
