"""What a config can make Hydra call. Hydra imports and calls whatever a config names; here only the known may be named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

TARGETS = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
)
# What logging.config may build: `class` and `()` name anything importable, `ext://` any object of any module.
LOGGERS = (
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.handlers.RotatingFileHandler",
    "logging.handlers.TimedRotatingFileHandler",
    "logging.Formatter",
    "colorlog.ColoredFormatter",
)
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")


def check_hydra_block(tree: DictConfig) -> None:
    """Refuse what would make Hydra import or call something that is not on the lists above.

    Errors: ValueError, one line with the key, its value and what is allowed.
    """
    if str(OmegaConf.select(tree, "mode")).endswith("MULTIRUN") and "hydra.mode=MULTIRUN" in tree.overrides.hydra:
        raise ValueError("hydra.mode=MULTIRUN: a sweep is asked for with --multirun (-m)")
    for section in ("launcher", "sweeper"):
        target = OmegaConf.select(tree, f"{section}._target_")
        if target is not None and target not in TARGETS:
            raise ValueError(f"hydra.{section}._target_={target}: not allowed; allowed: {', '.join(TARGETS)}")
    if tree.get("callbacks"):
        raise ValueError(
            f"hydra.callbacks.{next(iter(tree.callbacks))}: callbacks are not allowed; a config imports nothing"
        )
    for section in ("hydra_logging", "job_logging"):
        for key, value in _leaves(OmegaConf.to_container(tree[section]), f"hydra.{section}"):
            named = key.endswith((".class", ".()"))
            if (named and value not in LOGGERS) or (_reaches_out(value) and value not in STREAMS):
                raise ValueError(f"{key}={value}: not allowed; allowed: {', '.join(LOGGERS if named else STREAMS)}")


def _reaches_out(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("ext://")


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{key}.{name}")
    else:
        yield key, node
