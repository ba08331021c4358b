"""Compose and check all configurations of a sweep before its first job starts. Later edits of YAML
files then do not change waiting jobs.

Hydra alone needs a tenth of a second per configuration, because it reads the list of defaults again
each time. Here, Hydra composes each combination of config files only once. The other overrides are
applied to copies of the composed config.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from timm_parallel.config.compose import (
    Command,
    compose_command,
    save_absolute_paths,
    save_config,
    save_hydra_files,
    to_config,
)
from timm_parallel.config.explain import explain
from timm_parallel.config.resolve import notice, resolve
from timm_parallel.config.validate import check_combination
from timm_parallel.data.build import check_batch, check_data
from timm_parallel.keys import Config, ResolvedConfig, SearchConfig
from timm_parallel.lab.jobs.folders import claim_job_folder, config_folder
from timm_parallel.lab.sweep.board import plain_console, progress_bar
from timm_parallel.machine import hardware
from timm_parallel.machine.secrets import hide
from timm_parallel.record.result import Job


class Composer:
    """Composer of the configurations of a sweep. Results and errors are those of Hydra, but most of
    the work is done once and cached.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        # Overrides of config groups -> pickled config. Unpickling takes half the time of
        # `copy.deepcopy`.
        self._bases: dict[tuple[str, ...], bytes] = {}

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose the config for a list of overrides."""
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parsed = OverridesParser.create().parse_overrides(overrides)
        values = [override for override in parsed if not self._selects_files(override)]
        tree = self._base(
            [str(override.input_line) for override in parsed if override not in values]
        )
        # Do the second half of Hydra's function load_configuration: apply the overrides of single
        # values.
        ConfigLoaderImpl._apply_overrides_to_config(values, tree)
        job, own = (
            tree.hydra.job,
            [override for override in parsed if not override.is_hydra_override()],
        )
        style = job.config.override_dirname
        tree.hydra.overrides.task = [override.input_line for override in own]
        job.override_dirname = get_overrides_dirname(
            own, style.exclude_keys, style.item_sep, style.kv_sep
        )
        return tree

    def _selects_files(self, override: Any) -> bool:
        """Return True if an override may change the config files that Hydra loads. Such overrides
        set a config group or a key of `hydra`.
        """
        is_group = self._command.loader.repository.group_exists(override.key_or_group)
        return override.is_hydra_override() or (is_group and not isinstance(override.value(), dict))

    def _base(self, overrides: list[str]) -> DictConfig:
        """Return a new copy of the config for overrides of config groups, such as `model=tiny`.
        Compose it only once, because many configurations of a sweep use the same files.
        """
        groups = tuple(overrides)
        if groups not in self._bases:
            composed = self._command.loader.load_sweep_config(self._command.tree, overrides)
            self._bases[groups] = pickle.dumps(composed)
        tree: DictConfig = pickle.loads(self._bases[groups])
        return tree


@dataclass
class Point:
    """One configuration of a sweep. Each repeat of the sweep runs it in one job."""

    overrides: list[str]
    # Run folder of the configuration's job, relative to the sweep folder.
    subdir: str
    # The config as Hydra composed it, with the `hydra` keys.
    tree: DictConfig
    # The typed config. Its `auto` values are replaced, unless the configuration cannot run on this
    # machine.
    config: Config
    # The reason why the configuration cannot run on this machine. Empty if it can.
    reason: str = ""
    # Message that `auto` chose the CPU although there are NVIDIA devices.
    notice: str = ""


def expand(arguments: Any) -> tuple[Command, list[Point]]:
    """Compose the config of a sweep and all of its configurations from parsed command-line
    arguments. A search has a single configuration, on which all trials are based.

    Raises ValueError if a configuration cannot be composed, if a range is empty, or if the jobs use
    several clusters.
    """
    from hydra.errors import HydraException

    command = compose_command(arguments)
    points, composer = [], Composer(command)
    product = _product(command)
    # The space of a search may set values that are missing in the base configuration.
    is_complete = command.config.search.sampler is None
    with progress_bar(plain_console(stderr=True)) as bar:
        for number, overrides in enumerate(bar.track(product, description="composing")):
            try:
                tree = composer.compose(overrides)
            except HydraException as error:
                raise ValueError(explain(error, overrides)) from error
            points.append(make_point(tree, overrides, number, is_complete))
    if not points:
        given = " ".join(task_overrides(command.tree))
        raise ValueError(
            f"{given}: a swept range has no values; expected range(start,stop) with start < stop"
        )
    clusters = [point.config.cluster for point in points]
    schedulers = {cluster.scheduler for cluster in clusters}
    on_cluster = schedulers != {"local"}
    if "kubernetes" in schedulers or (on_cluster and any(one != clusters[0] for one in clusters)):
        raise ValueError(
            f"cluster={','.join(sorted(schedulers))}: the jobs of a sweep run all on this machine, "
            "or all as one Slurm job array with equal resources; give cluster=local or "
            "cluster=slurm, and each cluster.… key a single value"
        )
    if not on_cluster:
        _share_threads([point.config for point in points])
    for point in points:
        settle(point)
    _share_formats([point.config for point in points if not point.reason])
    return command, points


def _share_formats(configs: Sequence[Config]) -> None:
    """Replace `auto` by fp32 and contiguous memory if some jobs run on GPUs and others do not,
    because only jobs with equal formats can be compared. Otherwise, the ranks of all jobs choose
    alike.
    """
    if len({config.parallel.accelerator for config in configs}) < 2:
        return
    for config in configs:
        if config.train.precision == "auto":
            config.train.precision = "fp32"
        # Only a project may have this key.
        if getattr(config.model, "channels_last", False) == "auto":
            config.model.channels_last = False  # type: ignore[attr-defined]


def check_jobs_data(configs: Sequence[Config]) -> None:
    """Check the data of all jobs that run on this machine, once for all jobs with equal data and
    batches. Jobs on a cluster check their data when they start. Raises ValueError if data cannot be
    used.
    """
    different = {
        (
            repr((config.data, config.train.task)),
            config.parallel.devices,
            config.train.accumulate,
        ): config
        for config in configs
        if config.cluster.scheduler == "local"
    }
    for config in different.values():
        check_data(config)
        # A configuration that cannot run on this machine has no batch, and is skipped.
        if isinstance(config, ResolvedConfig):
            check_batch(config)


def settle(point: Point) -> None:
    """Replace the `auto` values in the config of `point` by values for this machine. If this
    machine cannot run the configuration, store the reason in `point.reason` instead.
    """
    # Import these rules here, because they import torch.
    from timm_parallel.checked_configs import check_task

    try:
        check_combination(point.config)
        check_task(point.config)
        config, point.config = point.config, resolve(point.config)
        point.notice = notice(config, point.config)
    except ValueError as error:
        point.reason = hide(str(error))


def make_point(tree: DictConfig, overrides: list[str], number: int, is_complete: bool) -> Point:
    """Build configuration `number` of a sweep from its composed config `tree`. `is_complete`: false
    if values may be missing, as in the base of a search.
    """
    with read_write(tree.hydra), open_dict(tree.hydra):
        tree.hydra.job.num, tree.hydra.job.id = number, str(number)
    subdir = str(OmegaConf.select(tree, "hydra.sweep.subdir"))
    if Path(subdir).is_absolute() or ".." in Path(subdir).parts:
        raise ValueError(f"hydra.sweep.subdir={subdir}: expected a path below the sweep folder")
    config = to_config(tree, is_complete)
    save_absolute_paths(tree)
    # Reset the keys of the search, so that the config.yaml of a job runs without -m.
    config.search = SearchConfig()
    return Point(overrides, subdir, tree, config)


def names_of(points: list[Point]) -> list[str]:
    """Return a name for each configuration of a sweep: its overrides, without those that all
    configurations have in common.
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
    """Write the config of a job below the sweep folder `folder`, and create its run folder. A job
    that cannot run on this machine is only marked as skipped.
    """
    if point.reason:
        job.status, job.reason = "skipped", point.reason
        return
    claim_job_folder(folder, job)
    target = config_folder(folder, job)
    save_hydra_files(point.tree, target)
    # Save config.yaml after the files in `.hydra/`, because it keeps references such as
    # `${oc.env:TOKEN}` unresolved as those files do.
    save_config(point.config, target)


def task_overrides(tree: DictConfig) -> list[str]:
    """Return the overrides of the command line in a composed config, as the user wrote them.
    References such as `${…}` are not resolved.
    """
    overrides: Any = OmegaConf.to_container(tree.hydra.overrides.task)
    return [str(override) for override in overrides]


def keys_that_may_change(command: Command, folder: Path, *keys: str) -> set[str]:
    """Return the keys that the command line of a resumed sweep sets. Raises ValueError for a key
    other than sweep.resume and those in `keys`, because a resumed sweep keeps its settings.
    """
    keys_set = {override.lstrip("+").partition("=")[0] for override in task_overrides(command.tree)}
    if changed := sorted(keys_set.difference(("sweep.resume", *keys))):
        raise ValueError(
            f"{changed[0]}: cannot be changed when a sweep is continued (sweep.resume={folder}); "
            f"leave {changed[0]} out"
        )
    return keys_set


def _product(command: Command) -> list[list[str]]:
    """Return the overrides of each configuration of a sweep. The configurations are all
    combinations of the values of the swept keys.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    swept = [
        f"{key}={value}" for key, value in (command.tree.hydra.sweeper.get("params") or {}).items()
    ]
    overrides = OverridesParser.create(config_loader=command.loader).parse_overrides(
        [*swept, *task_overrides(command.tree)]
    )
    # The swept keys of a search are its search space, so its base configuration has none of them.
    if command.config.search.sampler is not None:
        return [
            [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        ]
    for override in overrides:
        if override.is_interval_sweep():
            key, text = override.key_or_group, override.input_line
            raise ValueError(
                f"{text}: an interval requires a search; add search=optuna, or list values: "
                f"{key}=a,b"
            )
        if override.is_sweep_override():
            for value, count in Counter(override.sweep_string_iterator()).items():
                if count > 1:
                    raise ValueError(
                        f"{override.input_line}: contains {override.key_or_group}={value} twice; "
                        "to repeat each job with other seeds, use sweep.repeats=N"
                    )
    points: list[list[str]] = BasicSweeper.split_arguments(overrides, None)[0]
    return points


def _share_threads(configs: list[Config]) -> None:
    """Give all configurations on CPU the same value of threads_per_device. Different values would
    bias the comparison of their speeds.
    """
    on_cpu: list[Config] = []
    devices = 1
    for config in configs:
        # Ignore a config that cannot run on this machine.
        with suppress(ValueError):
            resolved = resolve(config).parallel
            if resolved.accelerator == "cpu":
                on_cpu.append(config)
                devices = max(devices, resolved.devices)
    for config in on_cpu:
        if config.parallel.threads_per_device == "auto":
            config.parallel.threads_per_device = max(1, hardware.cores() // devices)
