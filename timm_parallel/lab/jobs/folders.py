"""Write the run folders of the jobs of a sweep or search.

Before the first job starts, the config of each configuration is saved once, in
`<sweep>/configs/<number>`. A job starts from a copy of this config with its own seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from timm_parallel.config.compose import (
    asks_for_accumulate,
    copy_config,
    load_config,
    save_config,
)
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch.resume import keep_chosen
from timm_parallel.machine.files import claim_folder
from timm_parallel.record.result import Job

# Folder of the saved configs, in the sweep folder.
CONFIGS = "configs"


def claim_job_folder(folder: Path, job: Job) -> None:
    """Create an empty run folder for a job. If the folder exists because hydra.sweep.subdir gives
    two jobs the same name, choose a new name.
    """
    job.folder = str(claim_folder(folder / job.folder).relative_to(folder))


def config_folder(folder: Path, job: Job) -> Path:
    """Return the folder that holds the saved config of a job: the folder of its configuration, or
    the job's own run folder if it has no configuration number.
    """
    return (
        folder / job.folder
        if job.configuration is None
        else folder / CONFIGS / str(job.configuration)
    )


@cache
def frozen_config(folder: Path) -> ResolvedConfig:
    """Read the config that was saved in a folder before the first job of the sweep started. The
    result is cached.
    """
    return load_config(folder)


def write_job_folder(folder: Path, job: Job) -> Path:
    """Write the config of a job that is about to start into its run folder, with the seed of the
    job. Return the run folder.

    A resumed job keeps the values that its first attempt has chosen for `auto`.
    """
    run_folder, source = folder / job.folder, config_folder(folder, job)
    has_checkpoint = any((run_folder / "checkpoints").glob("*.pt"))
    if source != run_folder:
        assert job.seed is not None
        saved = load_config(run_folder) if has_checkpoint else None
        copy_config(source, run_folder, job.seed)
        if saved is not None:
            divides_batch = asks_for_accumulate(run_folder)
            kept = keep_chosen(load_config(run_folder), saved, divides_batch)
            save_config(kept, run_folder)
    return run_folder
