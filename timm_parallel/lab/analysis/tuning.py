"""Choose the settings of a tuning that are measured again after its screening."""

from __future__ import annotations

from collections.abc import Mapping

from timm_parallel.lab.analysis.runs import parse_overrides

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
