"""Choose the settings that a tuning (`sweep.tune`) measures again after its screening, which
measured each setting alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from timm_parallel.lab.analysis.runs import parse_overrides

# Keys that change more than speed and memory -> the advice that a report adds if it recommends such
# a setting.
CHANGES_TRAINING = {
    "train.precision": "rounds differently: compare the accuracy of both before you rely on it",
    "data.batch_size": "trains differently: choose the learning rate again",
    "data.batch_size_per_device": "trains differently: choose the learning rate again",
}


def finalists(
    gains: Mapping[tuple[str, ...], float], smallest_difference: float
) -> list[tuple[str, ...]]:
    """Choose the settings that a tuning measures again, alone or in combination.

    `gains`: overrides of a setting -> speed with the setting, divided by speed without it. The
    choice contains at most three combinations:

    - the fastest setting alone;
    - all settings that gain at least `smallest_difference`; of two that set the same key, the
      faster;
    - of these, the settings that change nothing but speed and memory.

    If no setting gains that much, only the fastest is measured again. Combinations with fewer
    overrides come first, and none appears twice.
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
