"""What a search may try: keys with values in Hydra's sweep syntax, and the config of one point of that space.

`interval(a,b)`, `tag(log,interval(a,b))`, `int(interval(a,b))`, `range(a,b,step)`, `choice(a,b)` and `a,b` mean what they
mean to Hydra: an interval is continuous, a range ends before b. Groups (`model=tiny,resnet18`) cannot be searched: later
trials would have to read conf/ again, which may have been edited. Sweep over them, or name the key that differs
(`model.name=…`).
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from src.engine.config.cluster import CODE
from src.engine.config.compose import Command, to_config
from src.engine.config.names import is_known, is_lower_better, key_hint
from src.engine.machine.files import write_text
from src.engine.sweep.points import Point, given, make_point, settle
from src.schema import Config

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FROZEN = "search.yaml"  # in the sweep folder
MOST_CORNERS = 32  # combinations of ends that are tried before a search is refused
NOT_SEARCHED = ("hydra", "search", "sweep", "paths", "cluster", "resume", "optimized_metric", "task_name", "tags")


@dataclass(frozen=True)
class Dimension:
    """One searched key: options, as texts in Hydra's syntax, or numbers from `low` to `high`, both included."""

    name: str  # dotted
    key: str  # as an override names it: with + or ++ where the config does not have it yet
    text: str  # as it was written
    options: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None  # None: any number between
    log: bool = False

    def override(self, value: float | str) -> str:
        return f"{self.key}={value}"

    def distribution(self) -> BaseDistribution:
        from optuna import distributions

        if self.options:
            return distributions.CategoricalDistribution(self.options)
        if isinstance(self.low, int) and isinstance(self.step, int):
            return distributions.IntDistribution(self.low, int(self.high), self.log, self.step)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)


def read_space(command: Command) -> list[Dimension]:
    """The space of a command line: `search.params`, `hydra.sweeper.params`, and what the command line sweeps over.

    A key that the command line sets to one value is not searched.
    """
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser

    in_files = {**(command.tree.hydra.sweeper.get("params") or {}), **command.config.search.params}
    space = {dimension.name: dimension for dimension in parse_space(in_files)}
    for override in OverridesParser.create(config_loader=command.loader).parse_overrides(given(command.tree)):
        if override.is_sweep_override():
            space[override.key_or_group] = _dimension(override)
        else:
            space.pop(override.key_or_group, None)
    for name, dimension in space.items():
        if command.loader.get_group_options(name, ObjectType.CONFIG):
            raise ValueError(
                f"{name}={dimension.text}: {name} is a group, and a search takes keys; sweep over it "
                f"(-m {name}=… without search=…), or search {name}.<key>"
            )
        if name.split(".")[0] in NOT_SEARCHED:
            raise ValueError(f"{name}={dimension.text}: cannot be searched; give it one value")
        if not is_known(name):
            raise ValueError(f"{name}={dimension.text}: unknown key {name}{key_hint(name)}")
    return list(space.values())


def parse_space(params: dict[str, Any]) -> list[Dimension]:
    """The dimensions of `search.params`: key -> text in Hydra's sweep syntax."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    space = []
    for key, text in params.items():
        try:
            override = OverridesParser.create().parse_override(f"{key}={text}")
        except HydraException as error:
            raise ValueError(f"search.params.{key}={text}: cannot be read: {str(error).splitlines()[0]}") from error
        if not override.is_sweep_override():
            raise ValueError(
                f"search.params.{key}={text}: nothing to search; give interval(a,b), range(a,b) or choice(a,b), "
                f"or set {key} itself"
            )
        space.append(_dimension(override))
    return space


def _dimension(override: Any) -> Dimension:
    """Of a parsed sweep override."""
    name, sweep = override.key_or_group, override.value()
    written = str(override.input_line)
    key, _, text = written.partition("=")
    tags = set(getattr(sweep, "tags", ()))
    if override.is_interval_sweep():
        if tags - {"log", "int", "float"}:
            raise ValueError(f"{written}: unknown tag {', '.join(sorted(tags))}; allowed: log, int, float")
        low, high = (int(sweep.start), int(sweep.end)) if "int" in tags else (sweep.start, sweep.end)
        if not low < high:
            raise ValueError(f"{written}: the interval must go from a smaller to a larger number")
        if "log" in tags and low <= 0:
            raise ValueError(f"{written}: a log scale must begin above 0")
        return Dimension(name, key, text, (), low, high, 1 if isinstance(low, int) else None, "log" in tags)
    if tags:
        raise ValueError(f"{written}: tag({', '.join(sorted(tags))}) goes with interval(a,b) only")
    if override.is_range_sweep():
        numbers = sorted(sweep.range()) if sweep.step else []
        if not numbers:
            raise ValueError(f"{written}: this range holds no number")
        return Dimension(name, key, text, (), numbers[0], numbers[-1], abs(sweep.step))
    if not override.is_choice_sweep():
        raise ValueError(f"{written}: give interval(a,b), range(a,b) or choice(a,b)")
    return Dimension(name, key, text, tuple(dict.fromkeys(override.sweep_string_iterator())))


def check_space(config: Config, base: DictConfig, space: list[Dimension]) -> None:
    """Refuse settings that contradict each other, ends of a dimension that no config may have, and trials that cannot run here."""
    settings, metric = config.search, config.optimized_metric
    if settings.direction is not None and settings.direction != natural_direction(metric):
        raise ValueError(f"search.direction={settings.direction}: {metric} is one to {natural_direction(metric)}")
    if settings.pruner != "none" and not metric.startswith("val/"):
        raise ValueError(
            f"search.pruner={settings.pruner}: {metric} is known at a trial's end only; set search.pruner=none"
        )
    if config.sweep.dry_run or config.sweep.repeats != 1:
        key = "dry_run=true" if config.sweep.dry_run else f"repeats={config.sweep.repeats}"
        raise ValueError(f"sweep.{key}: not with a search, which chooses its trials as it goes")
    if not space:
        raise ValueError("search.params: nothing to search; give keys, e.g. 'optim.lr=tag(log,interval(1e-4,1e-1))'")
    ends: list[list[str]] = []
    for dimension in space:
        ends.append([dimension.override(value) for value in dimension.options or (dimension.low, dimension.high)])
        try:
            for override in ends[-1]:
                trial_point(base, [override], 0)
        except ValueError as error:
            whole = "; for whole numbers write int(interval(a,b))" if "Integer" in str(error) else ""
            raise ValueError(f"{dimension.name}={dimension.text}: {error}{whole}") from error
    corners = [list(corner) for corner in itertools.islice(itertools.product(*ends), MOST_CORNERS)]
    if not any(trial_point(base, corner, 0).reason == "" for corner in corners):
        reason = trial_point(base, corners[0], 0).reason
        raise ValueError(f"no trial of this search can run here, for example: {reason}")


def natural_direction(metric: str) -> str:
    return "minimize" if is_lower_better(metric) else "maximize"


def trial_point(base: DictConfig, overrides: list[str], number: int) -> Point:
    """The point with `overrides` (one value each) on the frozen base."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    tree = copy.deepcopy(base)
    for override in OverridesParser.create().parse_overrides(overrides):
        try:
            added = override.is_add() or override.is_force_add()
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=added)
        except OmegaConfBaseException as error:
            raise ValueError(f"{override.input_line}: {str(error).splitlines()[0]}") from error
    with read_write(tree.hydra):
        tree.hydra.overrides.task = [*given(tree), *overrides]
    point = make_point(tree, given(tree), number)
    settle(point)
    return point


def freeze_search(folder: Path, base: DictConfig, space: list[Dimension], **settings: Any) -> None:
    """Write all that later trials need: `base` with the whole space and the final settings of the search in it."""
    tree = copy.deepcopy(base)
    with read_write(tree), open_dict(tree):
        tree.search.params = {dimension.key: dimension.text for dimension in space}
        tree.search.update(settings)
        tree.hydra.overrides.task = _of_a_trial(given(tree))
        tree.cluster.setup, tree.cluster.extra = None, []  # code, which every command gives itself
    header = "# The search as composed at its start: settings, space, and the config that every trial starts from.\n"
    write_text(folder / FROZEN, header + OmegaConf.to_yaml(tree))


def read_search(folder: Path) -> tuple[Config, DictConfig, list[Dimension]]:
    """Settings, base and space that `freeze_search` wrote."""
    try:
        tree = OmegaConf.load(folder / FROZEN)
        assert isinstance(tree, DictConfig)
    except (OSError, AssertionError, YAMLError):
        raise ValueError(f"{folder / FROZEN}: cannot be read") from None
    OmegaConf.set_struct(tree, True)
    config = to_config(tree)
    return config, tree, parse_space(config.search.params)


def _of_a_trial(overrides: list[str]) -> list[str]:
    """The overrides that a search hands on to its trials: without the search itself, so that a trial's run needs no -m."""
    not_kept = ("search=", "search.", "sweep.", *(f"cluster.{key}=" for key in CODE))
    kept = [item for item in overrides if not item.lstrip("+").startswith(not_kept)]
    by_command = any(item.lstrip("+").startswith("search=") for item in overrides)
    return kept if by_command else [*kept, "search.sampler=null"]
