"""Headline result of a report: findings, and the command that trains the recommended configuration.
Each kind of comparison has its own rule.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

from timm_parallel.keys import TrainConfig
from timm_parallel.lab.analysis.findings import (
    Finding,
    Kind,
    finding,
    other_baseline,
    point_numbers,
    setting_numbers,
)
from timm_parallel.lab.analysis.groups import SPEED, Configuration, Group, with_contrasts
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.selection import choose, corrected_values
from timm_parallel.lab.analysis.sequential import EQUAL
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    SUPPORTED,
    Contrast,
)

# A report names a run whose value is this many standard deviations worse than the median of its
# setting.
FAR = 8.0
TUNE = "experiment=tune"
# Keys that change more than speed and memory. A report that recommends such a setting adds advice.
CHANGES_TRAINING = ("train.precision", "data.batch_size", "data.batch_size_per_device")


@dataclass(frozen=True)
class Recommendation:
    """Headline result of a group of configurations. It recommends no configuration if the
    measurements are inconclusive.
    """

    group: Group
    findings: tuple[Finding, ...] = ()
    command: str = ""
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


def command(run: RunRecord) -> str:
    """Build the `python train.py …` command that trains with the settings of a run. The step limit
    of a run that only measured speed is left out.
    """
    full: dict[str, object] = {}
    if run.is_benchmark:
        # Reset the number of epochs too, because a run that measured speed stopped before it
        # reached them.
        full = {
            "train.max_steps": "null",
            "train.epochs": TrainConfig.epochs,
            "train.evaluate_every": TrainConfig.evaluate_every,
        }
    arguments = ["--config-path", str(run.folder), "--config-name", "config"]
    if run.overrides:
        given = {override.lstrip("+~").partition("=")[0]: override for override in run.overrides}
        dropped = ("hydra.", "hydra/", "sweep.")
        kept = [
            key
            for key in given
            if not key.startswith(dropped) and key not in ("debug", "print_config", *full)
        ]
        if given.get("experiment") == TUNE:
            # Leave out the experiment file of a tuning, because its settings are only for measuring
            # speed.
            kept.remove("experiment")
            full = {}
        arguments = [given[key] for key in kept]
    return shlex.join(
        ["python", "train.py", *arguments, *(f"{key}={value}" for key, value in full.items())]
    )


def recommend(group: Group) -> Recommendation:
    """Choose the headline result of a group of configurations. Among strategies, it is the simplest
    one that is not relevantly slower than the fastest. Among settings, it is the best one that is
    shown to be better than the baseline. In a tuning, it is the fastest one that is shown to be
    faster than the current settings.
    """
    if group.kind == "settings":
        return replace(_recommend_better(group), notes=tuple(_notes(group)))
    if group.disturbed:
        disturbed = [run for run in group.runs if run.flags]
        [(reason, _)] = Counter(flag for run in disturbed for flag in run.flags).most_common(1)
        numbers = {"count": len(disturbed), "runs": len(group.runs), "reason": reason}
        return Recommendation(group, (finding("disturbed", **numbers),))
    return _recommend_simple(group) if group.kind == "strategies" else _recommend_fastest(group)


def _recommend_simple(group: Group) -> Recommendation:
    """Recommend the fastest strategy and number of devices, or a simpler choice that is not
    relevantly slower.
    """
    # Sort by nodes and devices. The sort is stable, so that configurations with equally many
    # devices keep their order: single, dp, ddp.
    simplest_first = sorted(group.members, key=lambda point: (point.nodes, point.devices))
    chosen = choose(
        group.rows[SPEED], [point.label for point in simplest_first], group.smallest_difference
    )
    if chosen is None:
        return Recommendation(group, (finding("no_speed"),))
    label, contrast, others = chosen
    point = group.named(label)
    if contrast is None:
        contrast, findings = _compare_with_single(group, point)
        if others and contrast is None:
            apart = finding("no_common_host", point=point_numbers(point), others=others)
            return Recommendation(group, (apart,))
    else:
        simplest = finding(
            "simplest",
            point=point_numbers(point),
            fastest=point_numbers(group.named(contrast.b)),
            smallest_difference=group.smallest_difference,
            contrast=contrast.fields,
        )
        findings = [simplest]
    if others:
        findings.append(finding("not_compared", others=others))
    return Recommendation(group, tuple(findings), command(point.runs[0]), point.label, contrast)


def _compare_with_single(
    group: Group, point: Configuration
) -> tuple[Contrast | None, list[Finding]]:
    """Compare a configuration with strategy single. If the configuration is single itself, compare
    it with the fastest other one. Return (comparison, findings).
    """
    assert point.speed is not None
    alone = {"point": point_numbers(point), "speed": asdict(point.speed)}
    if point.label == group.baseline:
        contrasts = map(group.over_baseline, group.members)
        against = [c for c in contrasts if c and c.effect is not None]
        if not against:
            return None, [finding("only_strategy", **alone)]
        # Prefer a configuration on several devices to another one on a single device, because the
        # report must say if more devices pay.
        second = max(against, key=lambda c: (group.named(c.a).devices > 1, c.effect or 0))
        return second, [_over_single("no_gain", group, second)]
    contrast = group.over_baseline(point)
    if contrast is None or contrast.effect is None:
        return None, [finding("no_single", **alone)]
    findings = [_over_single("faster_than_single", group, contrast)]
    return contrast, findings + _second_device(group, point)


def _over_single(kind: Kind, group: Group, contrast: Contrast) -> Finding:
    """Return a finding on a strategy and its comparison with single."""
    point, single = (point_numbers(group.named(label)) for label in (contrast.a, contrast.b))
    return finding(kind, point=point, single=single, contrast=contrast.fields)


def _second_device(group: Group, point: Configuration) -> list[Finding]:
    """Return the gain from a second device. The list is empty if the recommended configuration has
    two devices, or if the gain is unknown.
    """
    of_two = [group.over_baseline(p) for p in group.members if p.devices == 2]
    known = [contrast for contrast in of_two if contrast and contrast.effect is not None]
    if point.devices == 2 or not known:
        return []
    return [
        _over_single("second_device", group, max(known, key=lambda contrast: contrast.effect or 0))
    ]


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
    return replace(
        _expect(group, chosen, [first], rivals=bool(shown)),
        command=command(chosen.runs[0]),
        point=chosen.label,
        contrast=contrast,
    )


def _none_better(group: Group) -> Recommendation:
    highest, baseline = group.named(group.highest), group.named(group.baseline)
    of_highest = group.over_baseline(highest)
    known = [c for c in group.contrasts if c.low is not None]
    if not known:
        few = finding(
            "too_few_repeats",
            metric=group.metric,
            setting=setting_numbers(highest),
            baseline=setting_numbers(baseline),
            repeats=group.unit_of_repeats,
            shared=max((contrast.n for contrast in group.contrasts), default=0),
            most=max(len(setting.values) for setting in group.alive),
            value=highest.mean,
            unit=group.scale.unit,
            lower_is_better=group.scale.lower_is_better,
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
    return _expect(group, highest, [best, *_better_without_far_runs(group)])


def _best(group: Group, contrasts: Iterable[Contrast]) -> Contrast:
    return max(contrasts, key=lambda contrast: group.scale.sign * (contrast.effect or 0))


def _better_without_far_runs(group: Group) -> Iterable[Finding]:
    """Yield the best setting that is better than the baseline if runs of the baseline that are far
    worse than its others, such as diverged ones, do not count.
    """
    far = [run for setting, run in _far_off(group) if setting.label == group.baseline]
    # Two values that are left would say little about the noise of the baseline.
    if len(group.named(group.baseline).values) - len(far) < 3:
        return
    left_out = {(group.baseline, run.config.get(group.members[0].block)) for run in far}
    rows = [row for row in group.rows[group.metric] if row[:2] not in left_out]
    rest = replace(group, rows={group.metric: rows})
    [rest] = with_contrasts([rest], group.smallest_difference) if far else [rest]
    shown = [contrast for contrast in rest.contrasts if contrast.verdict == SUPPORTED]
    if far and shown:
        contrast = _best(group, shown)
        yield finding(
            "better_without",
            runs=[run.name for run in far],
            metric=group.metric,
            setting=setting_numbers(group.named(contrast.a)),
            contrast=contrast.fields,
        )


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
    lead = Recommendation(group, (only,), value=setting.mean, value_interval=interval)
    if not setting.is_sound:
        return lead
    return replace(lead, command=command(setting.runs[0]), point=setting.label)


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
    value = interval = None
    if scores:
        value = fmean(score for _, score in scores.values())
        interval = _widened(group, chosen, value)
    others = sum(label != chosen.label for label, _ in scores.values())
    own = chosen.values.values()
    if value is not None and others and not min(own) <= value <= max(own):
        # The value is that of other settings, one of which has a run that is far off.
        value = interval = None
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
    of_rivals = [_rivals(group, chosen)] if rivals else []
    return Recommendation(
        group,
        (*findings, expected, *of_rivals),
        value=value,
        value_interval=interval,
    )


def _until_decided(group: Group) -> Finding:
    assert group.plan is not None
    compared = zip(group.of_pairs, group.contrasts, strict=True)
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


def _rivals(group: Group, named: Configuration) -> Finding:
    """Build the finding on the settings that are not shown to be worse than the recommended one."""
    rivals = [s for s in group.alive if s.label in group.may_be_best and s is not named]
    return finding(
        "not_worse",
        setting=setting_numbers(named),
        others=[setting_numbers(setting) for setting in rivals if setting.is_sound],
        rivals=len(rivals),
        compared=len(group.alive),
        settings=len(group.members),
    )


def _notes(group: Group) -> Iterable[Finding]:
    split = group.metric.partition("/")[0]
    if group.missing_baseline:
        yield other_baseline(group)
    lost = [setting for setting in group.members if setting.lost]
    if lost:
        yield finding("lost_runs", settings=[setting_numbers(setting) for setting in lost])
        if not all(setting.is_sound for setting in lost if setting.values):
            yield finding("not_recommended")
    far = [
        {"run": run.name, "setting": setting.label, "value": run.metric_value}
        for setting, run in _far_off(group)
    ]
    if far:
        yield finding("far_off", runs=far, unit=group.scale.unit)
    sweeps = {run.sweep for run in group.runs}
    if len(sweeps) > 1 and any(len({run.sweep for run in s.runs}) > 1 for s in group.members):
        yield finding("extended", sweeps=len(sweeps))
    if any(len(setting.values) > 1 for setting in group.members):
        if group.unit_of_repeats == "fold":
            yield finding("over_folds")
        # If all runs were evaluated on the same images, the noise comes only from training.
        elif len({run.result.get(f"data.{split}") for run in group.runs}) == 1:
            yield finding("over_seeds")


def _far_off(group: Group) -> Iterable[tuple[Configuration, RunRecord]]:
    """Yield (setting, run) for each run that is much worse than the median of its setting, for
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
    if usual:
        yield from (
            (setting, run) for shortfall, setting, run in shortfalls if shortfall > FAR * usual
        )


def _recommend_fastest(group: Group) -> Recommendation:
    """Recommend the fastest setting of a tuning that is shown to train faster than the current
    settings. If there is none, state the smallest gain that the tuning could have detected.
    """
    baseline = group.named(group.baseline)
    shown = [contrast for contrast in group.contrasts if contrast.verdict == SUPPORTED]
    if not shown:
        known = [c.detectable for c in group.contrasts if c.detectable is not None]
        detectable = max(known, default=None)
        none = finding(
            "none_faster", smallest_difference=group.smallest_difference, detectable=detectable
        )
        return Recommendation(group, (none,))
    contrast = _best(group, shown)
    winner = group.named(contrast.a)
    changed = _changed(winner, baseline)
    fields, repeats = contrast.fields, group.blocks
    findings = [finding("trains_faster", changes=changed, contrast=fields, repeats=repeats)]
    if winner.peak_bytes and baseline.peak_bytes:
        peaks = [max(peak.median for peak in s.peak_bytes) for s in (winner, baseline)]
        findings.append(finding("peak_memory", bytes=peaks[0], before=peaks[1]))
    advised = {key: value for key, value in changed.items() if key in CHANGES_TRAINING}
    findings += [finding("changes_training", key=k, value=v) for k, v in advised.items()]
    if "model.compile" in changed:
        starts = [s.measure("first_step_seconds") for s in (winner, baseline)]
        seconds, before = (start.median if start else None for start in starts)
        findings.append(finding("first_step", seconds=seconds, before=before))
    # Also name the fastest of the settings that change only speed and memory.
    only_speed = [
        contrast
        for contrast in shown
        if not {*CHANGES_TRAINING} & _changed(group.named(contrast.a), baseline).keys()
    ]
    if advised and only_speed:
        best = _best(group, only_speed)
        changes = _changed(group.named(best.a), baseline)
        findings.append(finding("fastest_of_only_speed", changes=changes, contrast=best.fields))
    return Recommendation(group, tuple(findings), command(winner.runs[0]), winner.label, contrast)


def _changed(setting: Configuration, baseline: Configuration) -> dict[str, str]:
    return {
        key: value for key, value in setting.settings.items() if value != baseline.settings.get(key)
    }
