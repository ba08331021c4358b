"""Configurations and groups of configurations. A configuration is a set of runs that differ in
their seed only, or in their fold. A group holds the configurations that are compared with each
other. The same classes serve strategies and settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, Literal

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.sequential import FIRST, NO_DIFFERENCE, WORSE, Plan, word_of
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    NOT_MEASURABLE,
    RATIO,
    SMALLEST_DIFFERENCE,
    SUPPORTED,
    Contrast,
    Estimate,
    Model,
    Row,
    Scale,
    Summary,
    decide,
    mean_interval,
    summarize,
)
from timm_parallel.machine.text import yaml_text

SPEED = "images_per_sec"
# Text for a value that was not recorded.
DASH = "—"
# Keys that do not change the training, or in which repeats differ on purpose.
NOT_A_SETTING = (
    *("paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
)


@dataclass(frozen=True, eq=False)
class Configuration:
    """All runs with the same settings. The runs are repeats of each other."""

    # Runs that can be compared.
    runs: tuple[RunRecord, ...]
    # Name of the configuration, which no other configuration of the group has.
    label: str
    # Key -> value, as far as configurations of the group differ in it. Among strategies, these are
    # the options of `parallel` that the strategy and the number of devices do not determine.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Runs that failed, or whose value of the metric is not finite.
    lost: tuple[RunRecord, ...] = ()
    # The key in which repeats differ: seed or data.fold.
    block: str = "seed"

    @property
    def first(self) -> RunRecord:
        """A run of the configuration, from which its settings can be read."""
        return (*self.runs, *self.lost)[0]

    @property
    def options(self) -> str:
        """Options of `parallel` as text, for example `bucket_cap_mb=1`."""
        return ", ".join(
            f"{key.removeprefix('parallel.')}={value}" for key, value in self.settings.items()
        )

    @property
    def is_simulated(self) -> bool:
        return any(run.is_simulated for run in self.runs)

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        return next((run.needless_threads for run in self.runs if run.needless_threads), None)

    @property
    def flagged(self) -> int:
        return sum(bool(run.flags) for run in self.runs)

    def measure(self, name: str) -> Summary | None:
        return summarize(run.measure(name) for run in self.runs)

    @property
    def speed(self) -> Summary | None:
        """Median and range of images/s over the repeats. None for dp over CPU threads, whose speed
        says nothing about GPUs.
        """
        return None if self.is_simulated else self.measure(SPEED)

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Median and range of the peak memory over the repeats, in bytes, for each device. Repeats
        that recorded fewer devices than others are ignored.
        """
        peaks = [run.peak_bytes for run in self.runs]
        devices = max(map(len, peaks), default=0)
        columns = zip(*(of_run for of_run in peaks if len(of_run) == devices), strict=True)
        return [summary for summary in map(summarize, columns) if summary]

    @cached_property
    def metrics(self) -> dict[str, Summary]:
        """Dictionary from the name of the headline metric (`checkpoint.metric`) to its median and
        range over the runs.
        """
        summaries = {
            name: summarize(run.metric_value for run in self.runs if run.metric == name)
            for name in dict.fromkeys(run.metric for run in self.runs)
        }
        return {name: summary for name, summary in summaries.items() if summary}

    @cached_property
    def values(self) -> dict[object, float]:
        """Headline metric as a dictionary from repeat to value. A repeat is a seed, or a fold if
        there are several folds. Several runs of a repeat count as their mean.
        """
        # Average the seeds of a fold, because they share its images and are not independent.
        blocks: dict[object, list[float]] = defaultdict(list)
        for run in self.runs:
            if run.metric_value is not None:
                blocks[run.config.get(self.block)].append(run.metric_value)
        return {block: fmean(values) for block, values in blocks.items()}

    @property
    def mean(self) -> float | None:
        """Mean of the headline metric over the repeats. None if all runs are lost."""
        return fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the headline metric over the repeats. None for a single repeat."""
        return stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def is_sound(self) -> bool:
        """True if no run ran out of memory or had a value that is not finite, and at least one run
        has a value. A report recommends only such a setting.
        """
        return bool(self.values) and not any(run.lost_by_settings for run in self.lost)


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Configurations that are compared with each other, with the results of the comparison. Groups
    are compared by identity, so two of them are never equal.
    """

    # Strategies and numbers of devices are compared by their speed, settings by a metric, which is
    # the speed in a tuning.
    kind: Literal["strategies", "settings"]
    # Differences from the other groups of the report, such as model, batch, data and code.
    title: str
    # The part of the title with settings other than model and batch, among strategies.
    settings: str = ""
    members: tuple[Configuration, ...]
    # Label of the configuration with which the others are compared. Empty if there is none.
    baseline: str
    # Measure -> (configuration, repeat, value) of each run whose value can be compared.
    rows: Mapping[str, Sequence[Row]]
    # Measure -> pairs of configurations that are compared.
    pairs: Mapping[str, Sequence[tuple[str, str]]]
    # The measure of the headline result, and its scale.
    metric: str = SPEED
    scale: Scale = RATIO
    # Smallest difference that the metric can have, such as the share of one image. 0 if unknown.
    rounding: float = 0.0
    # The requested baseline, if no run of it is done. Empty if the baseline is the requested one.
    missing_baseline: str = ""
    # Results of the comparison, by measure.
    by_measure: Mapping[str, Sequence[Contrast]] = field(default_factory=dict)
    # Smallest relative difference that matters. A smaller one does not count for a verdict.
    smallest_difference: float = SMALLEST_DIFFERENCE
    # Chance that any verdict on the measure of the headline result is wrong.
    level: float = LEVEL
    # Rules by which each comparison with the baseline ends. None if all are tested once, together.
    plan: Plan | None = None
    # Number of repeats that the sweep may still add to these runs.
    left: int = 0

    @property
    def runs(self) -> list[RunRecord]:
        return [run for configuration in self.members for run in configuration.runs]

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(run.hardware for run in self.runs))

    @property
    def disturbed(self) -> bool:
        """True if most runs were disturbed by other load, see RunRecord.flags. A page about speed
        then gives no verdict.
        """
        return 2 * sum(bool(run.flags) for run in self.runs) > len(self.runs)

    @property
    def contrasts(self) -> Sequence[Contrast]:
        """Effect, confidence interval and verdict of each compared pair of configurations, for the
        measure of the headline result.
        """
        return self.by_measure.get(self.metric, ())

    def named(self, label: str) -> Configuration:
        return next(c for c in self.members if c.label == label)

    def over_baseline(self, configuration: Configuration) -> Contrast | None:
        """Return the comparison of a configuration with the baseline by the measure of the headline
        result, or None if they were not compared.
        """
        pair = (configuration.label, self.baseline)
        return next((c for c in self.contrasts if (c.a, c.b) == pair), None)

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for member in self.members for key in member.settings))

    @property
    def alive(self) -> list[Configuration]:
        """Settings that have at least one value of the headline metric."""
        return [setting for setting in self.members if setting.values]

    @property
    def complete(self) -> list[Configuration]:
        """Settings without lost runs. If there are none, all settings that have a value."""
        return [setting for setting in self.alive if not setting.lost] or self.alive

    @property
    def blocks(self) -> int:
        return len({block for _, block, _ in self.rows[self.metric]})

    @property
    def unit_of_repeats(self) -> str:
        return self.members[0].block.removeprefix("data.")

    def interval(self, setting: Configuration, level: float = LEVEL) -> tuple[float, float] | None:
        """Return the confidence interval of the mean of a setting with the error rate `level`, or
        None for a single value.
        """
        values = setting.values.values()
        if self.plan:
            level = replace(self.plan, level=level).level_at(len(values))
        # With one image to each side, an interval near 100 % held the truth in 84 % only.
        return mean_interval(values, self.scale, 2 * self.rounding, level) if level else None

    @cached_property
    def highest(self) -> str:
        """Label of the setting with the best mean. A setting with lost runs is chosen only if every
        setting has lost runs.
        """
        better = {e.a: e.better for e in self.of_pairs(self.metric) if e.difference is not None}
        better[self.baseline] = 0.0
        candidates = [s.label for s in self.complete if s.label in better]
        return max(candidates or [self.baseline], key=lambda label: better[label])

    @cached_property
    def may_be_best(self) -> set[str]:
        """Labels of the settings that may be the best, because they are not shown to be worse than
        another one.
        """
        alive = {setting.label for setting in self.alive}
        beaten = {contrast.b for contrast in self.contrasts if contrast.verdict == SUPPORTED}
        if self.stops:
            # Only the comparisons with the baseline are valid whenever they stop.
            worse = {contrast.a for contrast in self.contrasts if word_of(contrast) == WORSE}
            return alive - worse - beaten
        others = [(self.highest, s.label) for s in self.alive if s.label != self.highest]
        # Compare each setting with the one that has the best mean, with Bonferroni's correction:
        # subset selection (Gupta, 1965), which Hsu (1984) bases on multiple comparisons with the
        # best. The truly best setting is among the rest in 97.5 of 100 cases. The tests are
        # one-sided at half the level, so that they agree with those against the baseline.
        level = LEVEL / 2 / max(1, len(others))
        estimates = self.estimates(self.metric, others)
        worse = {e.b for e in estimates if e.freedom and e.is_shown_better(level)}
        # Also remove settings that are shown to be worse than a setting with lost runs. Such a
        # setting is never the highest, but it may be better than the baseline.
        return alive - worse - beaten

    @property
    def stops(self) -> bool:
        """True if repeats were added until each comparison with the baseline was decided."""
        return self.plan is not None and not self.plan.is_fixed

    @property
    def undecided(self) -> list[Configuration]:
        """Settings whose comparison with the baseline more repeats may decide."""
        if self.plan is None or not self.left or self.missing_baseline:
            return []
        return [
            self.named(e.a)
            for e, contrast in zip(self.of_pairs(self.metric), self.contrasts, strict=True)
            if self.plan.answer(e, contrast) == NO_DIFFERENCE
            and not self.plan.is_futile(e, self.left)
            # A setting that is better, but whose runs diverge, is not recommended.
            and (e.n < FIRST or contrast.verdict != NOT_MEASURABLE)
        ]

    def best(self, count: int) -> list[Configuration]:
        """Return `count` settings in the order of the sweep: the baseline, and those with the best
        means.
        """

        def rank(setting: Configuration) -> tuple[bool, bool, float]:
            value = self.scale.sign * (setting.mean or 0.0)
            return setting.label == self.baseline, bool(setting.values), value

        ranked = sorted(self.members, key=rank, reverse=True)
        return [setting for setting in self.members if setting in ranked[:count]]

    def estimates(self, measure: str, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Estimate the difference of each pair of configurations, with its standard error. The
        estimates allow for any value that a lost run may have had.
        """
        return [self._bounded(self._model(measure, a, b).compare(a, b), measure) for a, b in pairs]

    def of_pairs(self, measure: str) -> list[Estimate]:
        """Estimate the differences of the compared pairs."""
        return self.estimates(measure, self.pairs[measure])

    def _model(self, measure: str, a: str, b: str) -> Model:
        if self.plan is None:
            return self._models[measure]
        # The boundaries of the plan are those of the paired t test, whose noise is that of the
        # pair alone.
        rows = [row for row in self.rows[measure] if row[0] in (a, b)]
        return Model(rows, self.scale, equal_noise=False, rounding=self.rounding)

    @cached_property
    def _models(self) -> dict[str, Model]:
        # Speeds of all configurations have about equal noise. For another metric, each setting has
        # its own noise.
        return {
            measure: Model(rows, self.scale, self.scale.is_ratio, self.rounding)
            for measure, rows in self.rows.items()
        }

    def _bounded(self, e: Estimate, measure: str) -> Estimate:
        """Return an estimate that allows for the unknown values of lost runs. Each such value is
        taken to be between the worst and the best value of the group.
        """
        a, b = self.named(e.a), self.named(e.b)
        if not a.lost and not b.lost:
            return e
        values = [value for *_, value in self.rows[measure]]
        sign = e.scale.sign
        worst, best = sorted((min(values), max(values)), key=lambda value: sign * value)
        down = _lost_shift(a, worst, e.scale) + _lost_shift(b, best, e.scale)
        up = _lost_shift(a, best, e.scale) + _lost_shift(b, worst, e.scale)
        plain = self._bounded(e.plain, measure) if e.plain else None
        return replace(e, slack=(up, down) if sign < 0 else (down, up), plain=plain)

    def checked(self, contrast: Contrast) -> Contrast:
        """Return a comparison without its verdict if the measurements do not allow one: most runs
        of a comparison of strategies were disturbed, or a setting is shown to be better although
        some of its runs ran out of memory or diverged, or one of the pair has one value.
        """
        if self.kind == "strategies":
            is_void = self.disturbed
        else:
            a, b = self.named(contrast.a), self.named(contrast.b)
            is_doubtful = min(len(a.values), len(b.values)) < 2 or not a.is_sound
            is_void = contrast.verdict == SUPPORTED and is_doubtful
        if is_void:
            return replace(contrast, verdict=NOT_MEASURABLE, blocks_needed=None)
        return contrast


def simplest(members: Iterable[Configuration], strategy: str, devices: int) -> Configuration | None:
    """Return the configuration of a strategy on a number of devices that has the fewest nodes and
    the fewest options.
    """

    def simplicity(point: Configuration) -> tuple[int, int, str]:
        options_set = sum(value != "null" for value in point.settings.values())
        return point.first.nodes, options_set, point.options

    points = [p for p in members if (p.first.strategy, p.first.devices) == (strategy, devices)]
    return min(points, key=simplicity, default=None)


def _lost_shift(setting: Configuration, end: float, scale: Scale) -> float:
    """Return by how much the mean of a setting, on the scale, would change if each of its lost runs
    had reached the value `end`. The caller passes the best or the worst value of the group.
    """
    if not setting.lost:
        return 0.0
    share = len(setting.lost) / (len(setting.lost) + len(setting.runs))
    mean = fmean(scale.to(value) for value in setting.values.values())
    shift = abs(scale.to(end) - mean)
    return share * shift if math.isfinite(shift) else math.inf


def with_contrasts(
    groups: Sequence[Group],
    smallest_difference: float = SMALLEST_DIFFERENCE,
    levels: Mapping[str, float] | None = None,
) -> list[Group]:
    """Compare pairs of configurations in each group, and return copies of the groups with the
    results: effect, confidence interval and verdict of each pair.

    `levels`: dictionary from measure to the chance that any verdict on this measure is wrong. The
    key "" stands for the measure of the headline result. By default, only this measure is compared.
    """
    known: dict[Group, dict[str, list[Contrast]]] = {group: {} for group in groups}
    # All groups of a page have the same plan.
    plan = groups[0].plan if groups else None
    for measure, level in (levels or {"": LEVEL}).items():
        estimates = {group: group.of_pairs(measure or group.metric) for group in groups}
        # Decide on the pairs of all groups in one call, because Holm's rule corrects for the number
        # of all pairs.
        every = [e for of_group in estimates.values() for e in of_group]
        if plan is None:
            decided = iter(decide(every, smallest_difference, level))
        else:
            decided = (_decide_alone(e, plan, smallest_difference) for e in every)
        for group, of_group in estimates.items():
            contrasts = [group.checked(next(decided)) for _ in of_group]
            known[group][measure or group.metric] = contrasts
    return [
        replace(group, by_measure=by_measure, smallest_difference=smallest_difference)
        for group, by_measure in known.items()
    ]


def _decide_alone(e: Estimate, plan: Plan, smallest_difference: float) -> Contrast:
    """Compare a pair of configurations by the test of its plan."""
    [contrast] = decide([e], smallest_difference, plan.level_at(e.n))
    # The difference that could have been shown is known only if no more repeats were possible.
    if plan.is_fixed or e.n >= plan.limit:
        return contrast
    return replace(contrast, detectable=None, blocks_needed=None)


def join_short(items: Iterable[str], limit: int = 4) -> str:
    unique = list(dict.fromkeys(items))
    rest = [f"and {len(unique) - limit} more"] if len(unique) > limit else []
    return "; ".join(unique[:limit] + rest)


def model_name(run: RunRecord) -> str:
    """Return the name of a run's model, for example `resnet18`. If model.kwargs changes the model,
    add its size: `vit_tiny_patch16_224 (61,114 parameters)`.
    """
    name = str(run.result.get("model") or DASH)
    if not any(key.startswith("model.kwargs.") for key in run.config):
        return name
    parameters = run.integer("parameters")
    return name if parameters is None else f"{name} ({parameters:,} parameters)"


def describe_settings(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={yaml_text(run.config.get(key))}" for key in keys)


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Return the config keys that differ between the runs, as a dictionary from key to values. A
    missing key counts as null.
    """
    seen = values(run.config for run in runs)
    # The config of a job that has not started yet has auto where others have a value.
    known = {key: [value for value in of_key if value != "auto"] for key, of_key in seen.items()}
    return {key: of_key for key, of_key in known.items() if len(of_key) > 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the distinct values of each dotted key in several configs. A key that a config does
    not have counts as None. Empty configs are ignored.
    """
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {
        key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys
    }
