"""Compose and check all configurations of a sweep before its first job, so that YAML edits do not
change queued jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from timm_parallel.config.compose import (
    Command,
    compose_command,
    save_config,
    save_hydra_files,
    to_config,
)
from timm_parallel.config.resolve import notices, resolve
from timm_parallel.config.suggest import explain
from timm_parallel.config.validate import check_combination
from timm_parallel.keys import Config, SearchConfig
from timm_parallel.lab.jobs.folders import claim_job_folder, config_folder
from timm_parallel.lab.sweep.board import counted
from timm_parallel.lab.sweep.composer import Composer
from timm_parallel.machine import hardware
from timm_parallel.machine.secrets import hide
from timm_parallel.record.jobs import Job


@dataclass
class Point:
    """Configuration of a sweep. One job runs it in each repeat of the sweep."""

    overrides: list[str]
    subdir: str  # below the sweep folder
    tree: DictConfig  # as composed, with `hydra`
    config: Config  # resolved, unless it cannot run here
    reason: str = ""  # why it cannot run here; empty if it can
    code: str = ""  # of the reason, if it has one
    notices: list[str] = field(default_factory=list)  # choices of `auto` that may surprise


def expand(arguments: Any) -> tuple[Command, list[Point]]:
    """Return a sweep's command without swept keys, and its configurations; for a search, only the
    base of all trials.
    """
    from hydra.errors import HydraException

    command = compose_command(arguments)
    points, composer = [], Composer(command)
    product = _product(command)
    with counted("composing", len(product)) as count:
        for number, overrides in enumerate(product):
            try:
                tree, merged = composer.compose(overrides)
            except HydraException as error:
                raise ValueError(explain(error, overrides)) from error
            points.append(make_point(tree, overrides, number, merged))
            count()
    if not points:
        given = " ".join(task_overrides(command.tree))
        raise ValueError(
            f"{given}: a swept range is empty; expected range(start,stop) with start < stop"
        )
    schedulers = {point.config.cluster.scheduler for point in points}
    if "kubernetes" in schedulers or len(schedulers) > 1:
        raise ValueError(
            "cluster=kubernetes: a sweep runs locally or as a Slurm job array; submit runs one by "
            "one"
        )
    if schedulers == {"local"}:
        _share_threads([point.config for point in points])
    for point in points:
        settle(point)
    return command, points


def check_jobs_data(configs: Sequence[Config], check_data: Callable[[Config], None]) -> None:
    """Call `check_data` once per distinct data and task of jobs on this machine. Cluster jobs check
    when they start.
    """
    local = [config for config in configs if config.cluster.scheduler == "local"]
    for config in {repr(config.data_check_reads): config for config in local}.values():
        check_data(config)


def settle(point: Point) -> None:
    """Replace `auto` values in the config for this machine, or record in `point.reason` why the
    config cannot run here.
    """
    try:
        check_combination(point.config)
        config, point.config = point.config, resolve(point.config)
        point.notices = notices(config, point.config)
    except ValueError as error:
        point.reason, point.code = hide(str(error)), getattr(error, "code", "")


def make_point(
    tree: DictConfig, overrides: list[str], number: int, merged: DictConfig | None = None
) -> Point:
    """Return configuration `number` of a sweep from its composed tree. `merged`: the tree merged
    into the schema, if known.
    """
    with read_write(tree.hydra), open_dict(tree.hydra):
        tree.hydra.job.num, tree.hydra.job.id = number, str(number)
    subdir = str(OmegaConf.select(tree, "hydra.sweep.subdir"))
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        raise ValueError(f"hydra.sweep.subdir={subdir}: expected a path below the sweep folder")
    config = to_config(tree, merged)
    # A job does not search, so its config.yaml runs without -m.
    config.search = SearchConfig()
    return Point(overrides, subdir, tree, config)


def names_of(points: list[Point]) -> list[str]:
    """Return a name for each configuration: its overrides, without those that all configurations
    have.
    """
    common = set.intersection(*(set(point.overrides) for point in points))
    names = [
        ",".join(override for override in point.overrides if override not in common)
        for point in points
    ]
    return [
        name or ("the only configuration" if len(points) == 1 else "current settings")
        for name in names
    ]


def freeze_job(folder: Path, job: Job, point: Point) -> None:
    """Write a job's config below the sweep's `folder` and create its run folder, unless the job
    cannot run here.
    """
    if point.reason:
        job.status, job.reason, job.code = "skipped", point.reason, point.code
        return
    claim_job_folder(folder, job)
    target = config_folder(folder, job)
    save_hydra_files(point.tree, target)
    # Afterwards, because it keeps references such as `${oc.env:TOKEN}` unresolved as in `.hydra/`.
    save_config(point.config, target)


def task_overrides(tree: DictConfig) -> list[str]:
    """Return the command-line overrides in a composed tree as written, with unresolved `${…}`."""
    overrides: Any = OmegaConf.to_container(tree.hydra.overrides.task)
    return [str(override) for override in overrides]


def keys_that_may_change(command: Command, folder: Path, *keys: str) -> set[str]:
    """Return the keys that a resumed sweep's command line sets. Raises ValueError for a key that is
    not in `keys`.
    """
    keys_set = {override.lstrip("+").partition("=")[0] for override in task_overrides(command.tree)}
    if changed := sorted(keys_set.difference(("sweep.resume", *keys))):
        raise ValueError(
            f"{changed[0]}: a resumed sweep keeps its settings (sweep.resume={folder}); leave it "
            "out"
        )
    return keys_set


def _product(command: Command) -> list[list[str]]:
    """Return the overrides of each configuration: all combinations of the values of swept keys."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    swept = [
        f"{key}={value}" for key, value in (command.tree.hydra.sweeper.get("params") or {}).items()
    ]
    overrides = OverridesParser.create(config_loader=command.loader).parse_overrides(
        [*swept, *task_overrides(command.tree)]
    )
    # The swept keys of a search are its space.
    if command.config.search.sampler is not None:
        return [
            [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        ]
    for override in overrides:
        _check_listed(override)
    points: list[list[str]] = BasicSweeper.split_arguments(overrides, None)[0]
    return points


def _check_listed(override: Any) -> None:
    """Raise ValueError if a swept key has an interval, which only a search can use, or the same
    value twice.
    """
    if not override.is_sweep_override():
        return
    key, text = override.key_or_group, override.input_line
    if override.is_interval_sweep():
        raise ValueError(
            f"{text}: an interval requires a search; add search=optuna, or list values: {key}=a,b"
        )
    for value, count in Counter(override.sweep_string_iterator()).items():
        if count > 1:
            raise ValueError(
                f"{text}: has {key}={value} twice; to repeat jobs with other seeds use "
                "sweep.repeats=N"
            )


def _share_threads(configs: list[Config]) -> None:
    """Give all configs on CPU the same threads_per_device, because different numbers would bias
    their comparison.
    """
    on_cpu: list[Config] = []
    devices = 1
    for config in configs:
        with suppress(ValueError):  # cannot run here
            resolved = resolve(config).parallel
            if resolved.accelerator == "cpu":
                on_cpu.append(config)
                devices = max(devices, resolved.devices)
    for config in on_cpu:
        if config.parallel.threads_per_device == "auto":
            config.parallel.threads_per_device = max(1, hardware.cores() // devices)
