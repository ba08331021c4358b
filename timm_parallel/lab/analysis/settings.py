"""Group the runs of a sweep over settings by the values of the swept keys. Each setting gets one
value of the metric per seed, or per fold.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from timm_parallel.lab.analysis.groups import (
    NOT_A_SETTING,
    Configuration,
    Group,
    join_short,
    model_name,
    varied,
)
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.sequential import Plan
from timm_parallel.lab.analysis.statistics import LEVEL, RATIO, Scale, scale_of
from timm_parallel.machine.text import yaml_text
from timm_parallel.record.result import UNFINISHED

BLOCKS = ("seed", "data.fold")
_NOT_SWEPT = (*BLOCKS, "sweep.", "hydra.", "hydra/", "debug", "print_config")
_OF_SPEED = ("parallel.", "data.batch_size_per_device", "data.workers")


def setting_groups(runs: Iterable[RunRecord]) -> list[Group]:
    """Group the runs of a sweep over settings by metric, data and code. The largest group comes
    first, and the settings are not compared yet. Return an empty list for a sweep over strategies
    and numbers of devices.
    """
    # Read the swept keys from the configs of all jobs, also of those that failed or wait.
    known = [
        run
        for run in runs
        if run.config and not run.doubt and (run.is_of_tuning or not run.is_benchmark)
    ]
    with_metric = [
        run
        for run in known
        if run.comparable and run.metric_value is not None and run.metric_is is not None
    ]
    keys = [
        key for key in varied(known) if not key.startswith(NOT_A_SETTING) and key != "data.fold"
    ]
    if not with_metric or not _is_about_settings(known, keys):
        return []
    # Runs whose code defines the metric differently are not compared either.
    members: dict[tuple[str, str, str, tuple[bool, bool]], list[RunRecord]] = defaultdict(list)
    for run in with_metric:
        assert run.metric_is is not None
        place = run.metric, f"data {run.data or 'unknown'}", f"code {run.commit or 'unknown'}"
        members[*place, run.metric_is].append(run)
    differing = [len(set(column)) > 1 for column in list(zip(*members, strict=True))[:3]]
    for run in (run for run in known if run.is_lost):
        # Count a failed run for the largest group with its code, because a failed run has no
        # fingerprint of its data.
        alike = [names for names in members if names[2] == f"code {run.commit}"] or list(members)
        members[max(alike, key=lambda names: len(members[names]))].append(run)
    groups = []
    for names, of_group in members.items():
        title = ", ".join(
            name for name, differs in zip(names[:3], differing, strict=True) if differs
        )
        settings = _settings(of_group, keys)
        values = [value for setting in settings for value in setting.values.values()]
        if values:
            scale = RATIO if names[0] == IMAGES_PER_SECOND else scale_of(values, *names[3])
            groups.append(_group(title, names[0], scale, settings))
    plan = _plan(known, sum(len(group.members) - 1 for group in groups))
    if plan is not None:
        groups = [replace(group, plan=plan, left=_left(group, plan, known)) for group in groups]
    return sorted(groups, key=lambda group: -len(group.rows[group.metric]))


def _plan(runs: Iterable[RunRecord], comparisons: int) -> Plan | None:
    """Return the rules by which the comparisons of a sweep with sweep.repeats=auto end: each has an
    equal share of the error rate (Bonferroni). Return None for any other sweep. Of several sweeps,
    the largest limit counts, because it is spent most slowly.
    """
    configs = [
        run.config for run in runs if run.block and run.config.get("sweep.repeats") == "auto"
    ]
    if not configs:
        return None
    limit = max(config["sweep.max_repeats"] for config in configs)
    return Plan(limit, LEVEL / max(1, comparisons), configs[0].get("sweep.smallest"))


def _left(group: Group, plan: Plan, known: Iterable[RunRecord]) -> int:
    """Return the number of repeats that a sweep may still add to the runs of a group. It is 0 if
    the last repeat is not in the group, because the code or the data changed before it.
    """
    of_group = [run for setting in group.members for run in (*setting.runs, *setting.lost)]
    sweeps = {run.sweep for run in of_group}
    ended = [run for run in known if run.sweep in sweeps and run.status not in UNFINISHED]
    last = max(run.block for run in ended)
    return max(0, plan.limit - 1 - last) if any(run.block == last for run in of_group) else 0


def can_stop(configs: Iterable[Mapping[str, object]]) -> bool:
    """Return True if the configurations of a sweep are compared by a metric, and only its repeats
    vary the seed, so that it may add repeats until the comparisons are decided. `configs`: key ->
    value of each configuration.
    """
    runs = [RunRecord("", Path(), "", config=dict(config)) for config in configs]
    keys = [key for key in varied(runs) if not key.startswith(NOT_A_SETTING)]
    repeats = {tuple(run.config.get(key) for key in BLOCKS) for run in runs}
    is_timed = any(run.is_benchmark for run in runs)
    return len(repeats) == 1 and not is_timed and _is_about_settings(runs, keys)


def _group(title: str, metric: str, scale: Scale, settings: tuple[Configuration, ...]) -> Group:
    baseline, missing = _baseline(settings)
    rows = [(s.label, block, value) for s in settings for block, value in s.values.items()]
    others = [s for s in settings if s.values and s is not baseline]
    return Group(
        kind="settings",
        title=title,
        members=settings,
        baseline=baseline.label,
        rows={metric: rows},
        pairs={metric: [(s.label, baseline.label) for s in others]},
        metric=metric,
        scale=scale,
        rounding=_rounding(metric, settings) if scale.is_proportion else 0.0,
        missing_baseline=missing,
    )


def _rounding(metric: str, settings: Sequence[Configuration]) -> float:
    """Return the share of one image in the images that were evaluated. An accuracy cannot show a
    smaller difference. The result is 0 if the number of images is unknown.
    """
    key = f"{metric.partition('/')[0]}.samples"
    counts = [count for s in settings for run in s.runs if (count := run.integer(key))]
    if not counts:
        return 0.0
    # Each fold evaluates other images, so the numbers of images of all folds add up.
    is_over_folds = settings[0].block == "data.fold"
    folds = len({block for s in settings for block in s.values}) if is_over_folds else 1
    return 1 / min(counts) / folds


def _is_about_settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> bool:
    """Return True if runs differ in settings of the training, or only in seeds or folds. Return
    True also for a tuning, which compares settings by their speed.
    """
    if any(run.is_of_tuning for run in runs):
        return True
    batches = {run.config.get("data.batch_size") for run in runs} - {None}
    settings = [key for key in keys if not key.startswith(_OF_SPEED)]
    if any(key != "data.batch_size" or len(batches) > 1 for key in settings):
        return True
    repeats = {(run.block, *(run.config.get(key) for key in BLOCKS)) for run in runs if run.config}
    is_swept = len(repeats) > len({run.block for run in runs})
    return is_swept and not any(key.startswith("parallel.") for key in keys)


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> tuple[Configuration, ...]:
    """Group runs into settings, in the order of the sweep. The label of a setting shows the keys in
    which the settings differ. `keys`: config keys whose values differ between the runs.
    """
    alike: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for run in sorted(runs, key=_sweep_order):
        alike[tuple(repr(run.config.get(key)) for key in keys)].append(run)
    first = [members[0] for members in alike.values()]
    if len(first) == 1:
        # Show all keys of a single setting, because jobs that have not ended may have other values
        # of them.
        texts = [{key: _default(first[0], key) for key in keys}]
    else:
        texts = _swept_values(first, keys)
    # Job 0 of a tuning has the current values. The labels of the others show what they change,
    # unless no job with the current values has ended.
    is_current = first[0].is_of_tuning and _sweep_order(first[0])[1] == 0
    current = texts[0] if is_current else {}
    without_keys = (
        "the current settings"
        if current
        else model_name(next((run for run in runs if run.result), first[0]))
    )
    block = "data.fold" if len({run.config.get("data.fold") for run in runs}) > 1 else "seed"
    settings = []
    for members, of_setting in zip(alike.values(), texts, strict=True):
        changed = {key: text for key, text in of_setting.items() if text != current.get(key)}
        label = ", ".join(f"{key}={text}" for key, text in changed.items()) or without_keys
        lost = tuple(run for run in members if run.is_lost)
        kept = tuple(run for run in members if not run.is_lost)
        settings.append(Configuration(kept, label, of_setting, lost, block))
    return tuple(settings)


def _swept_values(first: Sequence[RunRecord], keys: Sequence[str]) -> list[dict[str, str]]:
    """Return, for each setting, the values of the keys in which the settings differ, as given on
    the command line. `first`: the first run of each setting.
    """
    given = [parse_overrides(run.overrides) for run in first]
    swept = [
        key
        for key in dict.fromkeys(key for texts in given for key in texts)
        if not key.startswith(_NOT_SWEPT)
    ]
    by_override = _differing(
        [
            {key: texts.get(key, _default(run, key)) for key in swept}
            for texts, run in zip(given, first, strict=True)
        ]
    )
    # Use the configs if the overrides do not tell the settings apart, as with single runs, or with
    # runs of an edited config.
    if len({tuple(texts.values()) for texts in by_override}) < len(first):
        return _differing([{key: _default(run, key) for key in keys} for run in first])
    return by_override


def _differing(texts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return, for each setting, the values of the keys in which the settings differ."""
    columns = {key: [of_setting[key] for of_setting in texts] for key in texts[0]}
    kept = {key: column for key, column in columns.items() if len(set(column)) > 1}
    return [{key: kept[key][place] for key in kept} for place in range(len(texts))]


def _default(run: RunRecord, key: str) -> str:
    return yaml_text(run.config[key]) if key in run.config else "default"


def _sweep_order(run: RunRecord) -> tuple[str, float, int]:
    """Return a sort key that puts jobs into the order of the command. Trials have no number of a
    configuration, but their folders' names begin with a number.
    """
    number = re.match(r"\d+", run.folder.name)
    of_folder = int(number[0]) if number else math.inf
    place = of_folder if run.configuration is None else run.configuration
    return run.sweep, place, run.position or 0


def _baseline(settings: Sequence[Configuration]) -> tuple[Configuration, str]:
    """Return (baseline, missing baseline). The baseline is the setting that sweep.baseline names,
    else the first one. If that setting has no finished run, the baseline is the first setting that
    has one, and the second value names the setting that is missing.
    """
    first = [setting.first for setting in settings]
    wanted = next((text for run in first if (text := run.config.get("sweep.baseline"))), None)
    index: int | None = 0
    if wanted is not None:
        configs = [
            {**s.settings, **run.config, **parse_overrides(run.overrides)}
            for s, run in zip(settings, first, strict=True)
        ]
        index = find_baseline(str(wanted), configs)
    if index is not None and settings[index].values:
        return settings[index], ""
    instead = next(setting for setting in settings if setting.values)
    return instead, f"sweep.baseline={wanted}" if index is None else settings[index].label


def find_baseline(baseline: str, configurations: Sequence[Mapping[str, object]]) -> int | None:
    """Return the index of the first configuration that has all values of `baseline`, a text such as
    `a=1, b=2`. Return None if there is none.
    """
    wanted = [
        part.partition("=")[::2] for part in re.split(r"[,\s]+(?=[\w./]+=)", baseline.strip())
    ]
    for index, values in enumerate(configurations):
        if all(key in values and _same(value, yaml_text(values[key])) for key, value in wanted):
            return index
    return None


def _same(a: str, b: str) -> bool:
    """Return True if two texts are equal, or if both are the same number, such as 1e-3 and
    0.001.
    """
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def check_baseline(
    baseline: str, given: Sequence[Sequence[str]], configs: Sequence[Mapping[str, object]]
) -> None:
    """Raise ValueError if no configuration has the values of `baseline`, a text such as `a=1, b=2`.

    `given`: overrides of each configuration. `configs`: key -> value of each configuration.
    """
    configurations = [
        {**config, **parse_overrides(words)} for config, words in zip(configs, given, strict=True)
    ]
    if find_baseline(baseline, configurations) is None:
        common = set.intersection(*map(set, given))
        known = join_short(
            (",".join(word for word in words if word not in common) for words in given), 12
        )
        raise ValueError(
            f"sweep.baseline={baseline}: no configuration of this sweep has these values; expected "
            f"one of: {known}"
        )
