"""Base classes of a comparison. A configuration is a set of runs with the same settings. A question
is a group of configurations that are compared by a measure on a scale. One function estimates the
differences and decides for all questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.scales import RATIO, Scale
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    NOT_MEASURABLE,
    SMALLEST_DIFFERENCE,
    Contrast,
    Estimate,
    Row,
    Summary,
    decide,
    estimate,
    summarize,
)

# Keys that do not change the training, or in which repeats differ on purpose.
NOT_A_SETTING = (
    *("paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
)


@dataclass(frozen=True)
class Configuration:
    """All runs with the same settings. The runs are repeats of each other."""

    runs: tuple[RunRecord, ...]
    # Name of the configuration, which no other configuration of the report's table has.
    label: str

    @property
    def is_simulated(self) -> bool:
        return any(run.is_simulated for run in self.runs)

    def measure(self, name: str) -> Summary | None:
        return summarize(run.measure(name) for run in self.runs)

    @property
    def speed(self) -> Summary | None:
        """Median and range of images/s over the repeats. None for dp over CPU threads, whose speed
        says nothing about GPUs.
        """
        return None if self.is_simulated else self.measure("images_per_sec")

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Median and range of the peak memory over the repeats, in bytes, for each device. Repeats
        that recorded fewer devices than others are ignored.
        """
        peaks = [dict(enumerate(run.peak_bytes)) for run in self.runs]
        devices = max(map(len, peaks), default=0)
        return list(
            summarize_columns(of_run for of_run in peaks if len(of_run) == devices).values()
        )


C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Generic[C]):
    """A group of configurations that are compared with each other by the measures of their runs,
    with the results of the comparison.
    """

    members: tuple[C, ...] = ()
    by_measure: Mapping[str, Sequence[Contrast]] = field(default_factory=dict, compare=False)
    # Smallest relative difference that matters. A smaller one does not count for a verdict.
    smallest_difference: float = SMALLEST_DIFFERENCE
    # Chance that any verdict on the measure of the headline result is wrong.
    level: float = LEVEL
    # The measure of the headline result.
    metric: str = "images_per_sec"
    scale: Scale = RATIO

    def rows(self, measure: str) -> list[Row]:
        """Return (configuration, repeat, value) of each run whose value can be compared. `measure`:
        name of the value, such as `images_per_sec`.
        """
        raise NotImplementedError

    def pairs(self, measure: str) -> list[tuple[str, str]]:
        """Return the pairs of configurations to compare. `measure`: name of the compared value,
        such as `images_per_sec`.
        """
        raise NotImplementedError

    def is_void(self, contrast: Contrast) -> bool:
        """Return True if the measurements do not allow a verdict on a pair of configurations."""
        return self.disturbed

    @property
    def runs(self) -> list[RunRecord]:
        return [run for configuration in self.members for run in configuration.runs]

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

    @property
    def detectable(self) -> list[float]:
        """Smallest difference that the comparison of each pair of configurations can show, for the
        measure of the headline result.
        """
        return [c.detectable for c in self.contrasts if c.detectable is not None]

    def named(self, label: str) -> C:
        return next(c for c in self.members if c.label == label)

    def contrast(self, a: Configuration, b: Configuration | None) -> Contrast | None:
        """Return the comparison of two configurations by the measure of the headline result, or
        None if they were not compared.
        """
        pair = (a.label, b.label if b else None)
        return next((c for c in self.contrasts if (c.a, c.b) == pair), None)

    def estimates(self, measure: str, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Estimate the difference of each pair of configurations, with its standard error."""
        return estimate(self.rows(measure), pairs, self.scale)


Q = TypeVar("Q", bound=Question)


def with_contrasts(
    questions: Sequence[Q],
    smallest_difference: float = SMALLEST_DIFFERENCE,
    levels: Mapping[str, float] | None = None,
) -> list[Q]:
    """Compare pairs of configurations in each group, and return copies of the groups with the
    results: effect, confidence interval and verdict of each pair.

    `levels`: dictionary from measure to the chance that any verdict on this measure is wrong. The
    key "" stands for the measure of the headline result. By default, only this measure is compared.
    """
    known: list[dict[str, list[Contrast]]] = [{} for _ in questions]
    for measure, level in (levels or {"": LEVEL}).items():
        names = [measure or question.metric for question in questions]
        asked = zip(questions, names, strict=True)
        estimates = [q.estimates(name, q.pairs(name)) for q, name in asked]
        # Decide on the pairs of all groups in one call, because Holm's rule corrects for the number
        # of all pairs.
        decided = iter(decide([e for of in estimates for e in of], smallest_difference, level))
        for place, question in enumerate(questions):
            contrasts = [next(decided) for _ in estimates[place]]
            known[place][names[place]] = [
                replace(contrast, verdict=NOT_MEASURABLE, blocks_needed=None)
                if question.is_void(contrast)
                else contrast
                for contrast in contrasts
            ]
    level = (levels or {}).get("", LEVEL)
    return [
        replace(
            question, by_measure=by_measure, smallest_difference=smallest_difference, level=level
        )
        for question, by_measure in zip(questions, known, strict=True)
    ]


def summarize_columns(rows: Iterable[Mapping[Any, float | None]]) -> dict[str, Summary]:
    columns: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[str(name)].append(value)
    summaries = {name: summarize(column) for name, column in columns.items()}
    return {name: summary for name, summary in summaries.items() if summary}


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Return the config keys that differ between the runs, as a dictionary from key to values. A
    missing key counts as null.
    """
    differing = {}
    for key, seen in values(run.config for run in runs).items():
        # The config of a job that has not started yet has auto where others have a value.
        known = [value for value in seen if value != "auto"]
        if len(known) > 1:
            differing[key] = known
    return differing


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the distinct values of each dotted key in several configs. A key that a config does
    not have counts as None. Empty configs are ignored.
    """
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {
        key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys
    }
