"""Rules for single values of a config: bounds and choices of the schema, and names that must exist elsewhere.

A rule yields a line for each thing that is wrong: key, value and remedy. No torch here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from src.engine.config import names
from src.engine.config.names import hint
from src.schema import Config, is_own_class, is_timm_dataset, leaves

DATASETS = ("digits", "folder", "synthetic")
OF_TORCH = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365", "inaturalist", "imagenet")
AUTO_AUGMENT = (  # the strings that timm.data.auto_augment reads
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Keyword arguments with which timm would fetch or load weights from wherever they say.
FETCHING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"  # a driver is a module
STRATEGIES = ("auto", "single", "dp", "ddp")


def refuse(*problems: Iterator[str]) -> None:
    """Raise ValueError with the first line that any of them has."""
    for line in itertools.chain(*problems):
        raise ValueError(line)


def check_values(config: Config) -> None:
    """Refuse a value that can never be right, whatever the other keys say."""
    refuse(*(rule(config) for rule in (_bounds, _model, _strategy, _data, _training)))


def _bounds(config: Config) -> Iterator[str]:
    if config.optim.sched == "plateau":
        yield "optim.sched=plateau: follows a metric, so it cannot be resumed at a step; use cosine or wsd"
    for key, value, entry in leaves(config):
        yield from (f"{key}={value}: {problem}" for problem in _out_of_bounds(value, entry.metadata))


def _out_of_bounds(value: Any, bounds: Any) -> Iterator[str]:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            yield "must be finite"
    least, above, most = (bounds.get(name) for name in ("least", "above", "most"))
    if value is None:
        return
    if "choices" in bounds and value not in bounds["choices"]:
        yield f"allowed: {', '.join(map(str, bounds['choices']))}"
    elif isinstance(value, str):  # a number, or auto
        if least is not None and value != "auto":
            yield f"give auto or a whole number from {least}"
    elif least is not None and value < least:
        yield f"must be at least {least}"
    elif above is not None and value <= above:
        yield f"must be above {above}"
    elif most is not None and value > most:
        yield f"must be at most {most}"


def _model(config: Config) -> Iterator[str]:
    name = config.model.name
    if is_own_class(name):
        yield from _own_class("model.name", name)
        return
    architecture, _, tag = name.partition(".")
    if architecture not in names.timm_models():
        yield f"model.name={name}: timm has no such model{hint(architecture, names.timm_models())}"
    tags = sorted(known for known in names.timm_tags() if known.startswith(f"{architecture}.")) if tag else []
    if tags and name not in tags:
        yield f"model.name={name}: timm has no such weights{hint(name, tags) or f'; e.g. {tags[0]}'}"
    for key in sorted(set(config.model.kwargs).intersection(FETCHING)):
        yield f"model.kwargs.{key}: not allowed; weights come from timm: model.pretrained=true"


def _own_class(key: str, name: str) -> Iterator[str]:
    if not names.own_class_exists(name):
        yield f"{key}={name}: no such class; give src.<module>.<Class>, <module> a file under src/{names.own_class_hint(name)}"


def _strategy(config: Config) -> Iterator[str]:
    name = config.parallel.strategy
    if name not in STRATEGIES and not (name.startswith("src.parallel.") and names.own_class_exists(name)):
        yield f"parallel.strategy={name}: no such strategy{hint(name, STRATEGIES)}, or give src.parallel.<module>.<Class>"


def _data(config: Config) -> Iterator[str]:
    name, aa = config.data.name, config.data.augment.aa
    kind, _, rest = name.partition("/")
    if is_own_class(name):
        yield from _own_class("data.name", name)
    elif kind in ("tfds", "hfids"):
        yield f"data.name={name}: a stream, whose images have no numbers to shard and resume by; use hfds/… or wds"
    elif kind == "torch" and rest not in OF_TORCH:
        yield f"data.name={name}: timm has no such dataset{hint(rest, OF_TORCH)}"
    elif not (is_timm_dataset(name) or name in DATASETS):
        yield f"data.name={name}: no such data{hint(name, (*DATASETS, 'tar', 'wds'))}, or torch/…, hfds/…"
    if aa is not None and not any(re.fullmatch(pattern, aa) for pattern in AUTO_AUGMENT):
        yield f"data.augment.aa={aa}: give timm's words, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0"


def _training(config: Config) -> Iterator[str]:
    opt, storage = config.optim.opt, config.search.storage
    of_val = [f"val/{name}{of}" for of in ("", "_ema") for name in names.metrics()[0]]
    for key, name, known, what in (
        ("optim.opt", opt, names.timm_optimizers(), "optimizer of timm's"),
        ("train.loss", config.train.loss, names.losses(), "loss"),
        ("optimized_metric", config.optimized_metric, names.objectives(), "metric"),
        ("checkpoint.metric", config.checkpoint.metric, of_val, "metric"),
    ):
        if name not in known:
            yield f"{key}={name}: no such {what}{hint(name, known)}"
    if opt == "adahessian":
        yield "optim.opt=adahessian: needs second derivatives of the loss, which training here does not take"
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: give sqlite:///<file>, postgresql://… or mysql://…"
