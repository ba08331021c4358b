"""Compose a config from the command line with Hydra, check it, and save it as config.yaml. Imports
no torch.

`hydra.main` is not used: it creates a folder before it composes, prints errors over many lines, and
accepts `+sed=1`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from timm_parallel.config.aliases import check_aliases
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.hydra_allowlist import (
    check_before_composing,
    check_hydra_block,
    check_hydra_types,
)
from timm_parallel.config.resolvers import by_device, device_counts
from timm_parallel.config.suggest import explain, is_known, key_hint, plain_values
from timm_parallel.config.validate import check_combination, check_values
from timm_parallel.keys import Config, ResolvedConfig, leaves
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import IN_URL, REFERENCE, hide_in, is_written_out
from timm_parallel.patches import check_files_first, share_config_store
from timm_parallel.project import as_resolved, current, root

SAVED = "saved_config"  # Hydra's name for the config of a resumed run


@dataclass
class Command:
    """A command line and the config that Hydra composed from it."""

    config: Config
    tree: DictConfig  # as composed, with `hydra`
    run_dir: Path
    loader: Any  # Hydra's


def compose_command(arguments: Any, saved: Any = None) -> Command:
    """Compose and check the config for a command line that Hydra's parser has parsed.

    `saved`: the config of a resumed run. Overrides, and the files of the group options they choose,
    change it.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode

    try:
        hydra = _hydra(arguments)
        check_files_first(hydra.config_loader.repository, check_aliases)
        name = _store_over(saved) if saved is not None else arguments.config_name or "train"
        overrides = OverridesParser.create(hydra.config_loader).parse_overrides(arguments.overrides)
        check_before_composing(hydra.config_loader, name, overrides)
        mode = RunMode.MULTIRUN if arguments.multirun else RunMode.RUN
        try:
            tree = hydra.compose_config(
                config_name=name, overrides=arguments.overrides, run_mode=mode
            )
        except (KeyError, AttributeError, AssertionError) as error:
            if getattr(error, "obj", None) is not None:
                raise
            # A block of Hydra's config is null, or hydra.job.env_copy names a variable that is not
            # set.
            params = (
                word.input_line
                for word in overrides
                if word.key_or_group.startswith("hydra.sweeper.params")
            )
            given = next(params, "hydra.*")
            raise ValueError(
                f"{given}: Hydra cannot use this value; leave it out (sweep with -m key=a,b)"
            ) from None
        HydraConfig.instance().set_config(tree)
        config = to_config(tree)
        if not arguments.multirun:
            if tree.hydra.sweeper.get("params"):
                experiment = tree.hydra.runtime.choices.get("experiment")
                raise ValueError(
                    f"experiment={experiment}: it is a sweep, because it sets "
                    "hydra.sweeper.params; add -m"
                )
            if config.search.sampler is not None:
                raise ValueError(f"search.sampler={config.search.sampler}: starts a search; add -m")
            check_combination(config)
        return Command(
            config, tree, Path(str(OmegaConf.select(tree, "hydra.run.dir"))), hydra.config_loader
        )
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise ValueError(explain(error, arguments.overrides)) from error
    finally:
        GlobalHydra.instance().clear()


def plain_config() -> Config:
    """Compose the config of `python train.py` without arguments; the schema's if a value such as
    data.root is required.
    """
    try:
        return compose_command(parse_command_line([])).config
    except ValueError:
        return current().config()


def run_in_hydra(command: Command, folder: Path, job: Callable[[], int]) -> int:
    """Write `.hydra/` into `folder` and run `job`, in `folder` if hydra.job.chdir is true. Return
    its exit code.
    """
    with read_write(command.tree.hydra), open_dict(command.tree.hydra.runtime):
        command.tree.hydra.run.dir = str(folder)
        command.tree.hydra.runtime.output_dir = str(folder.resolve())
    save_hydra_files(command.tree, folder)
    with contextlib.chdir(folder if command.tree.hydra.job.chdir else "."):
        return job()


def check_package(package: str | None, shown: str | None, tree: DictConfig) -> None:
    """Raise ValueError if `--package` names nothing in the part of the config that `--cfg` shows,
    for which Hydra exits with 1.
    """
    if shown is None or package in (None, "_global_"):
        return
    if package.partition(".")[0] == "hydra" and shown == "job":
        raise ValueError(
            f"--package={package}: --cfg job does not show it; write --cfg hydra --package "
            f"{package}"
        )
    if OmegaConf.select(tree, package, throw_on_missing=False) is None:
        raise ValueError(
            f"--package={package}: null, or no such "
            f"key{'' if is_known(package) else key_hint(package)}"
        )


def save_hydra_files(tree: DictConfig, folder: Path) -> None:
    """Write `.hydra/` into the run folder as Hydra does, without the values of secrets."""
    hydra = OmegaConf.masked_copy(tree, ["hydra"])
    for name, part in (
        ("config", _task_of(tree)),
        ("hydra", hydra),
        ("overrides", tree.hydra.overrides.task),
    ):
        write_text(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(part))


@cache
def store_schema() -> None:
    """Register the schema and the resolvers with Hydra, once per process."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("schema", node=current().config)
    share_config_store()
    OmegaConf.register_new_resolver("device_counts", device_counts, replace=True)
    OmegaConf.register_new_resolver("by_device", by_device, replace=True)


def to_config(tree: DictConfig, merged: DictConfig | None = None) -> Config:
    """Convert a composed tree, whose `${…}` are not resolved yet, to a typed and checked Config.

    `merged`: `merge_into_schema(tree)`, from a caller that has also checked the types of the
    `hydra` block.
    """
    for key, value in plain_values(OmegaConf.to_container(_task_of(tree))):
        # Ranks read the config from a file of the run. A secret in it would be visible there, or
        # masked for the ranks.
        if is_written_out(key, value) or IN_URL.search(REFERENCE.sub("", str(value))):
            raise ValueError(
                f"{key}: holds a secret; give it as '${{oc.env:NAME}}', so that no file holds it"
            )
    config = typed_and_checked(tree, merged)
    if "hydra" in tree:
        if merged is None:
            check_hydra_types(tree)
        check_hydra_block(tree)
    return config


def typed_and_checked(tree: DictConfig, merged: DictConfig | None = None) -> Config:
    """Convert a composed tree to a Config and check each value. `merged`: the tree merged into the
    schema, if known.
    """
    try:
        config = OmegaConf.to_object(merge_into_schema(tree) if merged is None else merged)
    except OmegaConfBaseException as error:
        # As given, because an item may be a `${…}` that cannot be resolved.
        given: Any = OmegaConf.to_container(
            OmegaConf.select(tree, "hydra.overrides.task") or OmegaConf.create([])
        )
        raise ValueError(explain(error, given)) from error
    assert isinstance(config, Config)
    check_values(config)
    return config


def merge_into_schema(tree: DictConfig) -> DictConfig:
    """Return the composed tree, without its `hydra` block, with the types and defaults of the
    schema.
    """
    merged = OmegaConf.merge(_schema(), _task_of(tree))
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _schema() -> DictConfig:
    """Return the schema as an OmegaConf tree. Cached, because building it takes a quarter of the
    time of composing.
    """
    return OmegaConf.structured(current().config)


def save_config(config: Config, folder: Path, parts: Sequence[str] = ()) -> None:
    """Write `config` to `folder/config.yaml`, with Hydra's names of run folders and the command
    that runs it again.

    `parts`: for a run that was resumed with other settings, the command line of each attempt.
    """
    hydra: Any = OmegaConf.to_container(OmegaConf.load(root() / "conf" / "hydra" / "default.yaml"))
    resolved = OmegaConf.structured(config)
    # Restore the references to secrets. If .hydra/ is on another machine, an earlier config.yaml
    # has them.
    for path in (folder / "config.yaml", folder / ".hydra" / "config.yaml"):
        for key, reference in _references_in(path, config):
            OmegaConf.update(resolved, key, reference, merge=False)
    task: Any = OmegaConf.to_container(resolved)
    logging = [{"override hydra/hydra_logging": "none"}, {"override hydra/job_logging": "none"}]
    block = {key: hydra[key] for key in ("run", "sweep", "job")}
    tree = hide_in({"defaults": ["schema", "_self_", *logging], "hydra": block, **task})
    lines = [f"Run again: python train.py --config-path {folder.resolve()} --config-name config"]
    if parts:
        lines = [
            "Run again: these commands, each up to the first step of the next. This is the last "
            "config.",
            *parts,
        ]
    header = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    write_text(folder / "config.yaml", header + OmegaConf.to_yaml(tree))


def read_saved(path: Path) -> DictConfig | ListConfig:
    """Read a config that this or an older version saved, without the settings of
    sweep.repeats=auto, which is gone.
    """
    check_aliases(path)
    tree = OmegaConf.load(path)
    sweep = tree.get("sweep") if isinstance(tree, DictConfig) else None
    if isinstance(sweep, DictConfig):
        sweep.pop("precision", None)
        sweep.pop("max_repeats", None)
        # All jobs of such a sweep are in its jobs.json.
        if sweep.get("repeats") == "auto":
            sweep.repeats = 1
    return tree


def load_config(folder: Path) -> ResolvedConfig:
    """Read the config that `save_config` wrote, and resolve references from the environment."""
    try:
        task = _task_of(read_saved(folder / "config.yaml"))
    except (OSError, ValueError, YAMLError):
        raise ValueError(
            f"{folder}: expected a run folder, but it has no readable config.yaml"
        ) from None
    return as_resolved(to_config(task))


def asks_for_accumulate(folder: Path) -> bool:
    """Return True if the command of a run set train.accumulate=auto, for which its config.yaml has
    a number.
    """
    # Searching the text is quick; parsing it takes 10 ms.
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return re.search(r"^train:\n(?:  .*\n)*?  accumulate: auto$", text, re.MULTILINE) is not None


def copy_config(source: Path, folder: Path, seed: int) -> None:
    """Write what `save_hydra_files` and `save_config` wrote to `source` to another folder, with the
    given seed.
    """
    config, hydra = load_config(source), folder / ".hydra"
    shutil.copytree(source / ".hydra", hydra, dirs_exist_ok=True)
    if seed != config.seed:
        config.seed = seed
        composed, overrides = (
            OmegaConf.load(hydra / "config.yaml"),
            OmegaConf.load(hydra / "overrides.yaml"),
        )
        assert isinstance(composed, DictConfig) and isinstance(overrides, ListConfig)
        composed.seed = seed
        overrides.append(f"seed={seed}")
        write_text(hydra / "config.yaml", OmegaConf.to_yaml(composed))
        write_text(hydra / "overrides.yaml", OmegaConf.to_yaml(overrides))
    save_config(config, folder)


def _task_of(tree: Any) -> DictConfig:
    """Return the composed config without the entries that only Hydra uses: a copy, or `tree` if it
    has none.
    """
    kept = [key for key in tree if key not in ("hydra", "defaults")]
    return tree if len(kept) == len(tree) else OmegaConf.masked_copy(tree, kept)


def _references_in(path: Path, config: Config) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, unresolved text) for each `${oc.env:…}` in a config file that still has
    the value in `config`.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if "${oc.env:" not in text:
        return
    given = _task_of(OmegaConf.create(text))
    unresolved: Any = OmegaConf.to_container(given)
    for (key, earlier, _), (_, value, _) in zip(
        leaves(to_config(given)), leaves(config), strict=True
    ):
        written = reduce(getitem, key.split("."), unresolved)
        if "${oc.env:" in str(written) and earlier == value:
            yield key, written


def _store_over(saved: Any) -> str:
    """Store `saved` as a primary config of Hydra, with the groups that an override may choose.
    Return its name.
    """
    from hydra.core.config_store import ConfigStore

    main: Any = OmegaConf.to_container(OmegaConf.load(root() / "conf" / "train.yaml"))
    groups = [next(iter(entry)) for entry in main["defaults"] if isinstance(entry, dict)]
    choices = [{group: None} for group in groups if group not in ("hydra", "optional local")]
    defaults = ["schema", {"optional local": "default"}, {"hydra": "default"}, "_self_", *choices]
    ConfigStore.instance().store(SAVED, {**saved, "defaults": defaults})
    return SAVED


def _hydra(arguments: Any) -> Any:
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path

    store_schema()
    for option, folder in (
        ("config-path", arguments.config_path),
        ("config-dir", arguments.config_dir),
    ):
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"--{option}={folder}: no such folder")
    main = os.path.abspath(arguments.config_path or root() / "conf")
    search = create_automatic_config_search_path(
        calling_file=None, calling_module=None, config_path=main
    )
    if arguments.config_dir is not None:
        search.prepend("command-line", f"file://{os.path.abspath(arguments.config_dir)}")
    return Hydra.create_main_hydra2(task_name="train", config_search_path=search)
