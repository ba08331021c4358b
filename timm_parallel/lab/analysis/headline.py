"""Headline result of a report: a sentence, and the command that trains the recommended
configuration. Each kind of comparison has its own rule.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from timm_parallel.keys import TrainConfig
from timm_parallel.lab.analysis.groups import SPEED, Configuration, Group
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.selection import choose, corrected_values
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_SUPPORTED,
    SMALLEST_DIFFERENCE,
    SUPPORTED,
    Contrast,
)
from timm_parallel.lab.analysis.wording import (
    difference_text,
    figure,
    interval_text,
    join_short,
    percent,
    range_text,
    size_text,
    times,
    value_text,
    verdict_text,
    with_range,
)
from timm_parallel.machine.text import plural

# A report names a run whose value is this many standard deviations worse than the median of its
# setting.
FAR = 8.0
TUNE = "experiment=tune"
# Keys that change more than speed and memory -> the advice that a report adds if it recommends such
# a setting.
CHANGES_TRAINING = {
    "train.precision": "rounds differently: compare the accuracy of both before you rely on it",
    "data.batch_size": "trains differently: choose the learning rate again",
    "data.batch_size_per_device": "trains differently: choose the learning rate again",
}


@dataclass(frozen=True)
class Recommendation:
    """Headline result of a group of configurations. It recommends no configuration if the
    measurements are inconclusive.
    """

    group: Group
    sentence: str
    command: str = ""
    # Label of the recommended configuration.
    point: str | None = None
    # The comparison of two configurations on which the sentence of the headline result relies.
    contrast: Contrast | None = None
    # Expected value of the headline metric, without the bias of choosing the best configuration.
    # None on a page about speed.
    value: float | None = None
    # 95 % confidence interval of the expected value of the headline metric.
    value_interval: tuple[float, float] | None = None
    # Expected difference from the baseline, without the bias of choosing the best configuration.
    difference: float | None = None
    # Sentences that a reader of the report must know to rely on the headline result.
    notes: tuple[str, ...] = ()


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


def _disturbed(runs: Sequence[RunRecord]) -> str:
    """Format the sentence that a report has no verdict, because other load disturbed most of its
    runs.
    """
    disturbed = [run for run in runs if run.flags]
    [(reason, _)] = Counter(flag for run in disturbed for flag in run.flags).most_common(1)
    return (
        f"No verdict: {len(disturbed)} of {len(runs)} runs were disturbed ({reason}). "
        "The figures below are what was measured; run the sweep again on a quiet machine."
    )


def recommend(group: Group) -> Recommendation:
    """Choose the headline result of a group of configurations. Among strategies, it is the simplest
    one that is not relevantly slower than the fastest. Among settings, it is the best one that is
    shown to be better than the baseline. In a tuning, it is the fastest one that is shown to be
    faster than the current settings.
    """
    if group.kind == "settings":
        return _recommend_better(group)
    if group.disturbed:
        return Recommendation(group, _disturbed(group.runs))
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
        return Recommendation(group, "No finished run here has images/s to compare yet.")
    label, contrast, others = chosen
    point, apart = group.named(label), join_short(others)
    if contrast is None:
        contrast, sentence = _compare_with_single(group, point)
        if apart and contrast is None:
            return Recommendation(
                group,
                f"No verdict: no repeat ran {_describe(point)} on the same host as any of these: "
                f"{apart}.",
            )
    else:
        sentence = (
            f"{_describe(point)} is the simplest choice at most "
            f"{percent(group.smallest_difference)} slower than the highest estimate: it runs at "
            f"{times(contrast)} the speed of "
            f"{_describe(group.named(contrast.b))}{interval_text(contrast)}."
        )
    if apart:
        sentence += f" Not compared, because no repeat ran them on the same host: {apart}."
    return Recommendation(group, sentence, command(point.runs[0]), point.label, contrast)


def _compare_with_single(group: Group, point: Configuration) -> tuple[Contrast | None, str]:
    """Compare a configuration with strategy single. If the configuration is single itself, compare
    it with the fastest other one. Return (comparison, sentence for the report).
    """
    assert point.speed is not None
    if point.label == group.baseline:
        against = [
            c for p in group.members if (c := group.over_baseline(p)) and c.ratio is not None
        ]
        if not against:
            return (
                None,
                f"{_describe(point)}: {with_range(point.speed)} images/s. There is nothing to "
                "compare it with.",
            )
        # Prefer a configuration on several devices to another one on a single device, because the
        # report must say if more devices pay.
        second = max(
            against, key=lambda contrast: (group.named(contrast.a).devices > 1, contrast.ratio or 0)
        )
        other = group.named(second.a)
        gain = {1: "from another setting", 2: "from a second device"}.get(
            other.devices, "from more devices"
        )
        ratio = f"runs at {times(second)} the speed of {_describe(point)}{interval_text(second)}"
        return second, f"No gain {gain} here: {_describe(other)} {ratio}."
    contrast = group.over_baseline(point)
    if contrast is None or contrast.ratio is None:
        return None, (
            f"{_describe(point)} has the highest estimate, {with_range(point.speed)} images/s. To "
            "compare it with one device, add parallel=single parallel.devices=1 to the sweep."
        )
    sentence = (
        f"{_describe(point)} is {times(contrast)} as fast as single{interval_text(contrast)}."
    )
    if contrast.verdict != SUPPORTED:
        sentence += f" The claim that it is faster is {verdict_text(contrast)}."
    return contrast, sentence + _second_device(group, point)


def _second_device(group: Group, point: Configuration) -> str:
    """Format a sentence on the gain from a second device. The text is empty if the recommended
    configuration has two devices, or if the gain is unknown.
    """
    pairs = [
        (p, c)
        for p in group.members
        if p.devices == 2 and (c := group.over_baseline(p)) and c.ratio is not None
    ]
    if point.devices == 2 or not pairs:
        return ""
    other, contrast = max(pairs, key=lambda pair: pair[1].ratio or 0)
    answers = {SUPPORTED: "A second device pays", NOT_SUPPORTED: "A second device does not pay"}
    answer = answers.get(contrast.verdict, "Inconclusive for a second device")
    return (
        f" {answer}: {_describe(other)} runs at {times(contrast)} the speed of "
        f"single{interval_text(contrast)}."
    )


def _describe(point: Configuration) -> str:
    if point.strategy == "single" and not point.options:
        return "single"
    text = f"{point.strategy} on {plural(point.devices, 'device')}"
    if point.nodes > 1:
        text += f" of {point.nodes} nodes"
    if point.options:
        text += f" with {point.options}"
    return text


def _recommend_better(group: Group) -> Recommendation:
    """Recommend the best setting that is shown to be better than the baseline. If there is none,
    state the smallest difference that the sweep could have detected.
    """
    shown = [c for c in group.contrasts if c.verdict == SUPPORTED]
    if len(group.alive) == 1:
        lead = _only_setting(group)
    elif shown or (group.may_be_best == {group.baseline} and group.named(group.baseline).is_sound):
        # Take the best of the settings that are shown to be better than the baseline. If there are
        # none, the baseline itself is shown to be best, so compare it with the next one.
        contrast = max(shown or group.contrasts, key=lambda c: group.scale.sign * (c.effect or 0))
        lead = _shown_best(group, contrast)
    else:
        lead = _none_better(group)
    return replace(lead, notes=tuple(_notes(group)))


def _shown_best(group: Group, contrast: Contrast) -> Recommendation:
    """Recommend the setting that is shown to be better than the baseline, or the baseline if it is
    shown to be the best. `contrast`: comparison of the best other setting with the baseline.
    """
    other, baseline = group.named(contrast.a), group.named(group.baseline)
    chosen = other if contrast.verdict == SUPPORTED else baseline
    expected = _expected(group, chosen)
    source = f"from {plural(contrast.n, group.unit_of_repeats)}"
    if not contrast.n:
        source = f"through other settings, because they share no {group.unit_of_repeats}"
    value = _value(group, chosen, expected)
    if chosen is baseline:
        sentence = (
            f"{_name(baseline)}, the baseline, is shown to be the best of {len(group.alive)} "
            f"settings: {group.metric} of the next, {_name(other)}, is "
            f"{difference_text(contrast)}, {source}. {value}"
        )
    else:
        sentence = (
            f"{_name(chosen)} is better than {_name(baseline)}: {group.metric} is "
            f"{difference_text(contrast)}, {source}. "
            f"{value}{_rivals(group, chosen)}"
        )
    return replace(
        expected,
        sentence=sentence,
        command=command(chosen.runs[0]),
        point=chosen.label,
        contrast=contrast,
    )


def _none_better(group: Group) -> Recommendation:
    highest, unit = group.named(group.highest), group.unit_of_repeats
    sentence = f"No setting is shown to be better than {_name(group.named(group.baseline))}"
    detectable = group.detectable
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
    if highest.label == group.baseline:
        sentence += f" It has the best mean {group.metric} itself."
    else:
        contrast = group.over_baseline(highest)
        decide = ""
        if contrast is not None and contrast.verdict == INCONCLUSIVE:
            needed = (
                f"about {contrast.blocks_needed}" if contrast.blocks_needed else "more than 1,000"
            )
            decide = f"; {needed} {unit}s would decide"
        sentence += f" {_name(highest)} has the best mean {group.metric}{decide}."
    sentence += f" {_value(group, highest, expected)}{_rivals(group, highest)}"
    return replace(expected, sentence=sentence)


def _only_setting(group: Group) -> Recommendation:
    [setting] = group.alive
    ends = group.interval(setting)
    interval = f" (95 % interval {range_text(group.scale, ends)})" if ends else ""
    sentence = (
        f"{_name(setting)} reaches {group.metric} "
        f"{value_text(group.scale, setting.mean)}{interval}, from "
        f"{plural(len(setting.values), group.unit_of_repeats)}."
    )
    if len(group.members) > 1:
        sentence += " There is no other setting to compare it with."
    lead = Recommendation(group, sentence, value=setting.mean, value_interval=ends)
    if not setting.is_sound:
        return lead
    return replace(lead, command=command(setting.runs[0]), point=setting.label)


def _expected(group: Group, chosen: Configuration) -> Recommendation:
    """Estimate which value the chosen setting will have in new runs, and its difference from the
    baseline, without the bias of choosing the best. The estimate is the mean of one value per
    repeat: that of the setting which is best in all other repeats.
    """
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
    if not scores:
        return Recommendation(group, "")
    value, baseline = fmean(scores.values()), group.named(group.baseline).values
    differences = [score - baseline[block] for block, score in scores.items() if block in baseline]
    interval = group.interval(chosen)
    if interval is not None and chosen.mean is not None:
        # Widen the confidence interval of the mean. It then also contains the values that are
        # likely after the correction for choosing the best setting.
        low, high = (end - (chosen.mean - value) for end in interval)
        interval = min(low, interval[0]), max(high, interval[1])
        if group.scale.is_proportion:
            interval = max(interval[0], 0.0), min(interval[1], 1.0)
    difference = fmean(differences) if differences else None
    return Recommendation(group, "", value=value, value_interval=interval, difference=difference)


def _value(group: Group, chosen: Configuration, expected: Recommendation) -> str:
    interval = (
        f" (95 % interval {range_text(group.scale, expected.value_interval)})"
        if expected.value_interval
        else ""
    )
    return (
        f"Expect {value_text(group.scale, expected.value)}{interval}, corrected for choosing among "
        f"{len(group.members)} settings; its mean is {value_text(group.scale, chosen.mean)}."
    )


def _rivals(group: Group, named: Configuration) -> str:
    """Format a sentence that names the settings which are not shown to be worse than the
    recommended one. If there are none, the sentence says that it is the best.
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


def _name(setting: Configuration) -> str:
    """Return the label of a setting. If runs were lost, add their number and the reason, for
    example `lr=1 (2 of 5 runs failed)`.
    """
    return f"{setting.label} ({_lost(setting)})" if setting.lost else setting.label


def _lost(setting: Configuration) -> str:
    reasons = Counter(
        "not finite" if run.status == "done" else run.status.replace("_", " ")
        for run in setting.lost
    )
    total = len(setting.lost) + len(setting.runs)
    return ", ".join(f"{count} of {total} runs {reason}" for reason, count in reasons.items())


def _notes(group: Group) -> list[str]:
    notes = []
    if group.missing_baseline:
        notes.append(
            f"No run of the baseline {group.missing_baseline} is done, so settings are compared "
            f"with {group.baseline}."
        )
    lost = [setting for setting in group.members if setting.lost]
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
    if any(len(setting.values) > 1 for setting in group.members):
        if group.unit_of_repeats == "fold":
            notes.append(
                "The intervals are over folds: they hold, approximately, for other images like "
                "these."
            )
        elif _is_on_fixed_images(group):
            notes.append(
                "The intervals are over seeds on the same images: they hold for training again, "
                "not for others."
            )
    return notes


def _is_on_fixed_images(group: Group) -> bool:
    """Return True if all runs were evaluated on the same images, so that the noise comes only from
    training.
    """
    key = f"data.{group.metric.partition('/')[0]}"
    return len({run.result.get(key) for run in group.runs}) == 1


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
    baseline, repeats = group.named(group.baseline), plural(group.blocks, "repeat")
    shown = {contrast.a: contrast for contrast in group.contrasts if contrast.verdict == SUPPORTED}
    smallest = float(group.runs[0].config.get("sweep.smallest_difference") or SMALLEST_DIFFERENCE)
    if not shown:
        return Recommendation(group, _no_gain(group, smallest))
    contrast = max(shown.values(), key=lambda contrast: contrast.ratio or 0)
    winner = group.named(contrast.a)
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


def _no_gain(group: Group, smallest: float) -> str:
    sentence = (
        f"No setting is shown to train more than {percent(smallest)} faster than the current ones"
    )
    detectable = group.detectable
    if detectable:
        return f"{sentence}; this sweep could detect a gain of {percent(max(detectable), 1)}."
    return f"{sentence}: without repeats the noise is unknown; use sweep.repeats=5."


def _memory(winner: Configuration, baseline: Configuration) -> list[str]:
    if not (winner.peak_bytes and baseline.peak_bytes):
        return []
    peaks = [max(peak.median for peak in setting.peak_bytes) for setting in (winner, baseline)]
    of_winner, of_baseline = (figure(peak / 2**20) for peak in peaks)
    return [f"Peak memory: {of_winner} MiB instead of {of_baseline} MiB."]


def _advice(winner: Configuration, baseline: Configuration) -> list[str]:
    """Return sentences of advice: a warning for each changed setting that changes more than speed,
    and the time that compiling takes.
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


def _changed(setting: Configuration, baseline: Configuration) -> dict[str, str]:
    return {
        key: value for key, value in setting.settings.items() if value != baseline.settings.get(key)
    }


def _changes(setting: Configuration, baseline: Configuration) -> str:
    return ", ".join(f"{key}={value}" for key, value in _changed(setting, baseline).items())


def _start_seconds(setting: Configuration) -> str:
    seconds = setting.measure("first_step_seconds")
    return figure(seconds.median) if seconds else "an unknown number of"


def _without_changes(
    group: Group, winner: Configuration, shown: Mapping[str, Contrast]
) -> list[str]:
    """Return a list with one sentence, which names the fastest of the settings that change only
    speed and memory. Return an empty list if the recommended setting is one of them, or if there
    are none.
    """

    baseline = group.named(group.baseline)

    def only_speed(setting: Configuration) -> bool:
        return not CHANGES_TRAINING.keys() & _changed(setting, baseline).keys()

    others = [contrast for label, contrast in shown.items() if only_speed(group.named(label))]
    if only_speed(winner) or not others:
        return []
    best = max(others, key=lambda contrast: contrast.ratio or 0)
    text = _changes(group.named(best.a), baseline)
    return [
        f"Of the settings that change only speed and memory, {text} is the fastest: "
        f"{times(best)}{interval_text(best)}."
    ]
