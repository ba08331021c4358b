"""What a config cannot make Hydra do. Hydra imports and calls what a config names; here only the known may be named."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, MutableSequence
from pathlib import PurePosixPath
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

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
# What hydra.job.env_set may set. By name, because their families also hold names that load libraries (NCCL_NET_PLUGIN,
# OMP_TOOL_LIBRARIES, CUDA_INJECTION64_PATH), as LD_PRELOAD and PYTHONSTARTUP do.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "HF_HUB_OFFLINE",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
    "TZ",
)
RUN_FOLDER = "/the/run/folder"  # stands for it until it is known


def check_search_path(loader: Any, config_name: str, overrides: list[str]) -> None:
    """Refuse places where configs would be looked for by importing something. Hydra does so before it composes.

    Errors: ValueError, one line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    places: list[Any] = [override.value() for override in parsed if override.key_or_group == "hydra.searchpath"]
    main = loader.repository.load_config(config_name)
    if main is not None and OmegaConf.is_dict(main.config):
        places.append(OmegaConf.select(main.config, "hydra.searchpath"))
    for place in (str(item) for value in places if isinstance(value, MutableSequence) for item in value):
        if "://" in place and not place.startswith("file://"):
            raise ValueError(f"hydra.searchpath={place}: would import a package; give a folder, file://<path>")


def check_hydra_block(tree: DictConfig) -> None:
    """Refuse what would make Hydra import, call or overwrite something that is not on the lists above.

    `tree` is a whole composed config. Errors: ValueError, one line with the key, its value and what is allowed.
    """
    hydra = tree.hydra
    if str(OmegaConf.select(hydra, "mode")).endswith("MULTIRUN") and "hydra.mode=MULTIRUN" in hydra.overrides.hydra:
        raise ValueError("hydra.mode=MULTIRUN: a sweep is asked for with --multirun (-m)")
    for section in ("launcher", "sweeper"):
        target = OmegaConf.select(hydra, f"{section}._target_")
        if target is not None and target not in TARGETS:
            raise ValueError(f"hydra.{section}._target_={target}: not allowed; allowed: {', '.join(TARGETS)}")
    if hydra.get("callbacks"):
        raise ValueError(
            f"hydra.callbacks.{next(iter(hydra.callbacks))}: callbacks are not allowed; a config imports nothing"
        )
    _check_environment(hydra)
    subdir = PurePosixPath(str(hydra.output_subdir or "."))
    if subdir.is_absolute() or ".." in subdir.parts:
        raise ValueError(f"hydra.output_subdir={subdir}: must lie below the run folder")
    _check_logging(tree)


def _check_environment(hydra: DictConfig) -> None:
    if hydra.job.env_copy:
        raise ValueError(f"hydra.job.env_copy={list(hydra.job.env_copy)}: leave it out; ranks inherit the environment")
    for name in hydra.job.env_set:
        if name not in VARIABLES:
            raise ValueError(
                f"hydra.job.env_set.{name}: not allowed, set it in the shell; allowed: {', '.join(VARIABLES)}"
            )


def _check_logging(tree: DictConfig) -> None:
    """As they will be resolved: an interpolation may stand for anything."""
    probe = copy.deepcopy(tree)
    with read_write(probe.hydra.runtime), open_dict(probe.hydra.runtime):
        probe.hydra.runtime.output_dir = RUN_FOLDER
    for section in ("hydra_logging", "job_logging"):
        for key, value in _leaves(OmegaConf.to_container(probe.hydra[section], resolve=True), f"hydra.{section}"):
            named = re.search(r"\.(class|\(\))(\.|$)", key) is not None
            if (named and value not in LOGGERS) or (_reaches_out(value) and value not in STREAMS):
                raise ValueError(f"{key}={value}: not allowed; allowed: {', '.join(LOGGERS if named else STREAMS)}")
            if key.endswith(".filename") and not re.fullmatch(rf"{RUN_FOLDER}/[\w.-]+\.log", str(value)):
                raise ValueError(f"{key}={value}: must be ${{hydra.runtime.output_dir}}/<name>.log")


def _reaches_out(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\w+://", value) is not None


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{key}.{name}")
    else:
        yield key, node
