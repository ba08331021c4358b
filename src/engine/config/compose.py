"""The one door between Hydra and the rest: command line -> checked, typed Config -> frozen config.yaml.

`hydra.main` composes late, prints refusals over many lines, accepts `+sed=1`, and has made a folder by then. So the
command line is composed and checked here first, and a refusal is one line with exit code 2. No torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from src.engine.config.cluster import check_code
from src.engine.config.combinations import check_combination
from src.engine.config.confidential import check_literals, check_overrides
from src.engine.config.fences import check_hydra_block, check_search_path
from src.engine.config.names import ROOT, explain, hint, is_known, key_hint
from src.engine.config.resolve import count_that_divides
from src.engine.config.rules import check_values
from src.engine.machine import hardware
from src.engine.machine.secrets import hide_in
from src.schema import Config, ResolvedConfig, as_resolved

CONF = ROOT / "conf"
VERSION_BASE = "1.3"


@dataclass
class Command:
    """What a command line composes to."""

    config: Config
    tree: DictConfig  # as composed, with `hydra`
    run_dir: Path
    loader: Any  # Hydra's


def compose_command(arguments: Any) -> Command:
    """Compose and check the command line that Hydra's own parser read."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode

    check_overrides(arguments.overrides)
    try:
        hydra = _hydra(arguments)
        name = arguments.config_name or "train"
        overrides = OverridesParser.create(hydra.config_loader).parse_overrides(arguments.overrides)
        check_search_path(hydra.config_loader, name, overrides)
        _check_override_keys(hydra.config_loader, overrides)
        mode = RunMode.MULTIRUN if arguments.multirun else RunMode.RUN
        try:
            tree = hydra.compose_config(config_name=name, overrides=arguments.overrides, run_mode=mode)
        except KeyError as error:  # Hydra looks it up while it composes
            raise ValueError(f"hydra.job.env_copy={error}: not set; ranks inherit the environment") from None
        except (AttributeError, AssertionError) as error:  # of a key below a block that is null
            if getattr(error, "obj", None) is not None:
                raise
            params = (word.input_line for word in overrides if word.key_or_group.startswith("hydra.sweeper.params"))
            given = next(params, "hydra=null")
            raise ValueError(f"{given}: no such block of Hydra's here; leave it out (sweep with -m key=a,b)") from None
        HydraConfig.instance().set_config(tree)
        config = to_config(tree)
        check_code(config, arguments.overrides, CONF / "local" / "default.yaml")
        if not arguments.multirun:
            if tree.hydra.sweeper.get("params"):
                experiment = tree.hydra.runtime.choices.get("experiment")
                raise ValueError(f"experiment={experiment}: is a sweep (it has hydra.sweeper.params): add -m")
            if config.search.sampler is not None:
                raise ValueError(f"search.sampler={config.search.sampler}: a search is a sweep: add -m")
            check_combination(config)
        return Command(config, tree, Path(str(OmegaConf.select(tree, "hydra.run.dir"))), hydra.config_loader)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:  # OSError: a file that cannot be read
        raise ValueError(explain(error, arguments.overrides)) from error
    finally:
        GlobalHydra.instance().clear()


def run_in_hydra(command: Command, folder: Path, job: Callable[[], int]) -> int:
    """Run `job` as Hydra runs one: `.hydra/` written into `folder`, `hydra.job.*` honoured. Returns its exit code."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import run_job
    from hydra.types import HydraContext

    with read_write(command.tree.hydra):
        command.tree.hydra.run.dir = str(folder)
    outcome = run_job(
        task_function=lambda tree: job(),
        config=command.tree,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
        hydra_context=HydraContext(config_loader=command.loader, callbacks=Callbacks()),
    )
    return int(outcome.return_value)  # raises what the job raised


def device_counts(_root_: Any) -> str:
    """`${device_counts:}`: 1, 2, 4 … and the most that the batch divides by (as devices=auto), for a sweep.

    On CPU at most 8. Never less than 1,2.
    """
    batch = OmegaConf.select(_root_, "data.batch_size")
    most = max(2, count_that_divides(len(hardware.visible_cuda_devices()) or min(8, hardware.cores()), batch))
    powers = {2**power for power in range(most.bit_length())}
    return ",".join(str(count) for count in sorted(powers | {most}))


def by_device(on_cpu: Any, on_gpu: Any) -> Any:
    """`${by_device:a,b}`: a where this machine has no CUDA device, b where it has one; for lengths in steps."""
    return on_gpu if hardware.visible_cuda_devices() else on_cpu


@cache
def store_schema() -> None:
    """Once a process: give Hydra our resolvers, and the schema that every primary config is composed on."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("schema", node=Config)
    # Hydra copies the whole store whenever it looks at a group: half of composing, most of --help. What it loads, it
    # copies again.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    OmegaConf.register_new_resolver("device_counts", device_counts, replace=True)
    OmegaConf.register_new_resolver("by_device", by_device, replace=True)


def to_config(tree: DictConfig) -> Config:
    """Merge a composed tree into the schema and check it."""
    task = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    try:
        check_literals(tree)
        config = OmegaConf.to_object(OmegaConf.merge(_typed(Config), task))
        if "hydra" in tree:
            from hydra.conf import HydraConf  # not for a rank, which reads a frozen config

            block: Any = OmegaConf.to_container(tree.hydra)  # plain: typed ones are not checked
            block.pop("env", None)  # a group of Hydra's that its schema forgets
            OmegaConf.merge({"hydra": _typed(HydraConf)}, {"hydra": block})
            check_hydra_block(tree)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    assert isinstance(config, Config)
    check_values(config)
    return config


@cache
def _typed(schema: type) -> DictConfig:
    """To be merged into, which copies it first. Made anew each time it was a quarter of composing."""
    return OmegaConf.structured(schema)


def freeze(config: Config, folder: Path) -> None:
    """Write `config` to `folder/config.yaml`, which `--config-path <folder> --config-name config` runs again.

    The run-folder block travels with it; without it a second run would go where Hydra puts runs by default.
    """
    from src.engine.machine.files import write_text

    hydra: Any = OmegaConf.to_container(OmegaConf.load(CONF / "hydra" / "default.yaml"))
    task: Any = OmegaConf.to_container(OmegaConf.structured(config))
    task["cluster"] |= {"setup": None, "extra": []}  # code: config/cluster.py
    logging = [{"override hydra/hydra_logging": "none"}, {"override hydra/job_logging": "none"}]
    block = {key: hydra[key] for key in ("run", "sweep", "job")}
    tree = hide_in({"defaults": ["schema", "_self_", *logging], "hydra": block, **task})  # the ranks resolve references
    header = f"# Runs again: python train.py --config-path {folder.resolve()} --config-name config\n"
    write_text(folder / "config.yaml", header + OmegaConf.to_yaml(tree))


def read_frozen(folder: Path) -> ResolvedConfig:
    """The config that `freeze` wrote."""
    try:
        tree: Any = OmegaConf.load(folder / "config.yaml")
        task = OmegaConf.masked_copy(tree, [key for key in tree if key not in ("hydra", "defaults")])
    except (OSError, ValueError, YAMLError):  # ValueError: a list, or no text
        raise ValueError(f"{folder}: no config.yaml of a run here that can be read") from None
    return as_resolved(to_config(task))


def _hydra(arguments: Any) -> Any:
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path

    store_schema()
    for option, folder in (("config-path", arguments.config_path), ("config-dir", arguments.config_dir)):
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"--{option}={folder}: no such folder")
    main = os.path.abspath(arguments.config_path or CONF)
    search = create_automatic_config_search_path(calling_file=None, calling_module=None, config_path=main)
    if arguments.config_dir is not None:
        search.prepend("command-line", f"file://{os.path.abspath(arguments.config_dir)}")
    return Hydra.create_main_hydra2(task_name="train", config_search_path=search)


def _check_override_keys(loader: Any, overrides: list[Any]) -> None:
    """Refuse unknown keys and group options before Hydra does, with the nearest name."""
    groups = {group for group in loader.list_groups("") if loader.get_group_options(group) and group != "hydra"}
    for override in overrides:
        key = override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            continue
        if key in groups:
            options = loader.get_group_options(key)
            swept = override.is_sweep_override()
            for choice in override.sweep_string_iterator() if swept else [override.value()]:
                if choice in (None, "null") and not override.is_delete():
                    raise ValueError(f"{key}=null: give one of {', '.join(options)}, or leave the group out: ~{key}")
                if isinstance(choice, str) and choice.strip("'\"") not in options:
                    raise ValueError(f"{key}={choice}: no such option{hint(choice, options)}")
        elif not is_known(key):
            raise ValueError(f"{override.input_line}: unknown key {key}{key_hint(key, groups)}")
