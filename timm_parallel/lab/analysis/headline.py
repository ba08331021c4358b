"""Headline result of a report: findings, and the command that trains the recommended configuration.
Each kind of comparison has its own rule.

Findings are the statements of a report, before they are put into words. A finding is a kind with
numbers. `lab/report/sentences.j2` has one macro per kind, with a parameter per number.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal

from timm_parallel.keys import TrainConfig
from timm_parallel.lab.analysis.groups import SPEED, Configuration, Group
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.sequential import EQUAL
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    SUPPORTED,
    Contrast,
    choose,
    corrected_values,
)

# A report names a run whose value is this many standard deviations worse than the median of its
# setting.
FAR = 8.0
TUNE = "experiment=tune"

Kind = Literal[
    # Strategies and numbers of devices, compared by their speed.
    "disturbed",
    "no_speed",
    "simplest",
    "not_compared",
    "alone",
    "no_gain",
    "faster_than_single",
    # Settings, compared by a metric.
    "better",
    "too_few_repeats",
    "all_equal",
    "best_mean",
    "only_setting",
    "until_decided",
    "expected",
    "not_worse",
    "other_baseline",
    "lost_runs",
    "far_off",
    "extended",
    "over_folds",
    "over_seeds",
    # A change of the code.
    "refused",
    "refused_by_code",
    "not_ended",
    "failed",
    "loses_runs",
    "not_measured",
    "head_is",
    "noted",
    "not_equal",
    "number_of_verdict",
    # Notes below a table.
    "devices_are_threads",
    "more_threads_than_cores",
    "unlike_threads",
    "odd_run",
    # A pair of configurations, and the jobs of a page.
    "pair",
    "ratio",
    "sweep_not_ended",
    "unknown_direction",
    "code_changed",
]


@dataclass(frozen=True)
class Finding:
    """A statement of a report. `numbers` has plain values only, as report.json stores them."""

    kind: Kind
    numbers: Mapping[str, Any] = field(default_factory=dict)


def finding(kind: Kind, **numbers: Any) -> Finding:
    """Build a finding from its numbers."""
    return Finding(kind, numbers)


def point_numbers(point: Configuration) -> dict[str, Any]:
    """Return what names a strategy on a number of devices."""
    return {
        "strategy": point.first.strategy,
        "devices": point.first.devices,
        "nodes": point.first.nodes,
        "options": point.options,
    }


def setting_numbers(setting: Configuration) -> dict[str, Any]:
    """Return what names a setting: its label, and how many of its runs were lost for each
    reason.
    """
    reasons = Counter(
        "not finite" if run.status == "done" else run.status.replace("_", " ")
        for run in setting.lost
    )
    return {
        "label": setting.label,
        "lost": dict(reasons),
        "runs": len(setting.lost) + len(setting.runs),
    }


@dataclass(frozen=True)
class Recommendation:
    """Headline result of a group of configurations. It recommends no configuration if the
    measurements are inconclusive.
    """

    group: Group
    findings: tuple[Finding, ...] = ()
    # Label of the recommended configuration.
    point: str | None = None
    # The comparison of two configurations on which the headline result relies.
    contrast: Contrast | None = None
    # Expected value of the headline metric, without the bias of choosing the best configuration.
    # None on a page about speed.
    value: float | None = None
    # 95 % confidence interval of the expected value of the headline metric.
    value_interval: tuple[float, float] | None = None
    # Findings that a reader of the report must know to rely on the headline result.
    notes: tuple[Finding, ...] = ()

    @property
    def command(self) -> str:
        """Command that trains the recommended configuration. Empty if there is none."""
        return command(self.group.named(self.point).runs[0]) if self.point else ""


def command(run: RunRecord) -> str:
    """Build the `python train.py …` command that trains with the settings of a run. The step limit
    of a run that only measured speed is left out.
    """
    # Reset the number of epochs too, because a run that measured speed stopped before it reached
    # them.
    resets = {
        "train.max_steps": "null",
        "train.epochs": TrainConfig.epochs,
        "train.evaluate_every": TrainConfig.evaluate_every,
    }
    reset = [f"{key}={value}" for key, value in resets.items()] if run.is_benchmark else []
    if not run.overrides:
        config = ["--config-path", str(run.folder), "--config-name", "config"]
        return shlex.join(["python", "train.py", *config, *reset])
    given = {override.lstrip("+~").partition("=")[0]: override for override in run.overrides}
    left_out = ["debug", "print_config", *(resets if run.is_benchmark else ())]
    if TUNE in run.overrides:
        # Leave out the experiment file of a tuning, because its settings are only for measuring
        # speed.
        left_out, reset = [*left_out, "experiment"], []
    kept = [
        text
        for key, text in given.items()
        if key not in left_out and not key.startswith(("hydra.", "hydra/", "sweep."))
    ]
    return shlex.join(["python", "train.py", *kept, *reset])


def recommend(group: Group) -> Recommendation:
    """Choose the headline result of a group of configurations. Among strategies, it is the simplest
    one that is not relevantly slower than the fastest. Among settings, it is the best one that is
    shown to be better than the baseline.
    """
    if group.scale.is_ratio and group.disturbed:
        disturbed = [run for run in group.runs if run.flags]
        [(reason, _)] = Counter(flag for run in disturbed for flag in run.flags).most_common(1)
        numbers = {"count": len(disturbed), "runs": len(group.runs), "reason": reason}
        return Recommendation(group, (finding("disturbed", **numbers),))
    if group.kind == "strategies":
        return _recommend_simple(group)
    lead = replace(_recommend_better(group), notes=tuple(_notes(group)))
    # A tuning recommends a change of the current settings, or nothing.
    is_change = lead.point != group.baseline or not group.scale.is_ratio
    return lead if is_change else replace(lead, point=None)


def _recommend_simple(group: Group) -> Recommendation:
    """Recommend the fastest strategy and number of devices, or a simpler choice that is not
    relevantly slower.
    """
    # Sort by nodes and devices. The sort is stable, so that configurations with equally many
    # devices keep their order: single, dp, ddp.
    simplest_first = sorted(group.members, key=lambda p: (p.first.nodes, p.first.devices))
    chosen = choose(
        group.rows[SPEED], [point.label for point in simplest_first], group.smallest_difference
    )
    if chosen is None:
        return Recommendation(group, (finding("no_speed"),))
    label, contrast, others = chosen
    kind: Kind = "simplest"
    if contrast is None:
        kind = "no_gain" if label == group.baseline else "faster_than_single"
        contrast = _over_single(group, label)
    apart = [finding("not_compared", others=others)] if others else []
    if contrast is not None:
        a, b = (point_numbers(group.named(name)) for name in (contrast.a, contrast.b))
        first = finding(kind, point=a, other=b, contrast=contrast.fields)
    elif apart:
        return Recommendation(group, tuple(apart))
    else:
        point = group.named(label)
        assert point.speed is not None
        first = finding("alone", point=point_numbers(point), speed=asdict(point.speed))
    return Recommendation(group, (first, *apart), label, contrast)


def _over_single(group: Group, label: str) -> Contrast | None:
    """Return the comparison of a configuration with single, or of single with the fastest other
    one. Return None if there is none.
    """
    known = [c for c in group.contrasts if c.b == group.baseline and c.effect is not None]
    if label != group.baseline:
        known = [c for c in known if c.a == label]
    # Prefer a configuration on several devices to another one on a single device, because the
    # report must say if more devices pay.
    return max(
        known, key=lambda c: (group.named(c.a).first.devices > 1, c.effect or 0), default=None
    )


def _recommend_better(group: Group) -> Recommendation:
    """Recommend the best setting that is shown to be better than the baseline. If there is none,
    state the smallest difference that the sweep could have detected.
    """
    if len(group.alive) == 1:
        return _only_setting(group)
    shown = [c for c in group.contrasts if c.verdict == SUPPORTED]
    baseline = group.named(group.baseline)
    if not shown and not (group.may_be_best == {group.baseline} and baseline.is_sound):
        return _none_better(group)
    # Take the best of the settings that are shown to be better than the baseline. If there are
    # none, the baseline itself is shown to be best, so compare it with the next one.
    contrast = _best(group, shown or group.contrasts)
    chosen = group.named(contrast.a) if shown else baseline
    first = finding(
        "better",
        metric=group.metric,
        setting=setting_numbers(group.named(contrast.a)),
        baseline=setting_numbers(baseline),
        contrast=contrast.fields,
        repeats=group.unit_of_repeats,
        best_of=None if shown else len(group.alive),
    )
    lead = _expect(group, chosen, [first], rivals=bool(shown))
    return replace(lead, point=chosen.label, contrast=contrast)


def _none_better(group: Group) -> Recommendation:
    highest, baseline = group.named(group.highest), group.named(group.baseline)
    of_highest = group.over_baseline(highest)
    known = [c for c in group.contrasts if c.low is not None]
    if not known:
        # Name the best mean of the table, because the settings may share no repeat.
        best_of_table = max(
            group.complete, key=lambda setting: group.scale.sign * fmean(setting.values.values())
        )
        few = finding(
            "too_few_repeats",
            metric=group.metric,
            setting=setting_numbers(best_of_table),
            baseline=setting_numbers(baseline),
            repeats=group.unit_of_repeats,
            shared=max((contrast.n for contrast in group.contrasts), default=0),
            most=max(len(setting.values) for setting in group.alive),
            value=best_of_table.mean,
            unit=group.scale.unit,
            lower_is_better=group.scale.lower_is_better,
            adds_repeats=group.left > 0,
        )
        return Recommendation(group, (few,))
    if all(setting.values == baseline.values for setting in group.alive):
        equal = finding(
            "all_equal",
            keys=group.keys,
            settings=len(group.alive),
            repeats=group.unit_of_repeats,
        )
        return replace(_expect(group, highest, []), findings=(equal,))
    # If the baseline has the best mean itself, compare it with the next setting.
    contrast = of_highest or _best(group, known)
    best = finding(
        "best_mean",
        metric=group.metric,
        setting=setting_numbers(group.named(contrast.a)),
        baseline=setting_numbers(baseline),
        repeats=group.unit_of_repeats,
        contrast=contrast.fields,
        is_baseline=of_highest is None,
    )
    return _expect(group, highest, [best])


def _best(group: Group, contrasts: Iterable[Contrast]) -> Contrast:
    return max(contrasts, key=lambda contrast: group.scale.sign * (contrast.effect or 0))


def _only_setting(group: Group) -> Recommendation:
    [setting] = group.alive
    interval = group.interval(setting)
    only = finding(
        "only_setting",
        metric=group.metric,
        setting=setting_numbers(setting),
        value=setting.mean,
        interval=interval,
        unit=group.scale.unit,
        count=len(setting.values),
        repeats=group.unit_of_repeats,
        is_left=len(group.members) > 1,
    )
    point = setting.label if setting.is_sound else None
    return Recommendation(group, (only,), point, value=setting.mean, value_interval=interval)


def _expect(
    group: Group, chosen: Configuration, findings: Sequence[Finding], rivals: bool = True
) -> Recommendation:
    """Estimate which value the chosen setting will have in new runs, without the bias of choosing
    the best. The estimate is the mean of one value per repeat: that of the setting which is best in
    all other repeats. It is left out if it lies outside of all runs of the chosen setting.

    `findings`: findings that come before the estimate. `rivals`: True to add the settings that are
    not shown to be worse.
    """
    if group.stops:
        # Choosing among all settings is not valid whenever the comparisons stop.
        return Recommendation(group, (*findings, _until_decided(group)))
    # Leave out settings with lost runs, because chance decided which of their runs have a value.
    settings, blocks = group.complete, {block for _, block, _ in group.rows[group.metric]}
    if chosen not in settings:
        settings, blocks = [*settings, chosen], set(chosen.values)
    rows = [
        (s.label, block, value)
        for s in settings
        for block, value in s.values.items()
        if block in blocks
    ]
    scores = corrected_values(rows, group.scale)
    others = sum(label != chosen.label for label, _ in scores.values())
    value, interval, own = None, None, chosen.values.values()
    if scores:
        mean = fmean(score for _, score in scores.values())
        # A value outside of all runs is that of other settings, one of which has a run that is far
        # off.
        if not others or min(own) <= mean <= max(own):
            value, interval = mean, _widened(group, chosen, mean)
    expected = finding(
        "expected",
        value=value,
        interval=interval,
        unit=group.scale.unit,
        settings=len(group.members),
        mean=chosen.mean,
        # In how many repeats another setting is the best of all other repeats.
        others=others,
        count=len(scores),
        repeats=group.unit_of_repeats,
    )
    others_left = [s for s in group.alive if s.label in group.may_be_best and s is not chosen]
    not_worse = finding(
        "not_worse",
        setting=setting_numbers(chosen),
        others=[setting_numbers(setting) for setting in others_left if setting.is_sound],
        rivals=len(others_left),
        compared=len(group.alive),
        settings=len(group.members),
    )
    stated = (*findings, expected, not_worse) if rivals else (*findings, expected)
    return Recommendation(group, stated, value=value, value_interval=interval)


def _until_decided(group: Group) -> Finding:
    assert group.plan is not None
    compared = zip(group.of_pairs(group.metric), group.contrasts, strict=True)
    equal = [e.a for e, contrast in compared if group.plan.answer(e, contrast) == EQUAL]
    return finding(
        "until_decided",
        repeats=group.unit_of_repeats,
        equal=equal,
        smallest=group.plan.smallest,
        unit=group.scale.unit,
        undecided=[setting.label for setting in group.undecided],
    )


def _widened(group: Group, chosen: Configuration, value: float) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of a setting, widened so that it also contains the
    values that are likely after the correction for choosing the best setting. `value`: the
    corrected value.
    """
    # Half of the error rate is left for the noise of the correction (Bonferroni).
    interval, mean = group.interval(chosen, LEVEL / 2), chosen.mean
    if interval is None or mean is None:
        return interval
    low, high = (end - (mean - value) for end in interval)
    low, high = min(low, interval[0]), max(high, interval[1])
    return (max(low, 0.0), min(high, 1.0)) if group.scale.is_proportion else (low, high)


def _notes(group: Group) -> Iterable[Finding]:
    split = group.metric.partition("/")[0]
    if group.missing_baseline:
        yield finding("other_baseline", missing=group.missing_baseline, baseline=group.baseline)
    lost = [setting for setting in group.members if setting.lost]
    if lost:
        by_settings = not all(setting.is_sound for setting in lost if setting.values)
        settings = [setting_numbers(setting) for setting in lost]
        yield finding("lost_runs", settings=settings, by_settings=by_settings)
    far = [
        {"run": run.name, "setting": setting.label, "value": run.metric_value}
        for setting, run in _far_off(group)
    ]
    if far:
        yield finding("far_off", runs=far, unit=group.scale.unit)
    sweeps = {run.sweep for run in group.runs}
    if len(sweeps) > 1 and any(len({run.sweep for run in s.runs}) > 1 for s in group.members):
        yield finding("extended", sweeps=len(sweeps))
    if any(len(setting.values) > 1 for setting in group.members) and not group.scale.is_ratio:
        if group.unit_of_repeats == "fold":
            yield finding("over_folds")
        # If all runs were evaluated on the same images, the noise comes only from training.
        elif len({run.result.get(f"data.{split}") for run in group.runs}) == 1:
            yield finding("over_seeds")


def _far_off(group: Group) -> list[tuple[Configuration, RunRecord]]:
    """Return (setting, run) for each run that is much worse than the median of its setting, for
    example because the training diverged.
    """
    shortfalls: list[tuple[float, Configuration, RunRecord]] = []
    for setting in group.alive:
        known = {
            run: group.scale.to(run.metric_value)
            for run in setting.runs
            if run.metric_value is not None
        }
        if len(known) > 2:
            middle = median(known.values())
            shortfalls += [
                (group.scale.sign * (middle - shift), setting, run) for run, shift in known.items()
            ]
    # Use the median absolute deviation, because a few diverged runs do not change it.
    usual = 1.4826 * median(abs(shortfall) for shortfall, *_ in shortfalls) if shortfalls else 0.0
    far = [(setting, run) for shortfall, setting, run in shortfalls if shortfall > FAR * usual]
    return far if usual else []
