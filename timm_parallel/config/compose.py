"""Compose a config from a command line with Hydra, check it, and save it as config.yaml. Does not
import torch.

This file replaces `hydra.main`, which creates a folder before it composes the config, prints errors
over many lines, and accepts an unknown key such as `+sed=1`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from timm_parallel.app import as_resolved, current, root
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.explain import explain, is_known, required
from timm_parallel.config.hydra_allowlist import check_before_composing, check_hydra_block
from timm_parallel.config.resolve import by_device, device_counts
from timm_parallel.config.validate import check_combination, check_values
from timm_parallel.keys import PATHS, Config, ResolvedConfig, leaves, plain_values
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import IN_URL, REFERENCE, hide_in, is_written_out
from timm_parallel.patches import keep_missing_values, share_config_store

# Name under which Hydra's config store holds the config of a resumed run.
SAVED = "saved_config"
# Keys that no longer exist -> their default, if it is not null.
REMOVED = {"checkpoint.top": 1}


@dataclass
class Command:
    """A parsed command line of train.py, and the config that Hydra composed for it."""

    config: Config
    # The composed config before its `${…}` are resolved, with the `hydra` section.
    tree: DictConfig
    run_dir: Path
    # Object with which Hydra has loaded the config.
    loader: Any


def compose_command(arguments: Any, saved: Any = None) -> Command:
    """Compose and check the config for a command line that Hydra's parser has parsed.

    `arguments`: the argparse namespace of the parser. `saved`: saved config of the run to resume;
    None for a new run. A saved config is used in place of conf/train.yaml, and overrides still
    change its values.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.types import RunMode

    try:
        hydra = _hydra(arguments)
        keep_missing_values(hydra.config_loader)
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
            # Hydra raises one of these exceptions if a section of its own config is null, or if
            # hydra.job.env_copy names a variable that is not set.
            params = (
                word.input_line
                for word in overrides
                if word.key_or_group.startswith("hydra.sweeper.params")
            )
            given = next(params, "hydra.*")
            raise ValueError(
                f"{given}: Hydra cannot use this setting; remove it (to sweep, write -m key=a,b)"
            ) from None
        HydraConfig.instance().set_config(tree)
        config = to_config(tree, is_complete=not arguments.multirun)
        if not arguments.multirun:
            if tree.hydra.sweeper.get("params"):
                experiment = tree.hydra.runtime.choices.get("experiment")
                raise ValueError(
                    f"experiment={experiment}: this experiment is a sweep, because it sets "
                    "hydra.sweeper.params; add -m to the command"
                )
            if config.search.sampler is not None:
                raise ValueError(
                    f"search.sampler={config.search.sampler}: a search runs several jobs; add -m "
                    "to the command"
                )
            check_combination(config)
        save_absolute_paths(tree)
        return Command(
            config, tree, Path(str(OmegaConf.select(tree, "hydra.run.dir"))), hydra.config_loader
        )
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise ValueError(explain(error, arguments.overrides)) from error
    finally:
        GlobalHydra.instance().clear()


def plain_config() -> Config:
    """Compose the config of `python train.py` without arguments. If a value without default is
    missing, such as data.root, return the defaults of the config classes instead.
    """
    try:
        return compose_command(parse_command_line([])).config
    except ValueError:
        return current().config()


@contextlib.contextmanager
def hydra_files(command: Command, folder: Path) -> Iterator[Path]:
    """Write `.hydra/` into the run folder, and yield the folder. With hydra.job.chdir=true, the run
    folder is the current folder in the `with` block.
    """
    with read_write(command.tree.hydra), open_dict(command.tree.hydra.runtime):
        command.tree.hydra.run.dir = str(folder)
        command.tree.hydra.runtime.output_dir = str(folder.resolve())
    save_hydra_files(command.tree, folder)
    if not command.tree.hydra.job.chdir:
        yield folder
        return
    folder = folder.resolve()
    with contextlib.chdir(folder):
        yield folder


def save_hydra_files(tree: DictConfig, folder: Path) -> None:
    """Write `.hydra/` into the run folder, as Hydra does, but without the values of secrets."""
    for name, part in (
        ("config", _task_of(tree)),
        ("hydra", OmegaConf.masked_copy(tree, ["hydra"])),
        ("overrides", tree.hydra.overrides.task),
    ):
        write_text(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(part))


def save_absolute_paths(tree: DictConfig) -> None:
    """Make the paths of a composed config absolute, for the files that a later command reads. A
    reference such as `${oc.env:DATA}` stays as it is.
    """
    if OmegaConf.select(tree, "cluster.scheduler") == "kubernetes":
        return
    for key in PATHS:
        section, _, name = key.partition(".")
        group = tree.get(section)
        if group and not OmegaConf.is_interpolation(group, name) and group.get(name):
            group[name] = os.path.abspath(str(group[name]))


def store_schema() -> None:
    """Register the config schema and the resolvers of the current project with Hydra."""
    from hydra.core.config_store import ConfigStore

    # mypy does not know that a class is hashable, here and in typed_and_checked.
    ConfigStore.instance().store("schema", node=_schema(current().config))  # type: ignore[arg-type]
    share_config_store()
    OmegaConf.register_new_resolver("device_counts", device_counts, replace=True)
    OmegaConf.register_new_resolver("by_device", by_device, replace=True)


def to_config(tree: DictConfig, is_complete: bool = True) -> Config:
    """Convert a composed config, whose `${…}` are not yet resolved, to a Config object, and check
    each value. Raises ValueError for an invalid or missing value, and for a secret that is given as
    plain text.

    `is_complete`: false for the config on which the jobs of a sweep are based. The swept keys may
    set a value that is missing there.
    """
    for key, value in plain_values(OmegaConf.to_container(_task_of(tree))):
        if is_complete and value == "???":
            raise ValueError(required(key))
        # Reject a secret, because ranks read the config from a file of the run folder. A plain
        # secret would be visible in that file. A masked secret would be useless for the ranks.
        if is_written_out(key, value) or IN_URL.search(REFERENCE.sub("", str(value))):
            raise ValueError(
                f"{key}: the value is a secret; give a reference to an environment variable, "
                f"{key}='${{oc.env:NAME}}', so that no file holds the secret"
            )
    config = typed_and_checked(tree, is_complete)
    if "hydra" in tree:
        check_hydra_block(tree)
    return config


def typed_and_checked(tree: DictConfig, is_complete: bool = True) -> Config:
    """Convert a composed config to a Config object and check each value. Raises ValueError for an
    invalid value.

    `is_complete`: false to read a missing value in a free dictionary as null.
    """
    try:
        # The schema adds types and defaults.
        known = OmegaConf.merge(_schema(current().config), _task_of(tree))  # type: ignore[arg-type]
        if not is_complete:
            for key in OmegaConf.missing_keys(known):
                OmegaConf.update(known, key, None)
        config = OmegaConf.to_object(known)
    except OmegaConfBaseException as error:
        # Take the overrides without resolving them, because one may contain a `${…}` that cannot be
        # resolved.
        given: Any = OmegaConf.to_container(
            OmegaConf.select(tree, "hydra.overrides.task") or OmegaConf.create([])
        )
        raise ValueError(explain(error, given)) from error
    assert isinstance(config, Config)
    check_values(config)
    return config


@cache
def _schema(config_class: type[Config]) -> DictConfig:
    """Build the config schema of a project as an OmegaConf tree. The result is cached, because
    building it takes a quarter of the time that composing a config takes.
    """
    return OmegaConf.structured(config_class)


def save_config(config: Config, folder: Path, parts: Sequence[str] = ()) -> None:
    """Write a config to config.yaml of a run folder. The file also gets Hydra's settings for names
    of run folders, and a comment with the command that runs the config again.

    `parts`: command line of each attempt, for a run that was resumed with other settings.
    """
    hydra: Any = OmegaConf.to_container(OmegaConf.load(root() / "conf" / "hydra" / "default.yaml"))
    resolved = OmegaConf.structured(config)
    # The resolved config has values in place of references such as `${oc.env:NAME}`. Write the
    # references again, as they are in an earlier config.yaml or in .hydra/config.yaml.
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


def load_config(folder: Path) -> ResolvedConfig:
    """Read the resolved config of a run from config.yaml in the run folder. References such as
    `${oc.env:NAME}` are resolved from the environment of this process.
    """
    try:
        saved = OmegaConf.load(folder / "config.yaml")
        # An empty file would be read as a config of default values.
        if not saved:
            raise ValueError
        task = _task_of(saved)
    except (OSError, ValueError, YAMLError):
        raise ValueError(
            f"{folder}: expected a run folder, but it has no readable config.yaml"
        ) from None
    drop_removed_keys(task)
    return as_resolved(to_config(task))


def drop_removed_keys(saved: DictConfig) -> None:
    """Delete keys that no longer exist and have their default from a saved config, so that this
    version reads runs of an earlier one.
    """
    known = {key for key, _, _ in leaves(current().config())}
    for key, value in plain_values(OmegaConf.to_container(saved)):
        if value == REMOVED.get(key) and key not in known and not is_known(key):
            section, _, name = key.rpartition(".")
            del OmegaConf.select(saved, section)[name]


def asks_for_accumulate(folder: Path) -> bool:
    """Return True if the command of a run set train.accumulate=auto. The run's config.yaml has a
    number instead, so .hydra/config.yaml is read.
    """
    # Search .hydra/config.yaml as text, because parsing it would take 10 ms.
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return re.search(r"^train:\n(?:  .*\n)*?  accumulate: auto$", text, re.MULTILINE) is not None


def copy_config(source: Path, folder: Path, seed: int) -> None:
    """Copy config.yaml and .hydra/ of the run folder `source` to another run folder, with another
    seed.
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
    """Return a composed config without the entries `hydra` and `defaults`, which only Hydra uses.
    The result is a copy, or the same object if it has neither entry.
    """
    kept = [key for key in tree if key not in ("hydra", "defaults")]
    return tree if len(kept) == len(tree) else OmegaConf.masked_copy(tree, kept)


def _references_in(path: Path, config: Config) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, text with the reference) for each key of a config file that holds a
    `${oc.env:…}` reference. Skip a key if `config` now has another value than the reference stands
    for.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if "${oc.env:" not in text:
        return
    given = _task_of(OmegaConf.create(text))
    drop_removed_keys(given)
    unresolved: Any = OmegaConf.to_container(given)
    for (key, earlier, _), (_, value, _) in zip(
        leaves(to_config(given)), leaves(config), strict=True
    ):
        written = reduce(getitem, key.split("."), unresolved)
        if "${oc.env:" in str(written) and earlier == value:
            yield key, written


def _store_over(saved: Any) -> str:
    """Store the saved config of a run in Hydra's config store, so that Hydra uses it in place of
    conf/train.yaml. Overrides may still choose options of config groups. Return the name in the
    store.
    """
    from hydra.core.config_store import ConfigStore

    main: Any = OmegaConf.to_container(OmegaConf.load(root() / "conf" / "train.yaml"))
    groups = [next(iter(entry)) for entry in main["defaults"] if isinstance(entry, dict)]
    choices = [{group: None} for group in groups if group not in ("hydra", "optional local")]
    defaults = ["schema", {"optional local": "default"}, {"hydra": "default"}, "_self_", *choices]
    ConfigStore.instance().store(SAVED, {**saved, "defaults": defaults})
    return SAVED


def _hydra(arguments: Any) -> Any:
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path

    # The version that entry.py gives to hydra.main. Without it, Hydra warns about the .yml files
    # below the folder of --config-path, such as those that scripts/reproduce.py copies into a run.
    version.setbase("1.3")
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
