"""Rules about config keys that need the class of the task, with its losses, metrics, options and
targets. The module of a task imports torch, so these rules run after all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from timm_parallel.app import current
from timm_parallel.config.suggest import hint
from timm_parallel.config.validate import option_problems, refuse
from timm_parallel.data.build import built_in
from timm_parallel.data.dataset import ImageDataset
from timm_parallel.keys import Config, is_own_class
from timm_parallel.machine.imports import import_class, import_name
from timm_parallel.metric import LOSS, Metric, metric_name
from timm_parallel.task import Task


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
    task = Task.find(name)
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
        config.checkpoint.metric = f"val/{Task.find(config.train.task).headline}"


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
    known = {"images_per_sec": Metric(), "loss": LOSS, **Task.find(task).metrics}
    name = metric_name(measure)
    if name not in known:
        raise ValueError(f"{measure}: not a metric of the task {task}{hint(name, known)}")
    return known[name]
