"""Choose the settings that train fastest: those to measure again after a screening, and the ones to
recommend.
"""

from __future__ import annotations

from collections.abc import Mapping

from timm_parallel.lab.analysis.recommendation import Recommendation, command, disturbed_sentence
from timm_parallel.lab.analysis.runs import parse_overrides
from timm_parallel.lab.analysis.settings import Setting, SettingGroup
from timm_parallel.lab.analysis.statistics import (
    SMALLEST_DIFFERENCE,
    SUPPORTED,
    Contrast,
    decide,
    estimate,
)
from timm_parallel.lab.analysis.wording import figure, interval_text, percent, times
from timm_parallel.machine.text import plural

# Settings that change more than speed and memory, with the advice that a recommendation of them
# adds.
CHANGES_TRAINING = {
    "train.precision": "rounds differently: compare the accuracy of both before you rely on it",
    "data.batch_size": "trains differently: choose the learning rate again",
    "data.batch_size_per_device": "trains differently: choose the learning rate again",
}


def finalists(
    gains: Mapping[tuple[str, ...], float], smallest_difference: float
) -> list[tuple[str, ...]]:
    """Return the combinations of settings to measure again, given the gain of each setting alone.

    `gains`: the overrides of a setting -> speed with it, divided by speed without it. The
    combinations are the fastest setting alone; all settings that gain at least
    `smallest_difference`; and those of them that change nothing but speed and memory. Of two
    settings that set one key, only the faster counts. If none gains that much, only the fastest is
    measured again. Combinations with fewer overrides come first; none appears twice.
    """
    ranked = sorted(gains, key=lambda setting: -gains[setting])
    kept: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for setting in ranked:
        keys = parse_overrides(setting).keys()
        if gains[setting] >= 1 + smallest_difference and not taken & keys:
            kept.append(setting)
            taken |= keys
    harmless = [
        setting for setting in kept if not CHANGES_TRAINING.keys() & parse_overrides(setting).keys()
    ]
    chosen = {
        tuple(override for setting in settings for override in setting)
        for settings in (ranked[:1], harmless, kept)
        if settings
    }
    return sorted(chosen, key=lambda overrides: (len(overrides), overrides))


def recommend_fastest(group: SettingGroup) -> Recommendation:
    """Recommend settings that are shown to train faster than the current ones; if none is, state
    the detectable gain.

    Settings with more changes are recommended only if they are also shown to be faster than those
    with fewer.
    """
    runs = [run for setting in group.settings for run in setting.runs]
    if 2 * sum(bool(run.flags) for run in runs) > len(runs):
        return Recommendation(group, disturbed_sentence(runs))
    baseline, repeats = group.baseline, plural(group.blocks, "repeat")
    shown = {contrast.a: contrast for contrast in group.contrasts if contrast.verdict == SUPPORTED}
    smallest = float(runs[0].config.get("sweep.smallest_difference") or SMALLEST_DIFFERENCE)
    if not shown:
        return Recommendation(group, _no_gain(group, smallest))
    # In the order of the sweep, which is that of the number of changes.
    labels = [setting.label for setting in group.settings if setting.label in shown]
    pairs = [(b, a) for place, a in enumerate(labels) for b in labels[place + 1 :]]
    among = decide(estimate(group.rows, pairs, group.scale), smallest)
    faster = {(contrast.a, contrast.b) for contrast in among if contrast.verdict == SUPPORTED}
    label = labels[0]
    for other in labels[1:]:
        if (other, label) in faster:
            label = other
    contrast, winner = shown[label], group.named(label)
    sentences = [
        f"{_changes(winner, baseline)} trains {times(contrast)} as fast as the current "
        f"settings{interval_text(contrast)}, from {repeats}.",
        *_memory(winner, baseline),
        *_advice(winner, baseline),
        *_without_changes(group, winner, shown),
    ]
    return Recommendation(
        group, " ".join(sentences), command(winner.runs[0]), winner.label, contrast
    )


def _no_gain(group: SettingGroup, smallest: float) -> str:
    sentence = (
        f"No setting is shown to train more than {percent(smallest)} faster than the current ones"
    )
    detectable = [
        contrast.detectable for contrast in group.contrasts if contrast.detectable is not None
    ]
    if detectable:
        return f"{sentence}; this sweep could detect a gain of {percent(max(detectable), 1)}."
    return f"{sentence}: without repeats the noise is unknown; use sweep.repeats=5."


def _memory(winner: Setting, baseline: Setting) -> list[str]:
    if not (winner.peak_bytes and baseline.peak_bytes):
        return []
    peaks = [max(peak.median for peak in setting.peak_bytes) for setting in (winner, baseline)]
    of_winner, of_baseline = (figure(peak / 2**20) for peak in peaks)
    return [f"Peak memory: {of_winner} MiB instead of {of_baseline} MiB."]


def _advice(winner: Setting, baseline: Setting) -> list[str]:
    """Return a warning for each changed setting that changes more than speed, and the time that
    compiling takes.
    """
    changed = _changed(winner, baseline)
    advised = {
        CHANGES_TRAINING[key]: f"{key}={value}"
        for key, value in changed.items()
        if key in CHANGES_TRAINING
    }
    lines = [f"{text} {advice}." for advice, text in advised.items()]
    if "model.compile" in changed:
        starts = [_start_seconds(setting) for setting in (winner, baseline)]
        lines.append(f"The first step of a run comes after {starts[0]} s instead of {starts[1]} s.")
    return lines


def _changed(setting: Setting, baseline: Setting) -> dict[str, str]:
    return {
        key: value for key, value in setting.settings.items() if value != baseline.settings.get(key)
    }


def _changes(setting: Setting, baseline: Setting) -> str:
    return ", ".join(f"{key}={value}" for key, value in _changed(setting, baseline).items())


def _start_seconds(setting: Setting) -> str:
    seconds = setting.measure("first_step_seconds")
    return figure(seconds.median) if seconds else "an unknown number of"


def _without_changes(
    group: SettingGroup, winner: Setting, shown: Mapping[str, Contrast]
) -> list[str]:
    """Return a sentence on the fastest setting that changes only speed and memory, in a list that
    is empty without one.
    """

    def only_speed(setting: Setting) -> bool:
        return not CHANGES_TRAINING.keys() & _changed(setting, group.baseline).keys()

    others = [contrast for label, contrast in shown.items() if only_speed(group.named(label))]
    if only_speed(winner) or not others:
        return []
    best = max(others, key=lambda contrast: contrast.ratio or 0)
    text = _changes(group.named(best.a), group.baseline)
    return [
        f"Of the settings that change only speed and memory, {text} is the fastest: "
        f"{times(best)}{interval_text(best)}."
    ]
