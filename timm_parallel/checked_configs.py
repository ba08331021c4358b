"""Compose and check configs in Python, as train.py and evaluate.py do, for the project, scripts and
notebooks. The rules that need the class of the task are here too. The module of a task imports
torch, so these rules run after all others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from timm_parallel.app import current
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command, load_config, typed_and_checked
from timm_parallel.config.explain import UNPARSABLE, explain, hint, is_known, key_hint
from timm_parallel.config.resolve import resolve
from timm_parallel.config.validate import check_combination, option_problems, refuse
from timm_parallel.data.build import built_in
from timm_parallel.data.dataset import ImageDataset
from timm_parallel.keys import (
    ClusterConfig,
    Config,
    ParallelConfig,
    ResolvedConfig,
    TrackerConfig,
    is_below,
    is_own_class,
)
from timm_parallel.machine.imports import import_class, import_name
from timm_parallel.machine.ranks import ranks_from_environment
from timm_parallel.metric import LOSS, Metric, metric_name
from timm_parallel.task import Task, find_task

# Config keys that evaluate.py accepts with run=<folder>, and config keys that it accepts without
# run.
KEYS_WITH_RUN = ("data", "parallel", "train.precision", "train.task_kwargs", "paths")
KEYS_WITHOUT_RUN = (*KEYS_WITH_RUN, "model", "experiment", "seed")
OPTIONS = ("run", "split", "checkpoint", "weights", "predictions")
# Config group -> the key that the group's name sets. A saved config has no groups, so
# `parallel=ddp` sets parallel.strategy.
GROUPS = {"parallel": "parallel.strategy", "data": "data.name"}


def compose(*overrides: str) -> Config:
    """Compose and check the config that train.py would use with these overrides, e.g. `model=tiny`.
    The class of the config is that of the project (`App.config`).
    """
    config = compose_command(parse_command_line([*overrides])).config
    check_task(config)
    return config


def check_config(config: Config) -> None:
    """Raise ValueError if keys of a config cannot work together."""
    check_combination(config)
    check_task(config)


def resolve_devices(
    strategy: str, devices: int | str, batch_size_per_device: int
) -> ResolvedConfig:
    """Build a resolved config for a strategy, a number of devices (or `auto`) and a batch size per
    device. Its other keys have their defaults.

    The numbers fit the ranks that torchrun or srun started, otherwise this machine. Raises
    ValueError if strategy and devices do not fit.
    """
    config = current().config()
    config.parallel.strategy, config.parallel.devices = strategy, devices
    config.data.batch_size, config.data.batch_size_per_device = None, batch_size_per_device
    check_combination(config)
    ranks = ranks_from_environment(os.environ) if config.parallel.has_ranks else None
    sizes = () if ranks is None else (ranks.world_size, ranks.local_world_size)
    return resolve(config, *sizes)


def evaluation_config(run: Path | None, overrides: list[str]) -> ResolvedConfig:
    """Build the resolved config for an evaluation.

    `run`: the folder of the run to evaluate. None: evaluate the model that the overrides name.
    `overrides`: `key=value` arguments, as on the command line of train.py.
    """
    ranks = ranks_from_environment(os.environ)
    for override in overrides:
        _check_key(override, KEYS_WITHOUT_RUN if run is None else KEYS_WITH_RUN)
    if run is not None:
        config = _saved_config(run, overrides)
    else:
        # Put the default strategy first, because a later parallel=… replaces it.
        config = compose_command(parse_command_line(["parallel=single", *overrides])).config
        if not config.model.pretrained and config.model.weights is None:
            raise ValueError(
                "nothing to evaluate: give run=<run folder>, model.pretrained=true or "
                "model.weights=<file>"
            )
    # Reset config keys that only training uses.
    config.model.for_evaluation()
    config.tracker, config.train.accumulate = TrackerConfig(), 1
    check_combination(config)
    resolved = resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))
    check_task(resolved)
    return resolved


def _check_key(override: str, allowed: tuple[str, ...]) -> None:
    key, equals, value = override.lstrip("+").partition("=")
    if not equals and not key.startswith("-"):
        raise ValueError(f"{override}: expected key=value; for a run folder write run={override}")
    if not (equals and (is_known(key) or key == "experiment")):
        hint = key_hint(key.lstrip("-"), OPTIONS, value, "evaluate")
        raise ValueError(f"{override}: unknown option{hint}")
    if not is_below(key, allowed):
        raise ValueError(
            f"{override}: not an evaluation option; evaluate.py allows keys that start with "
            f"{', '.join(allowed)}"
        )


def _saved_config(run: Path, overrides: list[str]) -> Config:
    saved = load_config(run)
    config = current().config(**vars(saved))
    per_device = max(1, saved.global_batch // saved.parallel.devices)
    # Choose the devices again, because the run may have been on another machine.
    config.parallel, config.cluster = ParallelConfig(), ClusterConfig()
    config.parallel.choose_strategy(several=False)
    # Do not load pretrained weights, because the checkpoint of the run has all weights.
    config.model.pretrained, config.model.weights, config.model.weights_strict = False, None, True
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    dotted = [f"{GROUPS.get(key, key)}={value}" for key, value in given.items()]
    config.data.batch_size = None
    config.data.batch_size_per_device = None if "data.batch_size" in given else per_device
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(dotted))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, dotted)) from error
    except YAMLError:
        raise ValueError(f"{' '.join(dotted)}: {UNPARSABLE}") from None
    return typed_and_checked(merged)  # type: ignore[arg-type]


def check_task(config: Config) -> None:
    """Raise RefusedError if keys of a config do not fit its task, or break a rule of the project.
    Call this function after the other checks, which need no import of torch.
    """
    app = current()
    # A project without tasks accepts any name.
    rules = [_task_problems(config)] if app.tasks else []
    refuse(*rules, import_name(app.rules)(config))


def _task_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each metric, option or dataset of a config that does not fit its
    task. Replace checkpoint.metric=auto by the headline of the task first.
    """
    train, name = config.train, config.train.task
    task = find_task(name, Task)
    choose_headline(config)
    yield from option_problems("train.task_kwargs", task.Options, train.task_kwargs)
    for key, metric, allowed in (
        ("checkpoint.metric", config.checkpoint.metric, _evaluated("val", task.metrics)),
        ("optimized_metric", config.objective, objectives(task.metrics)),
    ):
        if metric not in allowed:
            yield f"{key}={metric}: not a metric of the task {name}{hint(metric, allowed)}"
    yield from _phase_problems(config, task)
    kinds = _target_kinds(config.data.name)
    if kinds is not None and task.target not in (*kinds, "none"):
        able = [data for data in current().datasets if task.target in (_target_kinds(data) or ())]
        yield (
            f"train.task={name}: this task needs targets of type {task.target}, but "
            f"data={config.data.name} has targets of type {' or '.join(kinds)}; use "
            f"{' or '.join(f'data={name}' for name in able) or 'a dataset of your own'}"
        )


def choose_headline(config: Config) -> None:
    """Replace checkpoint.metric=auto by the headline of the task."""
    if config.checkpoint.metric == "auto":
        config.checkpoint.metric = f"val/{find_task(config.train.task, Task).headline}"


def _phase_problems(config: Config, task: type[Task[Any]]) -> Iterator[str]:
    """Yield an error message for each key that works with one network or one phase only."""
    name, phases = config.train.task, ", ".join(task.phases)
    # Networks that no phase trains and that are no average are known only when they are built.
    networks = {*task.averages, *(one for trained in task.phases.values() for one in trained)}
    if config.parallel.strategy == "dp" and networks != {"model"}:
        yield (
            f"parallel=dp: DataParallel spreads one network, but train.task={name} has more; use "
            "parallel=ddp"
        )
    if len(task.phases) == 1:
        return
    if config.train.precision == "fp16":
        yield (
            f"train.precision=fp16: train.task={name} has the phases {phases}, whose gradients "
            "need a scale each; use bf16"
        )
    if config.parallel.static_graph:
        yield (
            f"parallel.static_graph=true: train.task={name} has the phases {phases}, which train "
            "other parameters; leave it out"
        )


def _target_kinds(dataset: str) -> tuple[str, ...] | None:
    """Return the types of targets that a dataset provides, e.g. ("label",). Return None for a class
    of the project that does not declare them. `dataset`: value of data.name.
    """
    if (known := built_in(dataset)) is not None:
        return known.targets
    # Do not import the class for timm's datasets, because it imports timm. It has the default.
    if not is_own_class(dataset):
        return ImageDataset.targets
    own = import_class("data.name", dataset, ImageDataset)
    return None if own.targets is ImageDataset.targets else own.targets


def _evaluated(split: str, metrics: Collection[str]) -> list[str]:
    return [f"{split}/{name}{suffix}" for suffix in ("", "_ema") for name in metrics]


def objectives(metrics: Collection[str]) -> list[str]:
    """Build the list of allowed values of optimized_metric. `metrics`: names of the metrics of the
    task.
    """
    return [
        *(name for split in ("val", "test") for name in _evaluated(split, metrics)),
        *(f"val/{name}_best" for name in metrics),
        "train/loss",
        "images_per_sec",
    ]


def metric_of(task: str, measure: str) -> Metric:
    """Return the Metric that a value of optimized_metric names, e.g. val/loss_best. Raises
    ValueError if the task has none. `task`: value of train.task.
    """
    known = {"images_per_sec": Metric(), "loss": LOSS, **find_task(task, Task).metrics}
    name = metric_name(measure)
    if name not in known:
        raise ValueError(f"{measure}: not a metric of the task {task}{hint(name, known)}")
    return known[name]
