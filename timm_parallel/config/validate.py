"""Checks of a config: bounds and choices of single values, names that must exist, and rules about
several keys.

Each rule yields one error message per problem, with key, value and fix. The rules import torch only
if the config names a class of the project. timm_parallel/task_rules.py has the rules that need the
class of the task.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial

from timm_parallel.app import current
from timm_parallel.config import timm_rules
from timm_parallel.config.bounds import key_problems
from timm_parallel.config.cluster import cluster_rules
from timm_parallel.config.suggest import hint
from timm_parallel.errors import RefusedError
from timm_parallel.keys import STRATEGIES, TRACKERS, Config, is_own_class
from timm_parallel.machine.imports import find_class, find_name

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
    refuse(key_problems(config), _names(config), _strategy(config), _trackers(config))


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
        # Accept any name of a loss here, because `check_task` compares it with the losses of the
        # task.
        chosen["train.loss"] = config.train.loss, lambda name: iter(())
    for key, (name, problems) in chosen.items():
        yield from own_class_problems(key, name) if is_own_class(name) else problems(name)


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
