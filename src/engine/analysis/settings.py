"""Group the runs of a sweep over settings by the swept values, with one value of the metric per seed and fold."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev

from src.engine.analysis.configurations import NOT_A_SETTING, Configuration, varied
from src.engine.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from src.engine.analysis.scales import RATIO, Scale, level_scale, proportion_scale
from src.engine.analysis.statistics import SMALLEST_DIFFERENCE, Contrast, Row, decide, estimate
from src.engine.analysis.wording import join_short, model_name
from src.engine.config.suggest import is_lower_better, is_proportion
from src.engine.machine.text import yaml_text

BLOCKS = ("seed", "data.fold")
_NOT_SWEPT = (*BLOCKS, "sweep.", "hydra.", "hydra/", "debug", "print_config")
_OF_SPEED = ("parallel.", "data.batch_size_per_device", "data.workers")


@dataclass(frozen=True)
class Setting(Configuration):
    """All runs of one configuration of a sweep over settings."""

    settings: Mapping[str, str]  # swept key -> value as given
    label: str = ""

    @cached_property
    def values(self) -> dict[object, float]:
        """Headline metric by seed and fold. Runs with equal seed and fold count as one value, their mean."""
        blocks: dict[object, list[float]] = defaultdict(list)
        for run in self.runs:
            if run.metric_value is not None:
                blocks[tuple(run.config.get(key) for key in BLOCKS)].append(run.metric_value)
        return {block: fmean(values) for block, values in blocks.items()}

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation of `values`; None for a single value."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


# Compared by identity.
@dataclass(frozen=True, eq=False)
class SettingGroup:
    """Configurations on the same data and code that are compared by their headline metric."""

    metric: str
    scale: Scale
    title: str  # data and code where the groups of the report differ
    settings: tuple[Setting, ...]  # in the order of the sweep
    baseline: Setting
    note: str = ""  # why the baseline is not the requested one
    contrasts: Sequence[Contrast] = field(default=())  # of all other settings with the baseline

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for setting in self.settings for key in setting.settings))

    @property
    def rows(self) -> list[Row]:
        return [(s.label, block, value) for s in self.settings for block, value in s.values.items()]

    @property
    def is_about_speed(self) -> bool:
        return self.scale.is_ratio

    @property
    def blocks(self) -> int:
        return len({block for _, block, _ in self.rows})

    @property
    def unit_of_repeats(self) -> str:
        if self.is_about_speed:
            return "repeat"
        return "fold" if len({run.config.get("data.fold") for s in self.settings for run in s.runs}) > 1 else "seed"

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(run.hardware for setting in self.settings for run in setting.runs))

    def named(self, label: str) -> Setting:
        return next(setting for setting in self.settings if setting.label == label)

    def best(self, count: int) -> list[Setting]:
        """Return the baseline and the settings with the best means, `count` in all, in the order of the sweep."""
        ranked = sorted(self.settings, key=lambda s: (s is not self.baseline, -self.scale.sign * s.mean))
        return [setting for setting in self.settings if setting in ranked[:count]]

    def contrast(self, setting: Setting) -> Contrast | None:
        return next((contrast for contrast in self.contrasts if contrast.a == setting.label), None)


def setting_groups(runs: Iterable[RunRecord], smallest_difference: float = SMALLEST_DIFFERENCE) -> list[SettingGroup]:
    """Return the groups of a sweep over settings, compared with a baseline; [] for a sweep over strategies and devices."""
    runs = list(runs)
    with_metric = [run for run in runs if run.comparable and run.metric_value is not None]
    keys = [key for key in varied(with_metric) if not key.startswith(NOT_A_SETTING) and key != "data.fold"]
    if not _is_about_settings(with_metric, keys):
        return []
    members: dict[tuple[str, str, str], list[RunRecord]] = defaultdict(list)
    for run in with_metric:
        members[run.metric, f"data {run.data or 'unknown'}", f"code {run.commit or 'unknown'}"].append(run)
    differing = [len(set(column)) > 1 for column in zip(*members, strict=True)]
    groups = []
    for names, alike in members.items():
        title = ", ".join(name for name, differs in zip(names, differing, strict=True) if differs)
        settings = _settings(alike, keys)
        if settings:
            baseline, note = _baseline(settings)
            groups.append(SettingGroup(names[0], _scale(names[0], settings), title, settings, baseline, note))
    groups.sort(key=lambda group: -len(group.rows))
    estimates = []
    for group in groups:
        pairs = [(setting.label, group.baseline.label) for setting in group.settings if setting is not group.baseline]
        estimates.append(estimate(group.rows, pairs, group.scale))
    # In one call, because Holm's rule corrects for the number of contrasts in all groups.
    decided = iter(decide([e for of_group in estimates for e in of_group], smallest_difference))
    return [
        replace(group, contrasts=[next(decided) for _ in of_group])
        for group, of_group in zip(groups, estimates, strict=True)
    ]


def _is_about_settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> bool:
    """Return True if settings of the training vary, or only seeds or folds, or if the sweep tunes settings for speed."""
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
    """Return the compared configurations in the order of the sweep, each labelled with its values of the keys that differ."""
    alike: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for run in sorted(runs, key=_sweep_order):
        alike[tuple(repr(run.config.get(key)) for key in keys)].append(run)
    if len(alike) == 1:
        [members] = alike.values()
        return (Setting(tuple(members), {}, model_name(members[0])),)
    given = [parse_overrides(members[0].overrides) for members in alike.values()]
    swept = [key for key in dict.fromkeys(key for texts in given for key in texts) if not key.startswith(_NOT_SWEPT)]
    first = [members[0] for members in alike.values()]
    by_override = _differing(
        [{key: texts.get(key, _default(run, key)) for key in swept} for texts, run in zip(given, first, strict=True)]
    )
    # Single runs and runs of an edited config may have equal overrides.
    if len({tuple(texts.values()) for texts in by_override}) < len(alike):
        by_override = _differing([{key: _default(run, key) for key in keys} for run in first])
    return tuple(
        Setting(tuple(members), texts, ", ".join(f"{key}={value}" for key, value in texts.items()))
        for members, texts in zip(alike.values(), by_override, strict=True)
    )


def _differing(texts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return each configuration's values of the keys that differ. Rounds long numbers of a search if they stay distinct."""
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
    """Return a key that sorts jobs in the order of the command, which the number in the folder's name gives."""
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
    """Return the configuration that sweep.baseline names, else the first, and a note if the named one has no run."""
    wanted = next((text for s in settings for run in s.runs if (text := run.config.get("sweep.baseline"))), None)
    if wanted is None:
        return settings[0], ""
    configs = [{**s.settings, **run.config, **parse_overrides(run.overrides)} for s in settings for run in s.runs[:1]]
    index = find_baseline(str(wanted), configs)
    if index is None:
        return settings[0], f"No run of sweep.baseline={wanted} is done; the baseline is {settings[0].label}."
    return settings[index], ""


def find_baseline(baseline: str, configurations: Sequence[Mapping[str, object]]) -> int | None:
    """Return the index of the first configuration that has all values of `baseline`, such as `a=1, b=2`; else None."""
    wanted = [part.partition("=")[::2] for part in re.split(r"[,\s]+(?=[\w./]+=)", baseline.strip())]
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


def check_baseline(baseline: str, given: Sequence[Sequence[str]], configs: Sequence[Mapping[str, object]]) -> None:
    """Raise ValueError if `baseline` matches no configuration. `given`: overrides of each; `configs`: key values of each."""
    configurations = [{**config, **parse_overrides(words)} for config, words in zip(configs, given, strict=True)]
    if find_baseline(baseline, configurations) is None:
        common = set.intersection(*map(set, given))
        known = join_short((",".join(word for word in words if word not in common) for words in given), 12)
        raise ValueError(f"sweep.baseline={baseline}: expected settings of this sweep, one of: {known}")
