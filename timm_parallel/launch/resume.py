"""Find and check the run that `resume=<run folder>`, `resume=auto` or `resume=auto_or_new`
continues.

`resume=auto` continues the newest unfinished run of any task. If the command line has task_name,
only runs of this task are considered. If it has a key that affects the training, only runs with the
same task_name and exactly the same config are considered.

`resume=auto_or_new` is for files of cluster jobs. Only runs with the config's task_name are
considered. If none is unfinished, a new run starts.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from timm_parallel.cluster.slurm import queued_job
from timm_parallel.config.compose import (
    Command,
    compose_command,
    drop_removed_keys,
    load_config,
)
from timm_parallel.keys import (
    Config,
    ParallelConfig,
    ResolvedConfig,
    is_below,
    is_out_of_time,
    leaves,
    strategy_options,
)
from timm_parallel.machine.files import is_locked
from timm_parallel.machine.secrets import mask
from timm_parallel.machine.text import yaml_text
from timm_parallel.record.environment import CODE_DIFF
from timm_parallel.record.result import check_format, read_result, read_status

# Config keys that a resumed run may not change. Strategy, devices and length of the training may
# change.
MUST_STAY = ("model", "data", "seed", "optim.opt", "train.accumulate")
MAY_CHANGE = ("data.workers", "data.on_error", "data.root", "model.compile", "model.freeze")
AUTO = ("auto", "auto_or_new")
# Config keys with which a finished run may train further.
LIMITS = (
    "train.epochs",
    "train.max_steps",
    "train.max_minutes",
    "train.early_stop",
    "checkpoint.metric",
)
# Config keys and groups that do not affect the training.
NOT_TRAINING = (
    "resume",
    "resume_strict",
    "print_config",
    "cluster",
    "task_name",
    "paths",
    "sweep",
    "search",
    "tracker",
    "hydra",
    "optimized_metric",
)
# Keys of which the ranks replace `auto`, because only they know the devices and the model.
CHOSEN_BY_RANKS = ("train.precision", "model.channels_last")


def compose_run(arguments: Any, remembered: Path | None = None) -> Command:
    """Compose the config of a run. With `resume`, start from the saved settings of the run to
    continue.

    `arguments`: argparse namespace of the command line. `remembered`: run folder of an earlier
    attempt, if torchrun has restarted the ranks.
    """
    resume, overrides = _given_resume(arguments.overrides), arguments.overrides
    if resume not in AUTO:
        return compose_command(
            arguments, None if resume is None else _saved_settings(Path(resume), overrides)
        )
    command = compose_command(arguments)
    if _has_training_keys(arguments):
        return command
    has_task = any(item.lstrip("+").startswith("task_name=") for item in overrides)
    task = command.config.task_name if has_task or resume == "auto_or_new" else "*"
    unfinished = (folder for folder, _ in _unfinished(command.config, task))
    folder = remembered or next(unfinished, None)
    if folder is None:
        where = f"in {command.config.paths.output_dir}" if task == "*" else f"of {task}"
        _refuse_or_start(command.config, f"no unfinished run {where}")
    else:
        command = compose_command(arguments, _saved_settings(folder, overrides))
        if remembered is None:
            _show_choice(resume, folder)
    command.config.resume = None if folder is None else str(folder)
    return command


def keep_chosen(
    config: ResolvedConfig, saved: ResolvedConfig, divides_batch: bool
) -> ResolvedConfig:
    """Build the config for continuing a run. It keeps the values that the run has chosen for
    `auto`: the number format, the memory format, and train.accumulate with the batch size, unless
    the run has another number of images per optimizer step.

    `saved`: the config of the run. `divides_batch`: whether train.accumulate=auto was asked for.
    """
    kept = copy.deepcopy(config)
    for key in CHOSEN_BY_RANKS:
        section, _, name = key.partition(".")
        # Only a project may have a key.
        if getattr(getattr(kept, section), name, None) == "auto":
            setattr(getattr(kept, section), name, getattr(getattr(saved, section), name))
    is_same_step = saved.global_batch * saved.train.accumulate == config.global_batch
    if not divides_batch or not is_same_step:
        return kept
    kept.train.accumulate = saved.train.accumulate
    kept.data.batch_size = saved.data.batch_size
    kept.data.batch_size_per_device = saved.data.batch_size_per_device
    return kept


def folder_to_resume(config: ResolvedConfig, asked: Config) -> Path | None:
    """Return the run folder that `resume` names. With auto, find the newest unfinished run that has
    the task_name of the config and exactly the same config. None means a new run.

    `asked`: the config in which `auto` is not replaced.
    """
    if config.resume not in AUTO:
        return None if config.resume is None else Path(config.resume)
    for folder, saved in _unfinished(config, config.task_name):
        kept = keep_chosen(config, saved, asked.train.accumulate == "auto")
        if all(is_below(key, NOT_TRAINING) for key, _, _ in _changes(kept, saved)):
            _show_choice(config.resume, folder)
            return folder
    _refuse_or_start(config, f"no unfinished run of {config.task_name} with exactly this config")
    return None


def check_resumable(config: ResolvedConfig, folder: Path) -> None:
    """Raise ValueError if the run in `folder` cannot continue with this config. Unless
    resume_strict=false, keys that define the training must not change.
    """
    if not any((folder / "checkpoints").glob("*.pt")):
        raise ValueError(
            f"resume={folder}: has no checkpoint to continue from; start a new run without resume"
        )
    for path in (folder / "checkpoints").glob("*.pt"):
        check_format(path.with_suffix(".json"))
        if path.is_dir():
            raise ValueError(
                f"resume={folder}: {path} is a folder; expected a checkpoint file: move the "
                "folder away"
            )
    if (job := queued_job(folder)) is not None:
        raise ValueError(
            f"resume={folder}: Slurm job {job} of this run is in the queue; wait for it, or "
            f"scancel {job}"
        )
    saved = load_config(folder)
    if config.resume_strict and (change := _other_training(config, saved)) is not None:
        raise ValueError(
            f"{change}: cannot change when a run continues (resume={folder}); start a new run "
            "without resume, or set resume_strict=false"
        )
    changed = {key for key, _, _ in _changes(config, saved)}
    if read_status(folder) == "done" and (changed.isdisjoint(LIMITS) or _has_ended(config, folder)):
        raise ValueError(
            f"resume={folder}: this run is done; to continue it, give a larger train.epochs, or "
            f"another value of {', '.join(LIMITS[1:])}"
        )


def _has_ended(config: ResolvedConfig, folder: Path) -> bool:
    """Return True if a finished run has reached a limit of the config. It would train no step, and
    replace its measurements by none.
    """
    train, result = config.train, read_result(folder)
    return (
        result.epochs >= train.epochs
        or result.steps >= (train.max_steps or math.inf)
        or is_out_of_time(train, result.seconds.get("training", 0.0))
    )


def records_of(folder: Path) -> dict[Path, bytes]:
    """Read the files of a run that a resume overwrites. Return a dictionary from path to content,
    with which `restore_records` can undo the resume.
    """
    paths = [
        folder / name for name in ("config.yaml", "environment.json", "result.json", CODE_DIFF)
    ]
    paths += folder.glob(".hydra/*.yaml")
    return {path: path.read_bytes() for path in paths if path.is_file()}


def restore_records(folder: Path, records: dict[Path, bytes]) -> None:
    """Write the old contents back to the files of a run whose resume was rejected. `records`: the
    result of `records_of` before the resume.
    """
    for name in ("result.json", CODE_DIFF):
        (folder / name).unlink(missing_ok=True)
    for path, content in records.items():
        path.write_bytes(content)


def _given_resume(overrides: list[str]) -> str | None:
    """Return the value of the last `resume=` argument on the command line; None without one, or for
    null.
    """
    values = [
        item.removeprefix("resume=").strip("'\"")
        for item in overrides
        if item.startswith("resume=")
    ]
    return values[-1] if values and values[-1] not in ("null", "") else None


def _has_training_keys(arguments: Any) -> bool:
    """Return True if the command line names a config file, or sets a key that affects the
    training.
    """
    keys = [item.lstrip("+~").partition("=")[0].replace("/", ".") for item in arguments.overrides]
    return bool(arguments.config_name) or not all(is_below(key, NOT_TRAINING) for key in keys)


def _unfinished(config: Config, task: str) -> Iterator[tuple[Path, ResolvedConfig]]:
    """Yield the folders and configs of unfinished runs, the newest first. Runs that are in use or
    queued are skipped, and so are jobs of a sweep.

    `task`: the task_name of the runs, `*` for all.
    """
    checkpoints = Path(config.paths.output_dir).glob(f"{task}/*/*/checkpoints/last.pt")
    for folder in sorted(
        (path.parent.parent for path in checkpoints), key=lambda path: path.parts[-2:], reverse=True
    ):
        try:
            if read_status(folder) == "done" or is_locked(folder) or queued_job(folder):
                continue
            # Skip the jobs of a sweep, because the sweep itself continues them.
            if any((parent / "jobs.json").is_file() for parent in folder.parents[:3]):
                continue
            yield folder, load_config(folder)
        except ValueError as error:
            print(
                f"resume=auto: skipped {folder}: {' '.join(mask(str(error)).split())}",
                file=sys.stderr,
            )


def _show_choice(resume: str, folder: Path) -> None:
    print(f"resume={resume}: continues {folder}", flush=True)


def _refuse_or_start(config: Config, problem: str) -> None:
    """Report that no unfinished run matches. resume=auto raises ValueError. resume=auto_or_new
    prints the line and starts a new run. `problem`: the text for the message.
    """
    if config.resume == "auto":
        raise ValueError(
            f"resume=auto: {problem}; give resume=<run folder>, or resume=auto_or_new to start a "
            "new run in this case"
        )
    print(f"resume={config.resume}: {problem}; starting a new run", file=sys.stderr)


def _saved_settings(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Read the composed config of the run to continue. If the overrides choose another strategy,
    options of the old strategy are removed. Raises ValueError if `folder` is no run folder.
    """
    # Prefer .hydra/config.yaml, in which `auto` is not replaced yet, so that `auto` gets values for
    # this machine.
    composed = folder / ".hydra" / "config.yaml"
    try:
        tree = OmegaConf.load(composed if composed.exists() else folder / "config.yaml")
        strategy = tree.parallel.get("strategy")
    except (OSError, YAMLError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"resume={folder}: not a run folder (it has no config.yaml that can be read); give "
            "auto, or a folder below outputs/"
        ) from None
    load_config(folder)
    assert isinstance(tree, DictConfig)
    drop_removed_keys(tree)
    saved: Any = OmegaConf.to_container(tree)
    for key in ("resume", "search", "sweep", "hydra", "defaults"):
        saved.pop(key, None)
    pairs = [item.partition("=") for item in overrides]
    chosen = [value for key, _, value in pairs if key in ("parallel", "parallel.strategy")]
    if chosen and chosen[-1] != strategy:
        dropped = [*strategy_options(), "max_restarts", "options"]
        has_one_device = ParallelConfig(chosen[-1]).traits.has_one_device
        if has_one_device:
            dropped.append("devices")
        if has_one_device or chosen[-1] == "auto":
            dropped += ["device_ids", "output_device"]
        saved["parallel"] = {
            key: value for key, value in saved["parallel"].items() if key not in dropped
        }
    if any(key == "tracker" for key, _, _ in pairs):
        saved.get("tracker", {}).pop("use", None)
    return saved


def _changes(config: Config, before: Config) -> list[tuple[str, Any, Any]]:
    """Compare two configs. Return (key, value in `before`, value in `config`) for each key whose
    values differ.
    """
    pairs = zip(leaves(before), leaves(config), strict=True)
    return [(key, old, new) for (key, old, _), (_, new, _) in pairs if old != new]


def _other_training(config: ResolvedConfig, before: ResolvedConfig) -> str | None:
    """Describe the first changed config key that must not change when a run continues. Return None
    if there is no such key.

    `before`: the saved config of the run.
    """
    for key, old, new in _changes(config, before):
        if key.startswith(MUST_STAY) and key not in MAY_CHANGE:
            return f"{key}={yaml_text(new)} (was {yaml_text(old)})"
    if config.global_batch == before.global_batch:
        return None
    # The global batch can differ here only if data.batch_size_per_device is set and the number of
    # devices has changed.
    return (
        f"parallel.devices={config.parallel.devices}: data.batch_size_per_device makes the global "
        f"batch {config.global_batch} (was {before.global_batch})"
    )
