"""Checks of a config: bounds and choices of single values, names that must exist, and rules about
several keys.

Each rule yields one error message per problem, with key, value and fix. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.class_source import class_attributes, find_class, is_own_class, package
from timm_parallel.config import timm_rules
from timm_parallel.config.cluster import cluster_rules
from timm_parallel.config.hints import hint
from timm_parallel.config.suggest import objectives, type_text
from timm_parallel.errors import RefusedError
from timm_parallel.keys import TIMM_DATASETS, TRACKERS, Config, leaves
from timm_parallel.project import current
from timm_parallel.task import Task

# Allow only known database drivers, because SQLAlchemy imports the driver in the URL as a module.
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"


def refuse(*problems: Iterator[str]) -> None:
    """Raise RefusedError with the first message that the given rules yield, and with the error code
    of this message. Do nothing if no rule yields a message.
    """
    line = next(itertools.chain(*problems), None)
    if line is not None:
        raise RefusedError(line)


def check_values(config: Config) -> None:
    """Raise RefusedError if a config value is invalid by itself, regardless of other keys."""
    groups = [group for group in vars(config).values() if hasattr(group, "value_problems")]
    refuse(
        _bounds(config),
        _names(config),
        *(group.value_problems() for group in groups),
        _strategy(config),
        _metrics(config),
        _trackers(config),
    )


def check_combination(config: Config) -> None:
    """Raise RefusedError if keys of a config cannot work together. The rules are those for
    `cluster`, the method `problems` of each config group, and the rules of the project.
    """
    groups = [group for group in vars(config).values() if hasattr(group, "problems")]
    app = current()
    rules = [group.problems(config) for group in groups]
    if app.tasks:
        rules.append(_task_problems(config))
    refuse(cluster_rules(config), *rules, app.call(app.rules, config))


def _bounds(config: Config) -> Iterator[str]:
    for key, value, entry in leaves(config):
        yield from (
            f"{key}={value}: {problem}" for problem in _out_of_bounds(value, entry.metadata)
        )


def _out_of_bounds(value: Any, bounds: Any) -> Iterator[str]:
    """Compare a value with the bounds and choices in the metadata of its config key. Yield a
    description of the allowed values, e.g. `expected >= 1`, if the value is not allowed.
    """
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            yield "expected a finite number"
    least, above, most = (bounds.get(name) for name in ("ge", "gt", "le"))
    if value is None:
        return
    if "choices" in bounds and value not in bounds["choices"]:
        yield f"allowed: {', '.join(map(str, bounds['choices']))}"
    elif bounds.get("syntax") == "auto_augment":
        if not timm_rules.is_auto_augment(value):
            yield "expected timm's syntax, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0"
    elif isinstance(value, str):
        if least is not None and value != "auto":
            yield f"expected auto or an integer >= {least}"
    elif least is not None and value < least:
        yield f"expected >= {least}"
    elif above is not None and value <= above:
        yield f"expected > {above}"
    elif most is not None and value > most:
        yield f"expected <= {most}"


def option_problems(key: str, options: type[Any], given: dict[str, Any]) -> Iterator[str]:
    """Yield an error message for each option that is unknown, has the wrong type, or is out of
    bounds.

    `key`: the config key that holds the options, e.g. train.task_kwargs. `options`: the dataclass
    that declares them. `given`: the options of the config.
    """
    declared = {entry.name: entry for entry in dataclasses.fields(options)}
    for name, value in given.items():
        if name not in declared:
            known = f"{key} has {', '.join(declared)}" if declared else f"{key} has no options"
            yield f"{key}.{name}={value}: unknown option{hint(name, declared)}; {known}"
            continue
        try:
            OmegaConf.merge(OmegaConf.structured(options), {name: value})
        except OmegaConfBaseException:
            yield f"{key}.{name}={value}: expected {type_text(declared[name])}"
            continue
        for problem in _out_of_bounds(value, declared[name].metadata):
            yield f"{key}.{name}={value}: {problem}"


def own_class_problems(key: str, name: str) -> Iterator[str]:
    """Yield an error message if a class of the project does not exist. `key`: the config key that
    names the class. `name`: dotted name of the class.
    """
    if find_class(name) is None:
        yield (
            f"{key}={name}: no such class; expected {package()}.<module>.<Class> with <module> "
            f"a file under {package()}/"
        )


def _names(config: Config) -> Iterator[str]:
    """Yield an error message for each name of a model, optimizer, dataset, task or loss that
    neither the project nor timm has.
    """
    yield from timm_rules.weights_problems(config.model.kwargs)
    chosen = {
        "model.name": (config.model.name, timm_rules.model_problems),
        "optim.opt": (config.optim.opt, timm_rules.optimizer_problems),
    }
    datasets = current().datasets
    if datasets:
        problems_of_data = partial(timm_rules.dataset_problems, own=datasets)
        chosen["data.name"] = config.data.name, problems_of_data
    if current().tasks:
        chosen["train.task"] = config.train.task, _task
        # Accept any name of a loss here, because `_task_problems` compares it with the losses of
        # the task.
        chosen["train.loss"] = config.train.loss, lambda name: iter(())
    for key, (name, problems) in chosen.items():
        # A task class must be below src/tasks/, because the metrics of a project are collected
        # there.
        is_own = is_own_class(name, "tasks" if key == "train.task" else "")
        yield from own_class_problems(key, name) if is_own else problems(name)
    # Import the task now. An error in its file would else become that of an unknown metric.
    if current().tasks:
        Task.find(config.train.task)


def _task(name: str) -> Iterator[str]:
    known = current().tasks
    if name not in known:
        yield (
            f"train.task={name}: unknown task{hint(name, known)}, or give "
            f"{package()}.tasks.<module>.<Class>"
        )


def _strategy(config: Config) -> Iterator[str]:
    name = config.parallel.strategy
    known = ("auto", *current().strategies)
    if name not in known and not (is_own_class(name, "parallel") and find_class(name)):
        yield (
            f"parallel.strategy={name}: no such strategy{hint(name, known)}; a class of your own "
            f"is named {package()}.parallel.<module>.<Class>"
        )


def _metrics(config: Config) -> Iterator[str]:
    known = [f"val/{name}{suffix}" for suffix in ("", "_ema") for name in current().metrics]
    for key, name, allowed in (
        ("checkpoint.metric", config.checkpoint.metric, known),
        ("optimized_metric", config.objective, objectives()),
    ):
        if name not in allowed:
            yield f"{key}={name}: unknown metric{hint(name, allowed)}"


def _trackers(config: Config) -> Iterator[str]:
    for name, path in config.tracker.classes().items():
        yield from () if name in TRACKERS else own_class_problems(f"tracker.use.{name}", path)
    storage = config.search.storage
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: expected sqlite:///<file>, postgresql://… or mysql://…"


def _task_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each loss, metric, option or dataset of a config that does not fit
    its task.
    """
    train, name = config.train, config.train.task
    task = Task.find(name)
    yield from option_problems("train.task_kwargs", task.Options, train.task_kwargs)
    if not is_own_class(train.loss) and train.loss not in task.losses:
        known = hint(train.loss, task.losses)
        yield f"train.loss={train.loss}: not a loss of the task {name}{known}"
    for key, metric in config.metrics_read.items():
        base = metric.removeprefix("val/").removesuffix("_best").removesuffix("_ema")
        if metric.startswith("val/") and base not in task.metrics:
            known = ", ".join(f"val/{metric}" for metric in task.metrics)
            yield f"{key}={metric}: not a metric of train.task={name}; use one of {known}"
    kinds = _target_kinds(config.data.name)
    if kinds is not None and task.target not in (*kinds, "none"):
        able = [data for data in current().datasets if task.target in (_target_kinds(data) or ())]
        yield (
            f"train.task={name}: this task needs targets of type {task.target}, but "
            f"data={config.data.name} has targets of type {' or '.join(kinds)}; use "
            f"{' or '.join(f'data={name}' for name in able) or 'a dataset of your own'}"
        )


def _target_kinds(dataset: str) -> tuple[str, ...] | None:
    """Return the types of targets that a dataset provides, e.g. ("label",). Return None for a class
    of the project that does not declare them. `dataset`: value of data.name.
    """
    is_own = is_own_class(dataset)
    dotted = current().datasets.get(dataset.partition("/")[0], dataset if is_own else TIMM_DATASETS)
    kinds = class_attributes(dotted).get("targets")
    return None if is_own and kinds is None else tuple(kinds or ("label",))
