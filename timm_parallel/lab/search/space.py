"""Search space of a hyper-parameter search: keys with values in Hydra's sweep syntax. This module
also builds the config of a trial from given values, and of each setting that `sweep.tune` tries.

A config group such as `model=tiny,resnet18` cannot be searched. Later trials would have to read
conf/ again, which may have been edited since.
"""

from __future__ import annotations

import copy
import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from timm_parallel.config.compose import Command, to_config
from timm_parallel.config.explain import explain
from timm_parallel.keys import Config
from timm_parallel.lab.sweep.points import Point, make_point, settle, task_overrides
from timm_parallel.machine.files import write_text
from timm_parallel.record.result import SEARCH

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Number of combinations of extreme values that are checked before a search starts.
MAX_CORNERS = 32
SWEPT = "interval(a,b), range(a,b) or choice(a,b)"
TAGS = ("log", "int", "float")
NOT_SEARCHED = (
    "hydra",
    "search",
    "sweep",
    "paths",
    "cluster",
    "resume",
    "optimized_metric",
    "task_name",
    "tags",
)


@dataclass(frozen=True)
class Dimension:
    """One searched key and the distribution of its values. Options are texts in Hydra's syntax."""

    # The searched key as written in an override, with + or ++ if the config does not have the key
    # yet.
    key: str
    # The values of the key, as the user wrote them.
    text: str
    distribution: BaseDistribution

    @property
    def name(self) -> str:
        """The searched key, such as `optim.lr`."""
        return self.key.lstrip("+")

    @property
    def ends(self) -> list[str]:
        """Overrides with the lowest and the highest value of the key, or with each option."""
        known: Any = self.distribution
        options = getattr(known, "choices", None) or (known.low, known.high)
        return [self.override(value) for value in options]

    def override(self, value: float | str) -> str:
        return f"{self.key}={value}"


def read_space(command: Command) -> list[Dimension]:
    """Read the search space from search.params and the overrides. An override with a single value
    removes its key from the space.

    Raises ValueError for a key that is unknown or cannot be searched.
    """
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser

    in_files = {**(command.tree.hydra.sweeper.get("params") or {}), **command.config.search.params}
    space = {dimension.name: dimension for dimension in parse_space(in_files)}
    for override in OverridesParser.create(config_loader=command.loader).parse_overrides(
        task_overrides(command.tree)
    ):
        if override.is_sweep_override():
            space[override.key_or_group] = _dimension(override)
        else:
            space.pop(override.key_or_group, None)
    for name, dimension in space.items():
        written = f"{name}={dimension.text}"
        if command.loader.get_group_options(name, ObjectType.CONFIG):
            raise ValueError(
                f"{written}: {name} is a config group, which cannot be searched; search a key "
                f"{name}.<key>, or sweep over {name} without search=…"
            )
        if name.split(".")[0] in NOT_SEARCHED:
            raise ValueError(
                f"{written}: a search cannot vary the key {name}; give it a single value"
            )
    return list(space.values())


def parse_space(params: dict[str, Any]) -> list[Dimension]:
    """Parse the entries of `search.params`, key -> values in Hydra's sweep syntax, into a list of
    Dimensions. Raises ValueError for an entry that is not valid.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    space = []
    for key, text in params.items():
        written = f"search.params.{key}={text}"
        try:
            override = OverridesParser.create().parse_override(f"{key}={text}")
        except HydraException as error:
            raise ValueError(
                f"{written}: Hydra cannot parse this value: {str(error).splitlines()[0]}"
            ) from error
        if not override.is_sweep_override():
            raise ValueError(
                f"{written}: a searched key needs several values, given as {SWEPT}; for one value, "
                f"use {key}={text} without search.params"
            )
        space.append(_dimension(override))
    return space


def _dimension(override: Any) -> Dimension:
    """Convert an override in Hydra's sweep syntax to a Dimension. Raises ValueError if its values
    are not valid for a search.
    """
    from hydra.core.override_parser.types import Glob

    sweep, written = override.value(), str(override.input_line)
    key, _, text = written.partition("=")
    if isinstance(sweep, Glob):
        raise ValueError(
            f"{written}: a glob names options of a config group, which cannot be searched; use "
            f"{SWEPT}"
        )
    allowed = TAGS if override.is_interval_sweep() else ()
    if unknown := set(sweep.tags).difference(allowed):
        raise ValueError(
            f"{written}: unknown tag {', '.join(sorted(unknown))}; expected tags of interval(a,b): "
            f"{', '.join(TAGS)}"
        )
    try:
        return Dimension(key, text, _distribution(override, sweep))
    except ValueError as error:
        raise ValueError(f"{written}: {error}") from None


def _distribution(override: Any, sweep: Any) -> BaseDistribution:
    from optuna import distributions

    if override.is_choice_sweep():
        options = tuple(dict.fromkeys(override.sweep_string_iterator()))
        return distributions.CategoricalDistribution(options)
    if override.is_range_sweep():
        numbers = sorted(sweep.range()) if sweep.step else []
        if not numbers:
            raise ValueError("the range has no values; expected range(start,stop), start < stop")
        of_range = (
            distributions.IntDistribution
            if isinstance(numbers[0], int)
            else distributions.FloatDistribution
        )
        return of_range(numbers[0], numbers[-1], step=abs(sweep.step))
    is_integer = "int" in sweep.tags or isinstance(sweep.start, int)
    low, high = (int(sweep.start), int(sweep.end)) if is_integer else (sweep.start, sweep.end)
    if low == high:
        raise ValueError(f"has the single value {low}; expected interval(a,b) with a < b")
    if is_integer:
        return distributions.IntDistribution(low, high, "log" in sweep.tags)
    return distributions.FloatDistribution(low, high, "log" in sweep.tags)


def check_space(config: Config, base: DictConfig, space: list[Dimension]) -> list[Config]:
    """Raise ValueError if the settings of a search are not valid, or if no trial can run on this
    machine.

    Return the configs of some trials with extreme values that can run here, so that the caller can
    check their data.
    """
    # Import this function here, because it imports torch.
    from timm_parallel.checked_configs import choose_headline

    choose_headline(config)
    settings, metric = config.search, config.objective
    direction = natural_direction(config)
    if settings.direction not in (None, direction):
        raise ValueError(
            f"search.direction={settings.direction}: the search would look for the worst {metric}; "
            f"use search.direction={direction}"
        )
    if settings.pruner != "none" and not metric.startswith("val/"):
        raise ValueError(
            f"search.pruner={settings.pruner}: cannot stop trials early by {metric}, which is "
            "known only at the end of a trial; use search.pruner=none"
        )
    if config.sweep.dry_run:
        raise ValueError(
            "sweep.dry_run=true: cannot list the trials of a search, because their values are "
            "chosen while the search runs; leave sweep.dry_run out"
        )
    if config.sweep.num_repeats != 1:
        raise ValueError(
            f"sweep.repeats={config.sweep.repeats}: a search does not repeat its trials; leave "
            "sweep.repeats out"
        )
    if not space:
        raise ValueError(
            "search.params: the search has no key to search; give a key several values, for "
            "example 'optim.lr=tag(log,interval(1e-4,1e-1))'"
        )
    for dimension in space:
        try:
            for override in dimension.ends:
                trial_point(base, [override], 0, is_complete=False)
        except ValueError as error:
            is_real = isinstance(getattr(dimension.distribution, "low", None), float)
            fix = "; for integers use int(interval(a,b))" if is_real else ""
            raise ValueError(
                f"{dimension.name}={dimension.text}: a searched value is not valid: {error}{fix}"
            ) from error
    # The keys of the data come last, because the combinations differ in the last keys first.
    ends = [d.ends for d in sorted(space, key=lambda d: d.name.startswith("data."))]
    corners = itertools.islice(itertools.product(*ends), MAX_CORNERS)
    points = [trial_point(base, list(corner), 0) for corner in corners]
    possible = [point.config for point in points if not point.reason]
    if not possible:
        raise ValueError(
            "no trial of this search can run on this machine; reason of one trial: "
            f"{points[0].reason}"
        )
    return possible


def natural_direction(config: Config) -> str:
    """Return the direction in which a search optimizes its metric: minimize or maximize."""
    # Import this function here, because it imports torch.
    from timm_parallel.checked_configs import metric_of

    metric = metric_of(config.train.task, config.objective)
    return "minimize" if metric.lower_is_better else "maximize"


def trial_point(
    base: DictConfig, overrides: list[str], number: int, is_complete: bool = True
) -> Point:
    """Build the configuration of trial `number`: a copy of the base config of a search, changed by
    `overrides`. `is_complete`: false if `overrides` set only some of the searched keys.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    tree = copy.deepcopy(base)
    for override in OverridesParser.create().parse_overrides(overrides):
        try:
            added = override.is_add() or override.is_force_add()
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=added)
        except OmegaConfBaseException as error:
            raise ValueError(explain(error, [str(override.input_line)])) from error
    with read_write(tree.hydra):
        tree.hydra.overrides.task = [*task_overrides(tree), *overrides]
    point = make_point(tree, task_overrides(tree), number, is_complete)
    settle(point)
    return point


def freeze_search(folder: Path, base: DictConfig, space: list[Dimension], **settings: Any) -> None:
    """Write search.yaml, which contains the base config of all trials, the search space, and the
    settings of the search.
    """
    from timm_parallel.checked_configs import choose_headline

    tree, config = copy.deepcopy(base), to_config(base, is_complete=False)
    choose_headline(config)
    with read_write(tree), open_dict(tree):
        tree.search.params = {dimension.key: dimension.text for dimension in space}
        # Fix the metric that is optimized, so that all trials have the same one even if
        # checkpoint.metric is searched.
        tree.optimized_metric = config.objective
        tree.search.update(settings)
        tree.hydra.overrides.task = _of_a_trial(task_overrides(tree))
    write_text(
        folder / SEARCH,
        "# The search as composed at its start: settings, space, and the base config of all "
        f"trials.\n{OmegaConf.to_yaml(tree)}",
    )


def read_search(folder: Path) -> tuple[Config, DictConfig, list[Dimension]]:
    """Read search.yaml in the folder of a search. Return its settings, the base config of all
    trials, and the search space. Raises ValueError if the file is missing or damaged.
    """
    path = folder / SEARCH
    try:
        tree = OmegaConf.load(path)
        assert isinstance(tree, DictConfig)
    except (OSError, AssertionError, YAMLError):
        raise ValueError(
            f"{path}: the file is missing or damaged; restore it, or start again in a new folder"
        ) from None
    OmegaConf.set_struct(tree, True)
    config = to_config(tree, is_complete=False)
    return config, tree, parse_space(config.search.params)


def _of_a_trial(overrides: list[str]) -> list[str]:
    """Convert the overrides of a search to those of a single trial: remove the keys of `search` and
    `sweep`, so that the command of the trial runs without -m.
    """
    kept = [
        item
        for item in overrides
        if not item.lstrip("+").startswith(("search=", "search.", "sweep."))
    ]
    # If the command line does not contain search=…, an experiment file has switched the search on.
    # Then switch it off in the command of a trial.
    by_command = any(item.lstrip("+").startswith("search=") for item in overrides)
    return kept if by_command else [*kept, "search.sampler=null"]


def settings_to_try(command: Command, points: list[Point]) -> list[Point]:
    """Return the configuration of the command, and a copy with each setting of `sweep.tune` that
    differs from it on this machine.

    Raises ValueError if other keys contradict a measurement of speed on this machine.
    """
    config = points[0].config
    if len(points) > 1:
        raise ValueError(
            "sweep.tune: expects one configuration, but the command line gives several values for "
            "a key; give a single value for each key"
        )
    if config.cluster.scheduler != "local":
        raise ValueError(
            f"cluster={config.cluster.scheduler}: sweep.tune measures the machine on which it "
            "runs; use cluster=local on the node that will train"
        )
    if command.config.search.sampler is not None:
        raise ValueError(
            "sweep.tune: cannot be combined with a hyper-parameter search; leave out sweep.tune or "
            "search=…"
        )
    if config.sweep.jobs != 1:
        raise ValueError(
            f"sweep.jobs={config.sweep.jobs}: sweep.tune measures the speed of its jobs, so they "
            "must run one at a time; use sweep.jobs=1"
        )
    if config.train.max_steps is None or config.train.evaluate_every != 0:
        raise ValueError(
            "sweep.tune: measures the speed of short runs without evaluation; set train.max_steps, "
            "and train.evaluate_every=0"
        )
    if points[0].reason:
        raise ValueError(points[0].reason)
    tried = [points[0]]
    for number, text in enumerate(config.sweep.tune, 1):
        try:
            point = trial_point(points[0].tree, shlex.split(text), number)
        except ValueError as error:
            raise ValueError(f"sweep.tune: {text}: this setting is not valid: {error}") from error
        if point.reason or all(point.config != other.config for other in tried):
            tried.append(point)
    if all(point.reason for point in tried[1:]):
        raise ValueError(
            f"sweep.tune={config.sweep.tune}: every setting of this list either equals the "
            "current settings or cannot run on this machine; give other settings"
        )
    return tried
