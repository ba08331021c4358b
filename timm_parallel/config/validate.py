"""Validate a config: bounds and choices of the schema, names that must exist, and the rules of its
groups.

A rule yields an error message per problem: key, value and fix. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from src.schema import DATASETS, STRATEGIES, Config, is_timm_dataset, known_metrics, loss_tasks
from timm_parallel.config.cluster import cluster_rules
from timm_parallel.config.suggest import (
    hint,
    objectives,
    own_class_exists,
    timm_models,
    timm_optimizers,
    timm_tags,
)
from timm_parallel.errors import RefusedError
from timm_parallel.keys import TRACKERS, is_own_class, leaves

OF_TORCH = (
    "cifar10",
    "cifar100",
    "mnist",
    "kmnist",
    "fashion_mnist",
    "qmnist",
    "places365",
    "inaturalist",
    "imagenet",
)
# The texts that timm.data.auto_augment parses.
AUTO_AUGMENT = (
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Keyword arguments of timm that load weights from any file or URL.
LOADING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
# SQLAlchemy imports the driver as a module, so only known ones are allowed.
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"


def refuse(*problems: Iterator[str]) -> None:
    """Raise RefusedError with the first message that the rules yield, and its code, if any."""
    line = next(itertools.chain(*problems), None)
    if line is not None:
        raise RefusedError(line)


def check_values(config: Config) -> None:
    """Refuse a value that is invalid on its own, whatever the other keys are."""
    refuse(_bounds(config), _model(config), _strategy(config), _data(config), _training(config))


def check_combination(config: Config) -> None:
    """Refuse keys that cannot work together, by the rules of `cluster` and by the method `problems`
    of each group.
    """
    groups = [group for group in vars(config).values() if hasattr(group, "problems")]
    refuse(cluster_rules(config), *(group.problems(config) for group in groups))


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


def _model(config: Config) -> Iterator[str]:
    name = config.model.name
    if is_own_class(name):
        yield from _own_class("model.name", name)
        return
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        yield f"model.name={name}: timm has no such model{hint(architecture, timm_models())}"
    tags = [known for known in timm_tags() if known.startswith(f"{architecture}.")] if tag else []
    if tags and name not in tags:
        yield f"model.name={name}: timm has no such weights{hint(name, tags)}"
    for key in sorted(set(config.model.kwargs).intersection(LOADING)):
        yield f"model.kwargs.{key}: not allowed; to load timm's weights set model.pretrained=true"


def _own_class(key: str, name: str) -> Iterator[str]:
    if not own_class_exists(name):
        yield (
            f"{key}={name}: no such class; expected src.<module>.<Class> with <module> a file "
            "under src/"
        )


def _strategy(config: Config) -> Iterator[str]:
    name = config.parallel.strategy
    known = ("auto", *STRATEGIES)
    if name not in known and not (name.startswith("src.parallel.") and own_class_exists(name)):
        yield (
            f"parallel.strategy={name}: no such strategy{hint(name, known)}, or give "
            "src.parallel.<module>.<Class>"
        )


def _data(config: Config) -> Iterator[str]:
    name, aa = config.data.name, config.data.augment.aa
    source, _, dataset = name.partition("/")
    if is_own_class(name):
        yield from _own_class("data.name", name)
    elif source == "torch" and dataset not in OF_TORCH:
        yield f"data.name={name}: timm has no such dataset{hint(dataset, OF_TORCH)}"
    elif not (is_timm_dataset(name) or name in DATASETS):
        yield (f"data.name={name}: no such dataset{hint(name, DATASETS)}, or torch/…, hfds/…")
    if aa is not None and not any(re.fullmatch(pattern, aa) for pattern in AUTO_AUGMENT):
        yield (
            f"data.augment.aa={aa}: expected timm's syntax, e.g. rand-m9-mstd0.5-inc1, "
            "augmix-m5-w4 or v0"
        )


def _training(config: Config) -> Iterator[str]:
    opt, storage = config.optim.opt, config.search.storage
    val_metrics = [f"val/{name}{suffix}" for suffix in ("", "_ema") for name in known_metrics()]
    for key, name, known in (
        ("optim.opt", opt, timm_optimizers()),
        ("train.loss", config.train.loss, loss_tasks()),
        ("checkpoint.metric", config.checkpoint.metric, val_metrics),
        ("optimized_metric", config.objective, objectives()),
    ):
        if key == "train.loss" and is_own_class(name):
            yield from _own_class(key, name)
        elif name not in known:
            yield f"{key}={name}: unknown{hint(name, known)}"
    for name, path in config.tracker.classes().items():
        yield from () if name in TRACKERS else _own_class(f"tracker.use.{name}", path)
    if opt == "adahessian":
        yield (
            "optim.opt=adahessian: requires second derivatives, which the training step does "
            "not compute; use e.g. adamw"
        )
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: expected sqlite:///<file>, postgresql://… or mysql://…"
