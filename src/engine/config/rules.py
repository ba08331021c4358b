"""Rules for single values of a config: the bounds and words of the schema, and names that must exist elsewhere.

Each refusal is one line that names the key, the value and the remedy. No torch here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from src.engine.config.names import (
    hint,
    losses,
    metrics,
    objectives,
    own_class_exists,
    own_class_hint,
    timm_models,
    timm_optimizers,
    timm_tags,
)
from src.schema import Config, is_own_class, is_timm_dataset, leaves

DATASETS = ("digits", "folder", "synthetic")
TORCHVISION = (
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
AUTO_AUGMENT = (  # the strings that timm.data.auto_augment reads
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Keyword arguments with which timm would fetch or load weights from wherever they say.
FETCHING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"  # a driver is a module
STRATEGIES = ("auto", "single", "dp", "ddp")


def check_values(config: Config) -> None:
    """Refuse a value that can never be right, whatever the other keys say.

    Errors: ValueError, one line with key, value and remedy.
    """
    for key, value, entry in leaves(config):
        _check_leaf(key, value, entry.metadata)
    _numbers_or_auto(config)
    _print_config(config)
    _known_names(config)
    _augment(config)


def _check_leaf(key: str, value: Any, bounds: Any) -> None:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{key}={value}: must be finite")
    if value is None:
        return
    if key == "optim.sched" and value == "plateau":
        raise ValueError(
            "optim.sched=plateau: follows a metric instead of the step, cannot be gone on with, and timm is removing it; "
            "use cosine or wsd"
        )
    choices = bounds.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{key}={value}: allowed: {', '.join(choices)}")
    if bounds.get("least") is not None and value < bounds["least"]:
        raise ValueError(f"{key}={value}: must be at least {bounds['least']}")
    if bounds.get("above") is not None and value <= bounds["above"]:
        raise ValueError(f"{key}={value}: must be above {bounds['above']}")
    if bounds.get("most") is not None and value > bounds["most"]:
        raise ValueError(f"{key}={value}: must be at most {bounds['most']}")


def _numbers_or_auto(config: Config) -> None:
    for key, value, least in (
        ("parallel.devices", config.parallel.devices, 1),
        ("parallel.threads_per_device", config.parallel.threads_per_device, 1),
        ("data.workers", config.data.workers, 0),
        ("sweep.jobs", config.sweep.jobs, 1),
        ("search.n_jobs", config.search.n_jobs, 1),
        ("sweep.repeats", config.sweep.repeats, 1),
    ):
        if value != "auto" and (isinstance(value, str) or value < least):
            raise ValueError(f"{key}={value}: give auto or a whole number from {least}")


def _print_config(config: Config) -> None:
    if isinstance(config.print_config, str) and config.print_config != "full":
        raise ValueError(f"print_config={config.print_config}: give true, false or full")


def _known_names(config: Config) -> None:
    model, opt, data = config.model.name, config.optim.opt, config.data.name
    for key, name in (("model.name", model), ("data.name", data)):
        if is_own_class(name) and not own_class_exists(name):
            raise ValueError(
                f"{key}={name}: no such class; give src.<module>.<Class>, <module> a file under src/{own_class_hint(name)}"
            )
    strategy = config.parallel.strategy
    if strategy not in STRATEGIES and not (strategy.startswith("src.parallel.") and own_class_exists(strategy)):
        raise ValueError(
            f"parallel.strategy={strategy}: no such strategy{hint(strategy, STRATEGIES)}; give {', '.join(STRATEGIES)}, "
            "or src.parallel.<module>.<Class> of your own"
        )
    if not is_own_class(model):
        _check_timm_model(model)
        for key in sorted(set(config.model.kwargs).intersection(FETCHING)):
            raise ValueError(f"model.kwargs.{key}: not allowed; weights come from timm: model.pretrained=true")
    if config.search.storage is not None and not re.fullmatch(DATABASE, config.search.storage, re.DOTALL):
        raise ValueError("search.storage: give sqlite:///<file>, postgresql://… or mysql://…")
    if opt not in timm_optimizers():
        raise ValueError(f"optim.opt={opt}: timm has no such optimizer{hint(opt, timm_optimizers())}")
    if opt == "adahessian":
        raise ValueError(
            "optim.opt=adahessian: needs second derivatives of the loss, which training here does not take"
        )
    if config.train.loss not in losses():
        raise ValueError(f"train.loss={config.train.loss}: no such loss{hint(config.train.loss, losses())}")
    _check_dataset(data)
    for key, metric in (("optimized_metric", config.optimized_metric), ("checkpoint.metric", config.checkpoint.metric)):
        known = (
            objectives()
            if key == "optimized_metric"
            else [f"val/{name}{of}" for of in ("", "_ema") for name in metrics()[0]]
        )
        if metric not in known:
            raise ValueError(f"{key}={metric}: no such metric{hint(metric, known)}; allowed: {', '.join(known)}")


def _check_timm_model(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        raise ValueError(f"model.name={name}: timm has no such model{hint(architecture, timm_models())}")
    tags = sorted(known for known in timm_tags() if known.startswith(f"{architecture}."))
    if tag and tags and name not in tags:
        raise ValueError(f"model.name={name}: timm has no such weights{hint(name, tags) or f'; e.g. {tags[0]}'}")


def _check_dataset(name: str) -> None:
    kind, _, rest = name.partition("/")
    if kind in ("tfds", "hfids"):
        raise ValueError(
            f"data.name={name}: a stream, whose images have no numbers to shard and resume by; use hfds/… or wds"
        )
    if kind == "torch" and rest not in TORCHVISION:
        raise ValueError(f"data.name={name}: timm has no such dataset{hint(rest, TORCHVISION)}")
    if not (is_own_class(name) or is_timm_dataset(name) or name in DATASETS):
        raise ValueError(f"data.name={name}: no such data{hint(name, (*DATASETS, 'tar', 'wds'))}, or torch/…, hfds/…")


def _augment(config: Config) -> None:
    """timm only asserts that it can read these words, in the first batch."""
    aa = config.data.augment.aa
    if aa is not None and not any(re.fullmatch(pattern, aa) for pattern in AUTO_AUGMENT):
        raise ValueError(f"data.augment.aa={aa}: give timm's words, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0")
