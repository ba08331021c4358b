"""Group the runs of a sweep over settings by the values of the swept keys. Each setting gets one
value of the metric per seed, or per fold.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

from timm_parallel.lab.analysis.groups import (
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

    # Swept key -> value, as the user wrote it.
    settings: Mapping[str, str]
    # Runs that failed, or whose value of the metric is not finite.
    lost: tuple[RunRecord, ...] = ()
    # The key in which repeats differ: seed or data.fold.
    block: str = "seed"

    @cached_property
    def values(self) -> dict[object, float]:
        """Headline metric as a dictionary from repeat to value. A repeat is a seed, or a fold if
        there are several folds. Several runs of a repeat count as their mean.
        """
        # Average the seeds of a fold, because they share its images and are not independent.
        blocks: dict[object, list[float]] = defaultdict(list)
        for run in self.runs:
            if run.metric_value is not None:
                blocks[run.config.get(self.block)].append(run.metric_value)
        return {block: fmean(values) for block, values in blocks.items()}

    @property
    def mean(self) -> float | None:
        """Mean of the headline metric over the repeats. None if all runs are lost."""
        return fmean(self.values.values()) if self.values else None

    @property
    def is_sound(self) -> bool:
        """True if no run of the setting ran out of memory or had a value that is not finite, and at
        least one run has a value. A report recommends only such a setting.
        """
        return bool(self.values) and not any(run.lost_by_settings for run in self.lost)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the headline metric over the repeats. None for a single repeat."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


# Groups of settings are compared by identity, so two of them are never equal.
@dataclass(frozen=True, eq=False)
class SettingGroup(Question[Setting]):
    """Settings of a sweep on the same data and code, which are compared by their headline
    metric.
    """

    # Data and code of the group, as far as other groups of the report differ in them.
    title: str
    baseline: Setting
    # Sentence that explains why the baseline is not the requested one. Empty if it is.
    note: str = ""

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for setting in self.members for key in setting.settings))

    def rows(self, measure: str = "") -> list[Row]:
        """Return (setting, repeat, value of the headline metric) of all settings."""
        return [(s.label, block, value) for s in self.members for block, value in s.values.items()]

    def pairs(self, measure: str) -> list[tuple[str, str]]:
        """Return the pairs of settings that are compared: each setting with the baseline."""
        return [(s.label, self.baseline.label) for s in self.alive if s is not self.baseline]

    def estimates(self, measure: str, pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
        """Estimate the differences of pairs of settings. The estimates allow for any value that a
        lost run may have had.
        """
        return [self._bounded(self.model.compare(a, b)) for a, b in pairs]

    @cached_property
    def model(self) -> Model:
        # Speeds of all settings have about equal noise. For a metric, each setting has its own
        # noise.
        return Model(self.rows(), self.scale, self.is_about_speed, self.rounding)

    def _bounded(self, e: Estimate) -> Estimate:
        """Return an estimate that allows for the unknown values of lost runs. Each such value is
        taken to be between the worst and the best value of the group.
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
        """Return True if a setting is shown to be better, although some of its runs ran out of
        memory or diverged. The comparison then gets no verdict, because it only uses the runs that
        succeeded.
        """
        return contrast.verdict == SUPPORTED and not self.named(contrast.a).is_sound

    @cached_property
    def highest(self) -> str:
        """Label of the setting with the best mean. A setting with lost runs is chosen only if every
        setting has lost runs.
        """
        estimates = self.estimates(self.metric, self.pairs(self.metric))
        better = {e.a: e.better for e in estimates if e.difference is not None}
        better[self.baseline.label] = 0.0
        candidates = [s.label for s in self.complete if s.label in better]
        return max(candidates or [self.baseline.label], key=lambda label: better[label])

    @cached_property
    def may_be_best(self) -> set[str]:
        """Labels of the settings that may be the best, because they are not shown to be worse than
        another one.
        """
        others = [(self.highest, s.label) for s in self.alive if s.label != self.highest]
        # Also remove settings that are shown to be worse than a setting with lost runs. Such a
        # setting is never the highest, but it may be better than the baseline.
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
        """Settings that have at least one value of the headline metric."""
        return [setting for setting in self.members if setting.values]

    @property
    def complete(self) -> list[Setting]:
        """Settings without lost runs. If there are none, all settings that have a value."""
        return [setting for setting in self.alive if not setting.lost] or self.alive

    @cached_property
    def rounding(self) -> float:
        """Share of one image in the images that were evaluated. An accuracy cannot show a smaller
        difference. 0 if the number of images is unknown, or if the metric is not a proportion.
        """
        key = f"{self.metric.partition('/')[0]}.samples"
        counts = [count for run in self.runs if (count := run.integer(key))]
        if not counts or not self.scale.is_proportion:
            return 0.0
        # Each fold evaluates other images, so the numbers of images of all folds add up.
        return 1 / min(counts) / (self.blocks if self.unit_of_repeats == "fold" else 1)

    @property
    def is_on_fixed_images(self) -> bool:
        """True if all runs were evaluated on the same images, so that the noise comes only from
        training.
        """
        key = f"data.{self.metric.partition('/')[0]}"
        return len({run.result.get(key) for run in self.runs}) == 1

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(run.hardware for run in self.runs))

    def interval(self, setting: Setting) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of the mean of a setting, or None for a single
        value.
        """
        return mean_interval(setting.values.values(), self.scale, self.rounding)

    def best(self, count: int) -> list[Setting]:
        """Return `count` settings in the order of the sweep: the baseline, and those with the best
        means.
        """

        ranked = sorted(
            self.members,
            key=lambda s: (
                s is self.baseline,
                -math.inf if s.mean is None else self.scale.sign * s.mean,
            ),
            reverse=True,
        )
        return [setting for setting in self.members if setting in ranked[:count]]


def setting_groups(runs: Iterable[RunRecord]) -> list[SettingGroup]:
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
    with_metric = [run for run in known if run.comparable and run.metric_value is not None]
    with_metric = [run for run in with_metric if run.metric_is is not None]
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
        if any(setting.values for setting in settings):
            baseline, note = _baseline(settings)
            groups.append(
                SettingGroup(
                    title,
                    baseline,
                    note,
                    members=settings,
                    metric=names[0],
                    scale=_scale(names[0], names[3], settings),
                )
            )
    return sorted(groups, key=lambda group: -len(group.rows()))


def _lost_shift(setting: Setting, end: float, scale: Scale) -> float:
    """Return by how much the mean of a setting, on the scale, would change if each of its lost runs
    had reached the value `end`. The caller passes the best or the worst value of the group.
    """
    share = len(setting.lost) / (len(setting.lost) + len(setting.runs)) if setting.lost else 0.0
    shift = (
        abs(scale.to(end) - fmean(scale.to(value) for value in setting.values.values()))
        if share
        else 0.0
    )
    return share * shift if math.isfinite(shift) else math.inf


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


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> tuple[Setting, ...]:
    """Group runs into settings, in the order of the sweep. The label of a setting shows the keys in
    which the settings differ. `keys`: config keys whose values differ between the runs.
    """
    alike: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for run in sorted(runs, key=_sweep_order):
        alike[tuple(repr(run.config.get(key)) for key in keys)].append(run)
    if len(alike) == 1:
        [members] = alike.values()
        # Show all keys of a single setting, because jobs that have not ended may have other values
        # of them.
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
    """Return, for each setting, the values of the keys in which the settings differ. Long numbers
    of a search are rounded if they stay distinct.
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
    """Return a sort key that puts jobs into the order of the command. The number at the start of a
    folder's name is the position in that order.
    """
    number = re.match(r"\d+", run.folder.name)
    return run.sweep, int(number[0]) if number else math.inf, run.position or 0


def _scale(metric: str, metric_is: tuple[bool, bool], settings: Sequence[Setting]) -> Scale:
    lower_is_better, is_proportion = metric_is
    values = [value for setting in settings for value in setting.values.values()]
    if metric == IMAGES_PER_SECOND:
        return RATIO
    if is_proportion and all(0 <= value <= 1 for value in values):
        return proportion_scale(lower_is_better)
    # Use logarithms for a loss, because its spread grows with its value.
    return level_scale(lower_is_better and min(values) > 0, lower_is_better)


def _baseline(settings: Sequence[Setting]) -> tuple[Setting, str]:
    """Return (baseline, note). The baseline is the setting that sweep.baseline names, else the
    first one. The note tells why another setting is used if the named one has no finished run.
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
