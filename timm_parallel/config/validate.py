"""Checks of a config: bounds and choices of single values, names that must exist, and rules about
several keys.

Each rule yields one error message per problem, with key, value and fix. The rules import torch only
if the config names a class of the project. timm_parallel/task_rules.py has the rules that need the
class of the task.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.app import current
from timm_parallel.config.cluster import cluster_rules
from timm_parallel.config.explain import type_text
from timm_parallel.config.suggest import hint
from timm_parallel.config.timm_names import timm_models, timm_optimizers, timm_tags
from timm_parallel.errors import RefusedError
from timm_parallel.keys import STRATEGIES, TRACKERS, Config, is_own_class, is_timm_dataset, leaves
from timm_parallel.machine.imports import find_class, find_name

# Allow only known database drivers, because SQLAlchemy imports the driver in the URL as a module.
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"
OF_TORCH = (
    *("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365"),
    *("inaturalist", "imagenet"),
)
# Regular expressions for the texts that timm.data.auto_augment can parse.
AUTO_AUGMENT = (
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Arguments of timm.create_model that would load weights from any file or URL.
LOADING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def refuse(*problems: Iterator[str]) -> None:
    """Raise RefusedError with the first message that the given rules yield, and with the error code
    of this message. Do nothing if no rule yields a message.
    """
    line = next(itertools.chain(*problems), None)
    if line is not None:
        raise RefusedError(line)


def check_values(config: Config) -> None:
    """Raise RefusedError if a config value is invalid by itself, regardless of other keys."""
    refuse(_key_problems(config), _names(config), _strategy(config), _trackers(config))


def check_combination(config: Config) -> None:
    """Raise RefusedError if keys of a config cannot work together. The rules are those for
    `cluster`, and the method `problems` of each config group.
    """
    groups = [group for group in vars(config).values() if hasattr(group, "problems")]
    refuse(cluster_rules(config), *(group.problems(config) for group in groups))


def own_class_problems(key: str, name: str) -> Iterator[str]:
    """Yield an error message if a class of the project does not exist. `key`: the config key that
    names the class. `name`: dotted name of the class.
    """
    package = current().package
    if find_class(name, package) is None:
        yield (
            f"{key}={name}: no such class; expected {package}.<module>.<Class> with <module> "
            f"a file under {package}/"
        )


def own_function_problems(key: str, name: str) -> Iterator[str]:
    """Yield an error message if a function of the project does not exist. `key`: the config key
    that names the function. `name`: dotted name of the function.
    """
    package = current().package
    if not callable(find_name(name, package)):
        yield (
            f"{key}={name}: no such function; expected {package}.<module>.<function> with "
            f"<module> a file under {package}/"
        )


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


def _key_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each config key whose value is out of bounds."""
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
        if not any(re.fullmatch(pattern, value) for pattern in AUTO_AUGMENT):
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


def _names(config: Config) -> Iterator[str]:
    """Yield an error message for each name of a model, optimizer, dataset, task or loss that
    neither the project nor timm has.
    """
    yield from _weights_problems(config.model.kwargs)
    chosen = {
        "model.name": (config.model.name, _model_problems),
        "optim.opt": (config.optim.opt, _optimizer_problems),
    }
    datasets = current().datasets
    if datasets:
        problems_of_data = partial(_dataset_problems, own=datasets)
        chosen["data.name"] = config.data.name, problems_of_data
    if current().tasks:
        chosen["train.task"] = config.train.task, _task
        # Accept any name of a loss here, because `check_task` compares it with the losses of the
        # task.
        chosen["train.loss"] = config.train.loss, lambda name: iter(())
    for key, (name, problems) in chosen.items():
        yield from own_class_problems(key, name) if is_own_class(name) else problems(name)


def _model_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no model of this name, or no weights with the tag in the
    name.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        yield f"model.name={name}: timm has no such model{hint(architecture, timm_models())}"
    tags = [known for known in timm_tags() if known.startswith(f"{architecture}.")] if tag else []
    if tags and name not in tags:
        yield f"model.name={name}: timm has no such weights{hint(name, tags)}"


def _weights_problems(kwargs: Iterable[str]) -> Iterator[str]:
    """Yield an error message for each model argument (model.kwargs) that would load weights from a
    file or URL.
    """
    for key in sorted(set(kwargs).intersection(LOADING)):
        yield f"model.kwargs.{key}: not allowed; to load timm's weights set model.pretrained=true"


def _dataset_problems(name: str, own: Iterable[str]) -> Iterator[str]:
    """Yield an error message if a dataset name belongs neither to a dataset of the project nor to
    timm's factory. `own`: the names of the project's datasets.
    """
    source, _, dataset = name.partition("/")
    if source == "torch" and dataset not in OF_TORCH:
        yield f"data.name={name}: timm has no such dataset{hint(dataset, OF_TORCH)}"
    elif not is_timm_dataset(name) and name not in own:
        yield f"data.name={name}: no such dataset{hint(name, own)}, or torch/…, hfds/…"


def _optimizer_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no optimizer of this name, or if the training step cannot
    run the optimizer.
    """
    if name not in timm_optimizers():
        yield f"optim.opt={name}: timm has no such optimizer{hint(name, timm_optimizers())}"
    if name == "adahessian":
        yield (
            "optim.opt=adahessian: requires second derivatives, which the training step does "
            "not compute; use e.g. adamw"
        )


def _task(name: str) -> Iterator[str]:
    known = current().tasks
    if name not in known:
        yield (
            f"train.task={name}: unknown task{hint(name, known)}, or give "
            f"{current().package}.tasks.<module>.<Class>"
        )


def _strategy(config: Config) -> Iterator[str]:
    name = config.parallel.strategy
    known = ("auto", *STRATEGIES)
    if is_own_class(name):
        yield from own_class_problems("parallel.strategy", name)
    elif name not in known:
        yield (
            f"parallel.strategy={name}: no such strategy{hint(name, known)}; a class of your own "
            f"is named {current().package}.<module>.<Class>"
        )


def _trackers(config: Config) -> Iterator[str]:
    for name, path in config.tracker.classes().items():
        yield from () if name in TRACKERS else own_class_problems(f"tracker.use.{name}", path)
    storage = config.search.storage
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: expected sqlite:///<file>, postgresql://… or mysql://…"
