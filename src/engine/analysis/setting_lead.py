"""Headline result of a sweep over settings: the sentence, value and command with which the report begins."""

from __future__ import annotations

from src.engine.analysis.recommendation import Recommendation, command
from src.engine.analysis.selection import best, corrected_value
from src.engine.analysis.settings import Setting, SettingGroup
from src.engine.analysis.statistics import INCONCLUSIVE, SUPPORTED, mean_interval
from src.engine.analysis.wording import difference_text, size_text, value_text
from src.engine.machine.text import plural


def recommend_setting(group: SettingGroup) -> Recommendation:
    """Recommend the best setting that is shown to be better than the baseline; if none, state the detectable difference."""
    if len(group.settings) == 1:
        return _only_setting(group)
    baseline, repeats = group.baseline, plural(group.blocks, group.unit_of_repeats)
    label = best(group.rows, group.scale)
    highest = group.named(label) if label else baseline
    value = corrected_value(group.rows, group.scale)
    shown = [contrast for contrast in group.contrasts if contrast.verdict == SUPPORTED]
    if not shown:
        sentence = f"No setting is shown to be better than {baseline.label}"
        detectable = [contrast.detectable for contrast in group.contrasts if contrast.detectable is not None]
        if not detectable:
            word = "lowest" if group.scale.lower_is_better else "highest"
            few = f"with {repeats}" if group.blocks == 1 else f"with settings that share no {group.unit_of_repeats}s"
            sentence += (
                f": {few}, no difference can be told from chance. The {word} {group.metric} is that of "
                f"{highest.label}, {value_text(group.scale, highest.mean)}. Use sweep.repeats=5 for an answer."
            )
            return Recommendation(group, sentence)
        sentence += f"; this sweep could detect a difference of {size_text(group.scale, max(detectable))}."
        return Recommendation(group, f"{sentence} {_best_mean(group, highest, value)}", value=value)
    # With equal numbers of runs, this is the setting with the best mean.
    contrast = max(shown, key=lambda contrast: group.scale.sign * (contrast.effect or 0))
    winner = group.named(contrast.a)
    sentence = (
        f"{winner.label} is better than {baseline.label}: {group.metric} is {difference_text(contrast)}, from {repeats}. "
        f"{_correction(group, winner, value)}"
    )
    return Recommendation(group, sentence, command(winner.runs[0]), winner.label, contrast, value)


def _only_setting(group: SettingGroup) -> Recommendation:
    [setting] = group.settings
    ends = mean_interval(setting.values.values(), group.scale)
    interval = f" (95 % interval {' to '.join(value_text(group.scale, end) for end in ends)})" if ends else ""
    sentence = (
        f"{setting.label} reaches {group.metric} {value_text(group.scale, setting.mean)}{interval}, "
        f"from {plural(group.blocks, group.unit_of_repeats)}."
    )
    return Recommendation(group, sentence, command(setting.runs[0]), setting.label, value=setting.mean)


def _best_mean(group: SettingGroup, highest: Setting, value: float | None) -> str:
    """Return sentences on the setting with the best mean. Used if no setting is shown to be better than the baseline."""
    if highest is group.baseline:
        return f"It has the best mean {group.metric} itself. {_correction(group, highest, value)}"
    contrast = group.contrast(highest)
    decide = ""
    if contrast is not None and contrast.verdict == INCONCLUSIVE:
        needed = f"about {contrast.blocks_needed}" if contrast.blocks_needed else "more than 1,000"
        decide = f"; {needed} {group.unit_of_repeats}s would decide"
    return f"{highest.label} has the best mean {group.metric}{decide}. {_correction(group, highest, value)}"


def _correction(group: SettingGroup, chosen: Setting, value: float | None) -> str:
    return (
        f"Expect {value_text(group.scale, value)}, corrected for choosing among {len(group.settings)} settings; its mean "
        f"is {value_text(group.scale, chosen.mean)}."
    )
