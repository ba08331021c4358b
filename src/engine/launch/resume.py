"""`resume=<run folder>|auto`: which run goes on, with which settings, and what is refused."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from src.engine.config.cluster import CODE
from src.engine.config.combinations import DDP_ONLY, DP_ONLY
from src.engine.config.compose import CONF, read_frozen
from src.engine.launch.slurm import queued_job
from src.engine.machine.lock import is_owned
from src.engine.machine.secrets import hide, mask
from src.engine.record.result import read_status
from src.schema import Config, ResolvedConfig, TrainConfig, leaves

# What makes it the same training; strategy, devices and length may change.
MUST_STAY = ("model", "data", "seed", "optim.opt", "train.accumulate")
# Of `resume=auto`, which nobody has pointed at a folder, everything must be as it was but these.
OF_A_COMMAND = ("resume", "print_config", "cluster.", "sweep.", "search.")
MAY_CHANGE = ("data.workers", "data.on_error", "data.root", "model.compile")


def with_saved_overrides(arguments: Any) -> Any:
    """For `resume=<folder>`: the overrides that folder was started with, then those given now."""
    folder = _asked(arguments.overrides)
    if folder is None:
        return arguments
    try:
        saved = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        hydra: Any = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
        sources = OmegaConf.select(hydra, "hydra.runtime.config_sources")
        if not isinstance(saved, list) or sources is None:  # cut off while it was written
            raise OSError
    except (OSError, YAMLError):
        raise ValueError(
            f"resume={folder}: not a run folder (it has no .hydra that can be read); give a folder below outputs/"
        ) from None
    merged = copy.copy(arguments)
    merged.overrides = _still_meant([str(item) for item in saved], arguments.overrides) + arguments.overrides
    main = next((source.path for source in sources if source.provider == "main"), str(CONF))
    if arguments.config_path is None and Path(main) != CONF:
        merged.config_path, merged.config_name = main, hydra.hydra.job.config_name
    return merged


def _still_meant(saved: list[str], given: list[str]) -> list[str]:
    """The saved overrides without the options that another strategy, given now, does not have."""
    now = [item.partition("=")[2] for item in given if item.partition("=")[0] in ("parallel", "parallel.strategy")]
    foreign = {"resume", *(f"cluster.{key}" for key in CODE)}  # code is taken from this command alone
    if now and now[-1] != "auto":
        options = {"dp": DP_ONLY, "ddp": (*DDP_ONLY, "max_restarts")}
        foreign |= {f"parallel.{key}" for owner, keys in options.items() if owner != now[-1] for key in keys}
    if now and now[-1] == "single":
        foreign |= {f"parallel.{key}" for key in ("devices", "device_ids", "output_device")}
    return [item for item in saved if item.partition("=")[0] not in foreign]


def folder_to_resume(config: ResolvedConfig) -> Path | None:
    """The folder that `resume` names; for auto the newest unfinished run of this task, or None: a new run starts."""
    if config.resume is None:
        return None
    if config.resume != "auto":
        return Path(config.resume)
    nearest = ""
    runs = sorted((Path(config.paths.output_dir) / config.task_name).glob("*/*/checkpoints/last.pt"), reverse=True)
    for folder in (path.parent.parent for path in runs):
        try:
            if read_status(folder) == "done" or is_owned(folder) or queued_job(folder):
                continue
            changes = _changes(config, read_frozen(folder))
            others = [f"{key}={was}" for key, was, _ in changes if not key.startswith(OF_A_COMMAND)]
            if not others:
                return folder
            nearest = nearest or hide(f" with these settings (the newest, {folder}, has {others[0]})")
        except ValueError as error:
            print(f"resume=auto: {folder} is passed over: {' '.join(mask(str(error)).split())}", file=sys.stderr)
    print(f"resume=auto: no unfinished run of {config.task_name}{nearest}; starting a new one", file=sys.stderr)
    return None


def check_resumable(config: ResolvedConfig, folder: Path) -> None:
    """Say what has changed since the run began; unless resume_strict=false, refuse what makes it another training."""
    if not any((folder / "checkpoints").glob("*.pt")):
        raise ValueError(f"resume={folder}: it has no checkpoint to go on from; start anew without resume")
    if (job := queued_job(folder)) is not None:
        raise ValueError(
            f"resume={folder}: it belongs to job {job}, which is in the queue; wait for it, or scancel {job}"
        )
    frozen = read_frozen(folder)
    if config.resume_strict and (another := _another_training(config, frozen)) is not None:
        raise ValueError(
            f"{another}: cannot change when a run goes on (resume={folder}); start anew, or set resume_strict=false"
        )
    if read_status(folder) == "done" and not _is_longer(config.train, frozen.train):
        raise ValueError(f"resume={folder}: this run is done; give a larger train.epochs to go on with it")
    for key, was, value in _changes(config, frozen):
        if not key.startswith(("resume", "print_config")):
            print(hide(f"resume: {key}: {was} -> {value}"), file=sys.stderr)


def _asked(overrides: list[str]) -> Path | None:
    given = [item.removeprefix("resume=").strip("'\"") for item in overrides if item.startswith("resume=")]
    return Path(given[-1]) if given and given[-1] not in ("auto", "null", "") else None  # the last one counts


def _changes(config: Config, before: Config) -> list[tuple[str, Any, Any]]:
    """(key, value before, value now) of each that differs."""
    pairs = zip(leaves(before), leaves(config), strict=True)
    return [(key, was, value) for (key, was, _), (_, value, _) in pairs if was != value]


def _another_training(config: ResolvedConfig, before: ResolvedConfig) -> str | None:
    """The first change that makes it another training."""
    for key, was, value in _changes(config, before):
        if key.startswith(MUST_STAY) and key not in MAY_CHANGE:
            return f"{key}={value} (was {was})"
    if config.global_batch == before.global_batch:
        return None
    return (  # data.batch_size_per_device on another number of devices
        f"parallel.devices={config.parallel.devices}: with data.batch_size_per_device="
        f"{config.data.batch_size_per_device} the global batch {config.global_batch} (was {before.global_batch})"
    )


def _is_longer(train: TrainConfig, before: TrainConfig) -> bool:
    """True if any of the three keys that end a training ends it later."""
    pairs = ((train.max_steps, before.max_steps), (train.early_stop, before.early_stop))
    return train.epochs > before.epochs or any((new or math.inf) > (old or math.inf) for new, old in pairs)
