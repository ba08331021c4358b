"""Rules that a config must keep before anything starts: bounds and words from the schema, then rules across groups.

Each refusal is one line that names the key, the value and the remedy. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from src.config.names import hint, is_own_class, own_class_exists, timm_models, timm_optimizers, timm_tags
from src.config.schema import Config

DATASETS = ("digits", "folder", "synthetic")
DP_ONLY = ("dim", "loss_in_replica")
DDP_ONLY = (
    "bucket_cap_mb",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
AUTO_AUGMENT = (  # the strings that timm.data.auto_augment reads
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Keyword arguments with which timm would fetch or load weights from wherever they say.
FETCHING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"  # a driver is a module
OBJECTIVES = (
    "val/acc",
    "val/acc_best",
    "val/acc5",
    "val/loss",
    "train/loss",
    "test/acc",
    "test/loss",
    "images_per_sec",
)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, field) of every leaf of a config dataclass."""
    for entry in dataclasses.fields(tree):
        value, key = getattr(tree, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, entry


def check_values(config: Config) -> None:
    """Refuse a value that can never be right, whatever the other keys say.

    Errors: ValueError, one line with key, value and remedy.
    """
    for key, value, entry in leaves(config):
        _check_leaf(key, value, entry.metadata)
    _numbers_or_auto(config)
    _known_names(config)
    _augment(config)


def check_combination(config: Config) -> None:
    """Refuse keys that do not go together; in a sweep such a point is skipped. Errors as `check_values`."""
    for rule in (_batch, _strategy, _time):
        rule(config)


def _check_leaf(key: str, value: Any, bounds: Any) -> None:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{key}={value}: must be finite")
    if value is None:
        return
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
    ):
        if value != "auto" and (isinstance(value, str) or value < least):
            raise ValueError(f"{key}={value}: give auto or a whole number from {least}")


def _known_names(config: Config) -> None:
    model, opt, data = config.model.name, config.optim.opt, config.data.name
    for key, name in (("model.name", model), ("data.name", data)):
        if is_own_class(name) and not own_class_exists(name):
            raise ValueError(f"{key}={name}: no such class; give src.<module>.<Class>, <module> a file under src/")
    if not is_own_class(model):
        _check_timm_model(model)
        for key in sorted(set(config.model.kwargs).intersection(FETCHING)):
            raise ValueError(f"model.kwargs.{key}: not allowed; weights come from timm: model.pretrained=true")
    if config.search.storage is not None and not re.fullmatch(DATABASE, config.search.storage, re.DOTALL):
        raise ValueError("search.storage: give sqlite:///<file>, postgresql://… or mysql://…")
    if opt not in timm_optimizers():
        raise ValueError(f"optim.opt={opt}: timm has no such optimizer{hint(opt, timm_optimizers())}")
    if not is_own_class(data) and data not in DATASETS:
        raise ValueError(f"data.name={data}: no such data{hint(data, DATASETS)}")
    if config.optimized_metric not in OBJECTIVES:
        raise ValueError(f"optimized_metric={config.optimized_metric}: allowed: {', '.join(OBJECTIVES)}")


def _check_timm_model(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        raise ValueError(f"model.name={name}: timm has no such model{hint(architecture, timm_models())}")
    tags = sorted(known for known in timm_tags() if known.startswith(f"{architecture}."))
    if tag and tags and name not in tags:
        raise ValueError(f"model.name={name}: timm has no such weights{hint(name, tags) or f'; e.g. {tags[0]}'}")


def _augment(config: Config) -> None:
    """timm only asserts that it can read these words, in the first batch."""
    aa = config.data.augment.aa
    if aa is not None and not any(re.fullmatch(pattern, aa) for pattern in AUTO_AUGMENT):
        raise ValueError(f"data.augment.aa={aa}: give timm's words, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0")


def _batch(config: Config) -> None:
    data, augment = config.data, config.data.augment
    if data.batch_size is not None and data.batch_size_per_device is not None:
        raise ValueError(
            f"data.batch_size={data.batch_size} and data.batch_size_per_device={data.batch_size_per_device}: "
            "set one of them (the other to null)"
        )
    for key, pair in (("scale", augment.scale), ("ratio", augment.ratio)):
        if pair is not None and (len(pair) != 2 or not 0 < pair[0] <= pair[1]):
            raise ValueError(f"data.augment.{key}={pair}: give two numbers, [smallest, largest], above 0")
    if augment.ratio is not None and augment.scale is None:
        raise ValueError(f"data.augment.ratio={augment.ratio}: has no effect without data.augment.scale")


def _strategy(config: Config) -> None:
    parallel, model, strategy = config.parallel, config.model, config.parallel.strategy
    if strategy == "single" and parallel.devices not in ("auto", 1):
        raise ValueError(
            f"parallel.devices={parallel.devices}: single uses one device; choose parallel=ddp or parallel=dp"
        )
    for owner, keys in (("dp", DP_ONLY), ("ddp", DDP_ONLY)):
        for key in keys:
            if getattr(parallel, key) is not None and strategy != owner:
                raise ValueError(
                    f"parallel.{key}={getattr(parallel, key)}: an option of {owner}, but parallel={strategy}"
                )
    for key in ("device_ids", "output_device"):
        if getattr(parallel, key) is not None and strategy not in ("dp", "ddp"):
            raise ValueError(
                f"parallel.{key}={getattr(parallel, key)}: an option of dp and ddp, but parallel={strategy}"
            )
    if parallel.max_restarts and strategy != "ddp":
        raise ValueError(f"parallel.max_restarts={parallel.max_restarts}: an option of ddp, but parallel={strategy}")
    if model.compile and strategy == "dp":
        raise ValueError(
            "model.compile=true: torch.compile does not work inside DataParallel replicas; use ddp or single"
        )
    if model.sync_bn and strategy != "ddp":
        raise ValueError(f"model.sync_bn=true: synchronises the ranks of ddp, but parallel={strategy}")


def _time(config: Config) -> None:
    optim, train = config.optim, config.train
    if optim.warmup_epochs + optim.cooldown_epochs >= train.epochs and optim.sched not in ("none", "constant"):
        raise ValueError(
            f"optim.warmup_epochs={optim.warmup_epochs}: warm-up and cool-down must be shorter than "
            f"train.epochs={train.epochs}"
        )
    if train.early_stop is not None and train.evaluate_every == 0:
        raise ValueError(f"train.early_stop={train.early_stop}: needs evaluations; set train.evaluate_every above 0")
    if optim.sched == "multistep" and not optim.decay_milestones:
        raise ValueError("optim.sched=multistep: set optim.decay_milestones, e.g. [30,60,90] (epochs)")
