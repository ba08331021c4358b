"""Which keys of Hydra's own block a config may set. The others decide what Hydra imports, calls, or writes to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.engine.config.names import plain_values

# The name of a section allows all keys in it.
SETTABLE = ("run", "sweep", "sweeper.params", "job.name", "job.chdir", "job.config", "help", "hydra_help", "verbose")
FILLED_IN = ("mode", "runtime", "overrides", "job.id", "job.num", "job.config_name", "job.override_dirname")  # by Hydra
FIXED = {
    "launcher._target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "sweeper._target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "sweeper.max_batch_size": None,
    "output_subdir": ".hydra",  # resuming reads it
}
ALLOWED = tuple(f"{key}." for key in (*SETTABLE, *FILLED_IN))
LOGGING = ("hydra_logging", "job_logging")  # each as one of Hydra's own files has it: hydra/job_logging=default
# What hydra.job.env_set may set, each by name: others of the same prefix load libraries (NCCL_NET_PLUGIN,
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


def check_search_path(loader: Any, config_name: str, overrides: list[Any]) -> None:
    """Refuse `hydra.searchpath`: Hydra imports the packages in it before there is a config to check.

    `overrides` are Hydra's `Override` objects. Only they and the main config can set it.
    """
    places = [override.value() for override in overrides if override.key_or_group == "hydra.searchpath"]
    main = loader.repository.load_config(config_name)
    if main is not None and OmegaConf.is_dict(main.config):
        places.append(OmegaConf.select(main.config, "hydra.searchpath"))
    for place in places:
        if place:
            raise ValueError(f"hydra.searchpath={place}: fixed; give a folder of configs with --config-dir")


def check_hydra_block(tree: DictConfig) -> None:
    """Refuse keys below `hydra` that a config may not set, where they differ from Hydra's own. `tree` is a whole config."""
    hydra = tree.hydra
    if str(hydra.mode).endswith("MULTIRUN") and "hydra.mode=MULTIRUN" in hydra.overrides.hydra:
        raise ValueError("hydra.mode=MULTIRUN: a sweep is asked for with --multirun (-m)")
    block: Any = OmegaConf.to_container(hydra)
    for section in LOGGING:
        _check_logging(section, block.pop(section), str(hydra.runtime.choices.get(f"hydra/{section}")))
    for key, value in sorted(plain_values(block), key=str):  # env_copy first: Hydra copies into env_set
        name = key.removeprefix("job.env_set.")
        if name != key and name not in VARIABLES:
            raise ValueError(f"hydra.{key}: set it in the shell; a config can set {', '.join(VARIABLES)}")
        if name == key and not f"{key}.".startswith(ALLOWED) and (key not in FIXED or FIXED[key] != value):
            raise ValueError(f"hydra.{key}={value}: fixed; below hydra a config can set {', '.join(SETTABLE)}")
    verbose = block["verbose"]
    loggers = verbose if isinstance(verbose, list) else [verbose]
    is_names = all(isinstance(name, str) for name in loggers)
    if not isinstance(verbose, bool) and not is_names:  # Hydra would only assert it
        raise ValueError(f"hydra.verbose={verbose}: give true, false or names of loggers")
    if not re.fullmatch(r"[\w.-]+", str(hydra.job.name)):  # of a log file in the run folder
        raise ValueError(f"hydra.job.name={hydra.job.name}: give letters, digits, dots and dashes")


def _check_logging(section: str, given: Any, choice: str) -> None:
    import hydra.conf

    files = {path.stem: path for path in (Path(hydra.conf.__file__).parent / "hydra" / section).glob("*.yaml")}
    if choice not in files or given != OmegaConf.to_container(OmegaConf.load(files[choice])):
        raise ValueError(f"hydra.{section}: fixed; choose hydra/{section}={'|'.join(sorted(files))}")
