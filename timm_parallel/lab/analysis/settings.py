"""Group the runs of a sweep over settings by the swept values, with one value of the metric per
seed and fold.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

from timm_parallel.config.suggest import is_lower_better, is_proportion
from timm_parallel.lab.analysis.questions import (
    NOT_A_SETTING,
    Configuration,
    Question,
    varied,
)
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.scales import RATIO, Scale, level_scale, proportion_scale
from timm_parallel.lab.analysis.selection import may_be_best
from timm_parallel.lab.analysis.statistics import (
    SUPPORTED,
    Contrast,
    Estimate,
    Model,
    Row,
    mean_interval,
)
from timm_parallel.lab.analysis.wording import join_short, model_name
from timm_parallel.machine.text import yaml_text

BLOCKS = ("seed", "data.fold")
_NOT_SWEPT = (*BLOCKS, "sweep.", "hydra.", "hydra/", "debug", "print_config")
_OF_SPEED = ("parallel.", "data.batch_size_per_device", "data.workers")


@dataclass(frozen=True)
class Setting(Configuration):
    """All runs of one configuration of a sweep over settings."""

    settings: Mapping[str, str]  # swept key -> value as given
    lost: tuple[RunRecord, ...] = ()  # runs that failed, or whose value is not finite
    block: str = "seed"  # the key by which repeats differ

    @cached_property
    def values(self) -> dict[object, float]:
        """Headline metric by repeat: by seed, or by fold if there are several. Runs of one repeat
        count as their mean.
        """
        # Seeds of one fold share its images, so they do not count as independent.
        blocks: dict[object, list[float]] = defaultdict(list)
        for run in self.runs:
            if run.metric_value is not None:
                blocks[run.config.get(self.block)].append(run.metric_value)
        return {block: fmean(values) for block, values in blocks.items()}

    @property
    def mean(self) -> float | None:
        """Mean of `values`; None if all runs are lost."""
        return fmean(self.values.values()) if self.values else None

    @property
    def is_sound(self) -> bool:
        """False if runs are lost because of the settings. Such a setting is never recommended."""
        return bool(self.values) and not any(run.lost_by_settings for run in self.lost)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of `values`; None for a single value."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


# Compared by identity.
@dataclass(frozen=True, eq=False)
class SettingGroup(Question[Setting]):
    """Configurations on the same data and code that are compared by their headline metric."""

    title: str  # data and code where the groups of the report differ
    baseline: Setting
    note: str = ""  # why the baseline is not the requested one

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for setting in self.members for key in setting.settings))

    def rows(self, measure: str = "") -> list[Row]:
        """Return (setting, repeat, value of the metric) of all settings."""
        return [(s.label, block, value) for s in self.members for block, value in s.values.items()]

    def pairs(self, measure: str) -> list[tuple[str, str]]:
        """Return the pairs to compare: all other settings with the baseline."""
        return [(s.label, self.baseline.label) for s in self.alive if s is not self.baseline]

    def estimates(self, measure: str, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Estimate the differences of pairs of settings, and allow for lost runs."""
        return [self._bounded(self.model.compare(a, b)) for a, b in pairs]

    @cached_property
    def model(self) -> Model:
        # The noise of all settings is about equal for speed only.
        return Model(self.rows(), self.scale, self.is_about_speed, self.rounding)

    def _bounded(self, e: Estimate) -> Estimate:
        """Return an estimate that allows for any value of lost runs between the extremes of all
        values of the group.
        """
        a, b = self.named(e.a), self.named(e.b)
        if not a.lost and not b.lost:
            return e
        values = [value for *_, value in self.rows()]
        sign = self.scale.sign
        worst, best = sorted((min(values), max(values)), key=lambda value: sign * value)
        down = _lost_shift(a, worst, self.scale) + _lost_shift(b, best, self.scale)
        up = _lost_shift(a, best, self.scale) + _lost_shift(b, worst, self.scale)
        return replace(e, slack=(up, down) if self.scale.lower_is_better else (down, up))

    def is_void(self, contrast: Contrast) -> bool:
        """Return True if the better setting has ended runs itself: the values that are left say
        nothing about them.
        """
        return contrast.verdict == SUPPORTED and not self.named(contrast.a).is_sound

    @cached_property
    def highest(self) -> str:
        """Label of the setting with the best mean, of those without lost runs if there are any."""
        estimates = self.estimates(self.metric, self.pairs(self.metric))
        better = {e.a: e.better for e in estimates if e.difference is not None}
        better[self.baseline.label] = 0.0
        candidates = [s.label for s in self.complete if s.label in better]
        return max(candidates or [self.baseline.label], key=lambda label: better[label])

    @cached_property
    def may_be_best(self) -> set[str]:
        """Labels of the settings that cannot be told from the best."""
        others = [(self.highest, s.label) for s in self.alive if s.label != self.highest]
        # A setting with lost runs is never the highest, but it may be shown to beat the baseline.
        beaten = {contrast.b for contrast in self.contrasts if contrast.verdict == SUPPORTED}
        return (may_be_best(self.estimates(self.metric, others)) | {self.highest}) - beaten

    @property
    def is_about_speed(self) -> bool:
        return self.scale.is_ratio

    @property
    def blocks(self) -> int:
        return len({block for _, block, _ in self.rows()})

    @property
    def unit_of_repeats(self) -> str:
        return "repeat" if self.is_about_speed else self.members[0].block.removeprefix("data.")

    @property
    def alive(self) -> list[Setting]:
        """Settings with a value."""
        return [setting for setting in self.members if setting.values]

    @property
    def complete(self) -> list[Setting]:
        """Settings without lost runs; if there are none, all with a value."""
        return [setting for setting in self.alive if not setting.lost] or self.alive

    @cached_property
    def rounding(self) -> float:
        """Share of one image in those evaluated: no smaller difference of a proportion means
        anything. 0 if unknown.
        """
        key = f"{self.metric.partition('/')[0]}.samples"
        counts = [count for run in self.runs if (count := run.integer(key))]
        if not counts or not self.scale.is_proportion:
            return 0.0
        # Folds have different images.
        return 1 / min(counts) / (self.blocks if self.unit_of_repeats == "fold" else 1)

    @property
    def is_on_fixed_images(self) -> bool:
        """True if all runs were evaluated on the same images, so that the noise is that of
        training.
        """
        key = f"data.{self.metric.partition('/')[0]}"
        return len({run.result.get(key) for run in self.runs}) == 1

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(run.hardware for run in self.runs))

    def interval(self, setting: Setting) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean of a setting; None for a single value."""
        return mean_interval(setting.values.values(), self.scale, self.rounding)

    def best(self, count: int) -> list[Setting]:
        """Return the baseline and the settings with the best means, `count` in all, in the order of
        the sweep.
        """
        worst = -math.inf
        ranked = sorted(
            self.members,
            key=lambda s: (
                s is self.baseline,
                worst if s.mean is None else self.scale.sign * s.mean,
            ),
            reverse=True,
        )
        return [setting for setting in self.members if setting in ranked[:count]]


def setting_groups(runs: Iterable[RunRecord]) -> list[SettingGroup]:
    """Return the groups of a sweep over settings, largest first; [] for a sweep over strategies and
    devices. Computes no contrasts.
    """
    # What varies shows in the configs of all jobs, also of those that failed or wait.
    known = [
        run
        for run in runs
        if run.config and not run.doubt and (run.is_of_tuning or not run.is_benchmark)
    ]
    with_metric = [run for run in known if run.comparable and run.metric_value is not None]
    keys = [
        key for key in varied(known) if not key.startswith(NOT_A_SETTING) and key != "data.fold"
    ]
    if not with_metric or not _is_about_settings(known, keys):
        return []
    members: dict[tuple[str, str, str], list[RunRecord]] = defaultdict(list)
    for run in with_metric:
        members[
            run.metric, f"data {run.data or 'unknown'}", f"code {run.commit or 'unknown'}"
        ].append(run)
    differing = [len(set(column)) > 1 for column in zip(*members, strict=True)]
    for run in (run for run in known if run.is_lost):
        # A failed run has no fingerprint of its data. It counts for the largest group with its
        # code.
        alike = [names for names in members if names[2] == f"code {run.commit}"] or list(members)
        members[max(alike, key=lambda names: len(members[names]))].append(run)
    groups = []
    for names, of_group in members.items():
        title = ", ".join(name for name, differs in zip(names, differing, strict=True) if differs)
        settings = _settings(of_group, keys)
        if any(setting.values for setting in settings):
            baseline, note = _baseline(settings)
            scale = _scale(names[0], settings)
            group = SettingGroup(
                title, baseline, note, members=settings, metric=names[0], scale=scale
            )
            groups.append(group)
    return sorted(groups, key=lambda group: -len(group.rows()))


def _lost_shift(setting: Setting, end: float, scale: Scale) -> float:
    """Return by how much the mean of a setting on the scale would change if its lost runs had the
    value `end`.
    """
    share = len(setting.lost) / (len(setting.lost) + len(setting.runs)) if setting.lost else 0.0
    shift = (
        abs(scale.to(end) - fmean(scale.to(value) for value in setting.values.values()))
        if share
        else 0.0
    )
    return share * shift if math.isfinite(shift) else math.inf


def _is_about_settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> bool:
    """Return True if settings of the training vary, or only seeds or folds, or if the sweep tunes
    settings for speed.
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


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> tuple[Setting, ...]:
    """Return the compared configurations in the order of the sweep, each labelled with its values
    of the keys that differ.
    """
    alike: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for run in sorted(runs, key=_sweep_order):
        alike[tuple(repr(run.config.get(key)) for key in keys)].append(run)
    if len(alike) == 1:
        [members] = alike.values()
        # Jobs that have not ended may have other values of these keys.
        texts = [{key: _default(members[0], key) for key in keys}]
    else:
        texts = _swept_values([members[0] for members in alike.values()], keys)
    labels = [
        ", ".join(f"{key}={value}" for key, value in of_setting.items()) for of_setting in texts
    ]
    if not labels[0]:
        [members] = alike.values()
        labels = [model_name(next((run for run in members if run.result), members[0]))]
    folds = {run.config.get("data.fold") for run in runs}
    block = "data.fold" if len(folds) > 1 else "seed"
    settings = []
    for members, of_setting, label in zip(alike.values(), texts, labels, strict=True):
        lost = tuple(run for run in members if run.is_lost)
        settings.append(
            Setting(
                tuple(run for run in members if run not in lost), label, of_setting, lost, block
            )
        )
    return tuple(settings)


def _swept_values(first: Sequence[RunRecord], keys: Sequence[str]) -> list[dict[str, str]]:
    """Return the values of the keys that differ, as given on the command line, of the first run of
    each configuration.
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
    # Single runs and runs of an edited config may have equal overrides.
    if len({tuple(texts.values()) for texts in by_override}) < len(first):
        return _differing([{key: _default(run, key) for key in keys} for run in first])
    return by_override


def _differing(texts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return each configuration's values of the keys that differ. Rounds long numbers of a search
    if they stay distinct.
    """
    kept: list[dict[str, str]] = [{} for _ in texts]
    for key in texts[0]:
        short = {text[key]: _round(text[key]) for text in texts}
        is_distinct = len(set(short.values())) == len(short)
        if len(short) > 1:
            for values, text in zip(kept, texts, strict=True):
                values[key] = short[text[key]] if is_distinct else text[key]
    return kept


def _round(text: str) -> str:
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", text) else text


def _default(run: RunRecord, key: str) -> str:
    return yaml_text(run.config[key]) if key in run.config else "default"


def _sweep_order(run: RunRecord) -> tuple[str, float, int]:
    """Return a key that sorts jobs in the order of the command, which the number in the folder's
    name gives.
    """
    number = re.match(r"\d+", run.folder.name)
    return run.sweep, int(number[0]) if number else math.inf, run.position or 0


def _scale(metric: str, settings: Sequence[Setting]) -> Scale:
    values = [value for setting in settings for value in setting.values.values()]
    if metric == IMAGES_PER_SECOND:
        return RATIO
    if is_proportion(metric) and all(0 <= value <= 1 for value in values):
        return proportion_scale(is_lower_better(metric))
    # The spread of a loss grows with its level.
    return level_scale(is_lower_better(metric) and min(values) > 0, is_lower_better(metric))


def _baseline(settings: Sequence[Setting]) -> tuple[Setting, str]:
    """Return the configuration that sweep.baseline names, else the first, and a note if the named
    one has no run.
    """
    first = [(*setting.runs, *setting.lost)[0] for setting in settings]
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
    name = f"sweep.baseline={wanted}" if index is None else settings[index].label
    return (
        instead,
        f"No run of the baseline {name} is done, so settings are compared with {instead.label}.",
    )


def find_baseline(baseline: str, configurations: Sequence[Mapping[str, object]]) -> int | None:
    """Return the index of the first configuration that has all values of `baseline`, such as `a=1,
    b=2`; else None.
    """
    wanted = [
        part.partition("=")[::2] for part in re.split(r"[,\s]+(?=[\w./]+=)", baseline.strip())
    ]
    for index, values in enumerate(configurations):
        if all(key in values and _same(value, yaml_text(values[key])) for key, value in wanted):
            return index
    return None


def _same(a: str, b: str) -> bool:
    """Return True if two texts are equal, or are equal numbers such as 1e-3 and 0.001."""
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def check_baseline(
    baseline: str, given: Sequence[Sequence[str]], configs: Sequence[Mapping[str, object]]
) -> None:
    """Raise ValueError if `baseline` matches no configuration. `given`: overrides of each;
    `configs`: key values of each.
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
            f"sweep.baseline={baseline}: expected settings of this sweep, one of: {known}"
        )
