"""A sweep's command line -> its points, all composed and checked before the first one runs.

Hydra's own launcher composes each job when it starts, so that editing YAML reaches queued jobs, and a misspelt key is
found an hour late.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from src.engine.config.cluster import CODE
from src.engine.config.combinations import check_combination
from src.engine.config.compose import Command, compose_command, freeze, read_frozen, to_config
from src.engine.config.resolve import remarks, resolve
from src.engine.machine import hardware
from src.engine.machine.files import claim_folder, write_text
from src.engine.machine.secrets import hide
from src.engine.record.jobs import Job, config_hash
from src.schema import Config, ResolvedConfig, SearchConfig


@dataclass
class Point:
    """A job that a sweep may run."""

    overrides: list[str]
    subdir: str  # below the sweep folder
    tree: DictConfig  # as composed, with `hydra`
    config: Config  # resolved, unless it cannot run here
    reason: str = ""  # why it cannot run here; empty when it can
    remarks: list[str] = field(default_factory=list)  # what `auto` has decided for it


def expand(arguments: Any) -> tuple[Command, list[Point]]:
    """The sweep as composed without its swept keys, and its points; of a search, the one that all trials start from."""
    from hydra.errors import HydraException

    command = compose_command(arguments)
    compose = command.loader.load_sweep_config
    try:
        points = [make_point(compose(command.tree, own), own, number) for number, own in enumerate(_product(command))]
    except HydraException as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not points:
        raise ValueError(f"{' '.join(given(command.tree))}: a swept range holds no number, so there is nothing to run")
    schedulers = {point.config.cluster.scheduler for point in points}
    if "kubernetes" in schedulers or len(schedulers) > 1:
        raise ValueError(
            "cluster=kubernetes: a sweep runs its jobs here or as a job array of Slurm; submit runs one by one"
        )
    if schedulers == {"local"}:
        _share_threads([point.config for point in points])
    for point in points:
        settle(point)
    return command, points


def settle(point: Point) -> None:
    """Resolve the point's config for this machine, or record why it cannot run here."""
    try:
        check_combination(point.config)
        asked, point.config = point.config, resolve(point.config)
        point.remarks = remarks(asked, point.config)
    except ValueError as error:
        point.reason = hide(str(error))


def make_point(tree: DictConfig, overrides: list[str], number: int) -> Point:
    """The point that a composed tree is."""
    with read_write(tree.hydra), open_dict(tree.hydra):
        tree.hydra.job.num, tree.hydra.job.id = number, str(number)
    subdir = str(OmegaConf.select(tree, "hydra.sweep.subdir"))
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        raise ValueError(f"hydra.sweep.subdir={subdir}: must lie below the sweep folder")
    config = to_config(tree)
    config.search = SearchConfig()  # a job is no search: its config.yaml runs again without -m
    return Point(overrides, subdir, tree, config)


def freeze_job(folder: Path, job: Job, point: Point) -> None:
    """Write the job's config into a run folder of its own below the sweep's `folder`, unless it cannot run here."""
    if point.reason:
        job.status, job.reason = "skipped", point.reason
        return
    run_folder = claim_folder(folder / job.folder)  # hydra.sweep.subdir may name two jobs alike
    job.folder = str(run_folder.relative_to(folder))
    freeze(point.config, run_folder)
    _save_hydra_files(point.tree, run_folder)
    job.config_hash = config_hash(run_folder / "config.yaml")


@cache
def frozen_config(folder: Path) -> ResolvedConfig:
    """The config that `freeze_job` wrote into a run folder, read once."""
    return read_frozen(folder)


def _save_hydra_files(tree: DictConfig, folder: Path) -> None:
    """`.hydra/` of a job of a sweep, as Hydra writes it for a run: config, its own settings, overrides."""
    hydra = OmegaConf.masked_copy(tree, ["hydra"])
    task = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    for name, part in (("config", task), ("hydra", hydra), ("overrides", tree.hydra.overrides.task)):
        write_text(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(part))


def given(tree: DictConfig) -> list[str]:
    """The overrides as they were written; read one by one, OmegaConf would put in what `${…}` stands for."""
    overrides = OmegaConf.to_container(tree.hydra.overrides.task)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def keys_that_may_change(command: Command, folder: Path, *keys: str) -> set[str]:
    """The keys that the command line sets. Refused for a resumed sweep, unless among `keys`, or shell code, which no file holds."""
    set_here = {override.lstrip("+").partition("=")[0] for override in given(command.tree)}
    if changed := sorted(set_here.difference(("sweep.resume", *keys, *(f"cluster.{key}" for key in CODE)))):
        raise ValueError(f"{changed[0]}: what goes on keeps its settings (sweep.resume={folder}); leave it out")
    return set_here


def _product(command: Command) -> list[list[str]]:
    """The overrides of each point: the swept keys of `hydra.sweeper.params` and of the command line, multiplied out."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    swept = [f"{key}={value}" for key, value in (command.tree.hydra.sweeper.get("params") or {}).items()]
    overrides = OverridesParser.create(config_loader=command.loader).parse_overrides([*swept, *given(command.tree)])
    if command.config.search.sampler is not None:  # its swept keys are the search's
        return [[str(override.input_line) for override in overrides if not override.is_sweep_override()]]
    points: list[list[str]] = BasicSweeper.split_arguments(overrides, None)[0]
    return points


def _share_threads(configs: list[Config]) -> None:
    """Give all CPU points the same threads per device, else the thread defaults decide the comparison."""
    on_cpu: list[Config] = []
    most = 1
    for config in configs:
        with suppress(ValueError):  # cannot run here
            resolved = resolve(config).parallel
            if resolved.accelerator == "cpu":
                on_cpu.append(config)
                most = max(most, resolved.devices)
    for config in on_cpu:
        if config.parallel.threads_per_device == "auto":
            config.parallel.threads_per_device = max(1, hardware.cores() // most)
