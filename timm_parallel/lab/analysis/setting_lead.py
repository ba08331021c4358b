"""Headline result of a sweep over settings: the sentence, value and command with which the report
begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median

from timm_parallel.lab.analysis.recommendation import Recommendation, command
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.selection import corrected_values
from timm_parallel.lab.analysis.settings import Setting, SettingGroup
from timm_parallel.lab.analysis.statistics import INCONCLUSIVE, SUPPORTED, Contrast
from timm_parallel.lab.analysis.wording import (
    difference_text,
    join_short,
    range_text,
    size_text,
    value_text,
)
from timm_parallel.machine.text import plural

FAR = 8.0  # standard deviations from the median of its setting at which a run is named


def recommend_setting(group: SettingGroup) -> Recommendation:
    """Recommend the best setting that is shown to be better than the baseline; if none, state the
    detectable difference.
    """
    if len(group.alive) == 1:
        lead = _only_setting(group)
    else:
        shown = [c for c in group.contrasts if c.verdict == SUPPORTED]
        if shown:
            # With equal numbers of runs, this is the setting with the best mean.
            lead = _better(
                group, max(shown, key=lambda contrast: group.scale.sign * (contrast.effect or 0))
            )
        elif group.may_be_best == {group.baseline.label} and group.baseline.is_sound:
            lead = _best_baseline(group)
        else:
            lead = _none_better(group)
    return replace(lead, notes=tuple(_notes(group)))


def _better(group: SettingGroup, contrast: Contrast) -> Recommendation:
    winner = group.named(contrast.a)
    expected = _expected(group, winner)
    sentence = (
        f"{_name(winner)} is better than {_name(group.baseline)}: {group.metric} is "
        f"{difference_text(contrast, expected.difference)}, {_source(group, contrast)}. "
        f"{_value(group, winner, expected)}{_rivals(group, winner)}"
    )
    return _named(expected, sentence, winner, contrast)


def _best_baseline(group: SettingGroup) -> Recommendation:
    baseline = group.baseline
    expected = _expected(group, baseline)
    contrast = max(group.contrasts, key=lambda contrast: group.scale.sign * (contrast.effect or 0))
    sentence = (
        f"{_name(baseline)}, the baseline, is shown to be the best of {len(group.alive)} settings: "
        f"{group.metric} of the next, {_name(group.named(contrast.a))}, is "
        f"{difference_text(contrast)}, {_source(group, contrast)}. "
        f"{_value(group, baseline, expected)}"
    )
    return _named(expected, sentence, baseline, contrast)


def _source(group: SettingGroup, contrast: Contrast) -> str:
    if not contrast.n:
        return f"through other settings, because they share no {group.unit_of_repeats}"
    return f"from {plural(contrast.n, group.unit_of_repeats)}"


def _named(
    expected: Recommendation, sentence: str, setting: Setting, contrast: Contrast
) -> Recommendation:
    return replace(
        expected,
        sentence=sentence,
        command=command(setting.runs[0]),
        point=setting.label,
        contrast=contrast,
    )


def _none_better(group: SettingGroup) -> Recommendation:
    highest, unit = group.named(group.highest), group.unit_of_repeats
    sentence = f"No setting is shown to be better than {_name(group.baseline)}"
    detectable = [
        contrast.detectable for contrast in group.contrasts if contrast.detectable is not None
    ]
    if not detectable:
        word = "lowest" if group.scale.lower_is_better else "highest"
        shared = max((contrast.n for contrast in group.contrasts), default=0)
        few = f"with {plural(shared, unit)}" if shared else f"with settings that share no {unit}s"
        sentence += (
            f": {few}, no difference can be told from chance. The {word} {group.metric} is that of "
            f"{_name(highest)}, {value_text(group.scale, highest.mean)}. Use sweep.repeats=5 for "
            "an answer."
        )
        return Recommendation(group, sentence)
    expected = _expected(group, highest)
    sentence += (
        f"; this sweep could detect a difference of {size_text(group.scale, median(detectable))}."
    )
    if highest is group.baseline:
        sentence += f" It has the best mean {group.metric} itself."
    else:
        contrast = group.contrast(highest)
        decide = ""
        if contrast is not None and contrast.verdict == INCONCLUSIVE:
            needed = (
                f"about {contrast.blocks_needed}" if contrast.blocks_needed else "more than 1,000"
            )
            decide = f"; {needed} {unit}s would decide"
        sentence += f" {_name(highest)} has the best mean {group.metric}{decide}."
    sentence += f" {_value(group, highest, expected)}{_rivals(group, highest)}"
    return replace(expected, sentence=sentence)


def _only_setting(group: SettingGroup) -> Recommendation:
    [setting] = group.alive
    ends = group.interval(setting)
    interval = f" (95 % interval {range_text(group.scale, ends)})" if ends else ""
    sentence = (
        f"{_name(setting)} reaches {group.metric} "
        f"{value_text(group.scale, setting.mean)}{interval}, from "
        f"{plural(len(setting.values), group.unit_of_repeats)}."
    )
    if len(group.settings) > 1:
        sentence += " There is no other setting to compare it with."
    lead = Recommendation(group, sentence, value=setting.mean, value_interval=ends)
    if not setting.is_sound:
        return lead
    return replace(lead, command=command(setting.runs[0]), point=setting.label)


def _expected(group: SettingGroup, chosen: Setting) -> Recommendation:
    """Estimate value and difference of `chosen` in new runs: each repeat scores the setting that is
    best on the others.
    """
    # Settings with lost runs are not candidates: chance chose which of their runs are counted.
    settings, blocks = group.complete, {block for _, block, _ in group.rows}
    if chosen not in settings:
        settings, blocks = [*settings, chosen], set(chosen.values)
    rows = [
        (s.label, block, value)
        for s in settings
        for block, value in s.values.items()
        if block in blocks
    ]
    scores = corrected_values(rows, group.scale)
    if not scores:
        return Recommendation(group, "")
    value, baseline = fmean(scores.values()), group.baseline.values
    differences = [score - baseline[block] for block, score in scores.items() if block in baseline]
    interval = group.interval(chosen)
    if interval is not None and chosen.mean is not None:
        # The values that the correction allows for, next to those of a setting that was not chosen
        # by its mean.
        low, high = (end - (chosen.mean - value) for end in interval)
        interval = min(low, interval[0]), max(high, interval[1])
        if group.scale.is_proportion:
            interval = max(interval[0], 0.0), min(interval[1], 1.0)
    difference = fmean(differences) if differences else None
    return Recommendation(group, "", value=value, value_interval=interval, difference=difference)


def _value(group: SettingGroup, chosen: Setting, expected: Recommendation) -> str:
    interval = (
        f" (95 % interval {range_text(group.scale, expected.value_interval)})"
        if expected.value_interval
        else ""
    )
    return (
        f"Expect {value_text(group.scale, expected.value)}{interval}, corrected for choosing among "
        f"{len(group.settings)} settings; its mean is {value_text(group.scale, chosen.mean)}."
    )


def _rivals(group: SettingGroup, named: Setting) -> str:
    """Return a sentence on the settings that cannot be told from the best; empty if that is true of
    all settings.
    """
    rivals = [
        setting
        for setting in group.alive
        if setting.label in group.may_be_best and setting is not named
    ]
    if not rivals:
        return f" It is shown to be the best of the {len(group.alive)} that have a value."
    if len(rivals) > 1 and len(rivals) + 1 == len(group.alive):
        return " No setting is shown to be worse than it."
    sound = [_name(setting) for setting in rivals if setting.is_sound]
    return f" Not shown to be worse than it: {join_short(sound, 3)}." if sound else ""


def _name(setting: Setting) -> str:
    """Return the label of a setting, with the number of its lost runs and the reason, e.g. `lr=1 (2
    of 5 runs failed)`.
    """
    return f"{setting.label} ({_lost(setting)})" if setting.lost else setting.label


def _lost(setting: Setting) -> str:
    reasons = Counter(
        "not finite" if run.status == "done" else run.status.replace("_", " ")
        for run in setting.lost
    )
    total = len(setting.lost) + len(setting.runs)
    return ", ".join(f"{count} of {total} runs {reason}" for reason, count in reasons.items())


def _notes(group: SettingGroup) -> list[str]:
    notes = [group.note] if group.note else []
    lost = [setting for setting in group.settings if setting.lost]
    if lost:
        notes.append(
            f"Lost runs: {join_short(map(_name, lost))}. A mean is that of the runs that are left."
        )
        if not all(setting.is_sound for setting in lost if setting.values):
            notes.append(
                "A setting whose own values ended runs (not finite, out of memory) is not "
                "recommended."
            )
    far = list(_far_off(group))
    if far:
        runs = join_short(
            f"{run.name} ({s.label}): {value_text(group.scale, run.metric_value)}" for s, run in far
        )
        notes.append(
            f"Runs that are far worse than the others of their setting: {runs}. They count."
        )
    if any(len(setting.values) > 1 for setting in group.settings):
        if group.unit_of_repeats == "fold":
            notes.append(
                "The intervals are over folds: they hold, approximately, for other images like "
                "these."
            )
        elif group.is_on_fixed_images:
            notes.append(
                "The intervals are over seeds on the same images: they hold for training again, "
                "not for others."
            )
    return notes


def _far_off(group: SettingGroup) -> Iterable[tuple[Setting, RunRecord]]:
    """Yield the runs that are much worse than the median of their setting, such as diverged ones,
    with the setting.
    """
    shortfalls: list[tuple[float, Setting, RunRecord]] = []
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
    # Median absolute deviation, which a few diverged runs do not change.
    usual = 1.4826 * median(abs(shortfall) for shortfall, *_ in shortfalls) if shortfalls else 0.0
    if usual:
        yield from (
            (setting, run) for shortfall, setting, run in shortfalls if shortfall > FAR * usual
        )
