"""Configurations, which are runs (repeats) with the same settings, and the question of a page: what
is measured on a run, on which scale, and which configurations are compared. One function estimates
and decides for all questions.
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

# Settings that do not change the training, or by which repeats differ on purpose.
NOT_A_SETTING = (
    *("paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
)


@dataclass(frozen=True)
class Configuration:
    """All runs (repeats) with the same settings."""

    runs: tuple[RunRecord, ...]
    label: str  # names it in its group

    @property
    def is_simulated(self) -> bool:
        return any(run.is_simulated for run in self.runs)

    def measure(self, name: str) -> Summary | None:
        return summarize(run.measure(name) for run in self.runs)

    @property
    def speed(self) -> Summary | None:
        """Median and range of images/s over the repeats; None for dp over CPU threads, which says
        nothing about GPUs.
        """
        return None if self.is_simulated else self.measure("images_per_sec")

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Median and range of peak memory in bytes, per device. Ignores repeats that recorded fewer
        devices than others.
        """
        peaks = [dict(enumerate(run.peak_bytes)) for run in self.runs]
        devices = max(map(len, peaks), default=0)
        return list(
            summarize_columns(of_run for of_run in peaks if len(of_run) == devices).values()
        )


C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Generic[C]):
    """Configurations that are compared by the measures of their runs."""

    members: tuple[C, ...] = ()
    by_measure: Mapping[str, Sequence[Contrast]] = field(default_factory=dict, compare=False)
    smallest_difference: float = SMALLEST_DIFFERENCE  # of the contrasts' verdicts
    level: float = LEVEL  # of the headline's measure: chance that any contrast is wrong
    metric: str = "images_per_sec"  # the measure of the headline
    scale: Scale = RATIO

    def rows(self, measure: str) -> list[Row]:
        """Return (configuration, block, value of `measure`) of everything that may be compared."""
        raise NotImplementedError

    def pairs(self, measure: str) -> list[tuple[str, str]]:
        """Return the pairs of configurations to compare."""
        raise NotImplementedError

    def is_void(self, contrast: Contrast) -> bool:
        """Return True if the measurements do not allow the verdict of `contrast`."""
        return self.disturbed

    @property
    def runs(self) -> list[RunRecord]:
        return [run for configuration in self.members for run in configuration.runs]

    @property
    def disturbed(self) -> bool:
        """True if most runs were disturbed, see RunRecord.flags. A page about speed then gives no
        verdict.
        """
        return 2 * sum(bool(run.flags) for run in self.runs) > len(self.runs)

    @property
    def contrasts(self) -> Sequence[Contrast]:
        """Contrasts of the measure of the headline."""
        return self.by_measure.get(self.metric, ())

    @property
    def detectable(self) -> list[float]:
        """Smallest differences that the contrasts of the headline's measure can show."""
        return [c.detectable for c in self.contrasts if c.detectable is not None]

    def named(self, label: str) -> C:
        return next(c for c in self.members if c.label == label)

    def contrast(self, a: Configuration, b: Configuration | None) -> Contrast | None:
        """Return the contrast of the headline's measure between two configurations."""
        pair = (a.label, b.label if b else None)
        return next((c for c in self.contrasts if (c.a, c.b) == pair), None)

    def estimates(self, measure: str, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Estimate the differences of pairs of configurations."""
        return estimate(self.rows(measure), pairs, self.scale)


Q = TypeVar("Q", bound=Question)


def with_contrasts(
    questions: Sequence[Q],
    smallest_difference: float = SMALLEST_DIFFERENCE,
    levels: Mapping[str, float] | None = None,
) -> list[Q]:
    """Return the questions with a contrast (effect, interval and verdict) for each pair to compare,
    by measure. `levels`: chance of a wrong verdict by measure; "" is that of the headline, and by
    default the only one.
    """
    known: list[dict[str, list[Contrast]]] = [{} for _ in questions]
    for measure, level in (levels or {"": LEVEL}).items():
        names = [measure or question.metric for question in questions]
        asked = zip(questions, names, strict=True)
        estimates = [q.estimates(name, q.pairs(name)) for q, name in asked]
        # In one call, because Holm's rule corrects for the number of pairs in all groups.
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
    """Return the config keys that differ between the runs, with their values; a missing key counts
    as null.
    """
    return {key: seen for key, seen in values(run.config for run in runs).items() if len(seen) > 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the distinct values of each dotted key in several configs. A missing key counts as
    None; empty configs are ignored.
    """
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {
        key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys
    }
