"""Validate a config: bounds and choices of the schema, names that must exist, and the rules of its
groups.

A rule yields an error message per problem: key, value and fix. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.class_source import is_own_class, package
from timm_parallel.config.cluster import cluster_rules
from timm_parallel.config.suggest import hint, objectives, own_class_exists, type_text
from timm_parallel.errors import RefusedError
from timm_parallel.keys import TRACKERS, Config, leaves
from timm_parallel.project import current

# SQLAlchemy imports the driver as a module, so only known ones are allowed.
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"


def refuse(*problems: Iterator[str]) -> None:
    """Raise RefusedError with the first message that the rules yield, and its code, if any."""
    line = next(itertools.chain(*problems), None)
    if line is not None:
        raise RefusedError(line)


def check_values(config: Config) -> None:
    """Refuse a value that is invalid on its own, whatever the other keys are."""
    groups = [group for group in vars(config).values() if hasattr(group, "value_problems")]
    refuse(
        _bounds(config),
        *(group.value_problems() for group in groups),
        _strategy(config),
        _metrics(config),
        _trackers(config),
    )


def check_combination(config: Config) -> None:
    """Refuse keys that cannot work together, by the rules of `cluster`, by the method `problems` of
    each group, and by those of the project.
    """
    groups = [group for group in vars(config).values() if hasattr(group, "problems")]
    app = current()
    rules = app.call(app.rules, config)
    refuse(cluster_rules(config), *(group.problems(config) for group in groups), rules)


def _bounds(config: Config) -> Iterator[str]:
    for key, value, entry in leaves(config):
        yield from (
            f"{key}={value}: {problem}" for problem in _out_of_bounds(value, entry.metadata)
        )


def _out_of_bounds(value: Any, bounds: Any) -> Iterator[str]:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            yield "expected a finite number"
    least, above, most = (bounds.get(name) for name in ("ge", "gt", "le"))
    if value is None:
        return
    if "choices" in bounds and value not in bounds["choices"]:
        yield f"allowed: {', '.join(map(str, bounds['choices']))}"
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
    """Yield an error message for each value that a dataclass of options does not declare, or that
    has another type or is out of bounds.
    """
    declared = {entry.name: entry for entry in dataclasses.fields(options)}
    for name, value in given.items():
        if name not in declared:
            known = f"it has {', '.join(declared)}" if declared else "it has no options"
            yield f"{key}.{name}={value}: unknown{hint(name, declared)}; {known}"
            continue
        try:
            OmegaConf.merge(OmegaConf.structured(options), {name: value})
        except OmegaConfBaseException:
            yield f"{key}.{name}={value}: expected {type_text(declared[name])}"
            continue
        for problem in _out_of_bounds(value, declared[name].metadata):
            yield f"{key}.{name}={value}: {problem}"


def own_class_problems(key: str, name: str) -> Iterator[str]:
    """Yield an error message if a class of the project does not exist."""
    if not own_class_exists(name):
        yield (
            f"{key}={name}: no such class; expected {package()}.<module>.<Class> with <module> "
            f"a file under {package()}/"
        )


def _strategy(config: Config) -> Iterator[str]:
    name = config.parallel.strategy
    known = ("auto", *current().strategies)
    if name not in known and not (is_own_class(name, "parallel") and own_class_exists(name)):
        yield (
            f"parallel.strategy={name}: no such strategy{hint(name, known)}, or give "
            f"{package()}.parallel.<module>.<Class>"
        )


def _metrics(config: Config) -> Iterator[str]:
    known = [f"val/{name}{suffix}" for suffix in ("", "_ema") for name in current().metrics]
    for key, name, allowed in (
        ("checkpoint.metric", config.checkpoint.metric, known),
        ("optimized_metric", config.objective, objectives()),
    ):
        if name not in allowed:
            yield f"{key}={name}: unknown{hint(name, allowed)}"


def _trackers(config: Config) -> Iterator[str]:
    for name, path in config.tracker.classes().items():
        yield from () if name in TRACKERS else own_class_problems(f"tracker.use.{name}", path)
    storage = config.search.storage
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: expected sqlite:///<file>, postgresql://… or mysql://…"
