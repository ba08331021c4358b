"""Build the tables of a report, whose cells are strings for HTML and Markdown. The table of
settings is also written as LaTeX for an article. A missing value is a dash, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

import pandas as pd

from timm_parallel.lab.analysis.groups import DASH, Configuration, Group, join_short, values
from timm_parallel.lab.analysis.headline import finding
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord
from timm_parallel.lab.analysis.sequential import LEVEL, word_of
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
    Contrast,
    Summary,
    summarize,
)
from timm_parallel.lab.analysis.strategies import efficiency, same_threads
from timm_parallel.lab.analysis.verdict import BASE, CODE, HEAD, METRIC, SPEED, Verdict
from timm_parallel.lab.report.sentences import (
    effect_text,
    figure,
    level_text,
    percent,
    points,
    sentence,
    size_text,
    value_text,
    with_range,
)
from timm_parallel.machine.text import yaml_text

NOT_HERE = "n/a"
# Largest number of links to the runs of a configuration, of named runs of a group, and of
# devices whose memory is shown.
MOST_LINKS, MOST_NAMED, MOST_DEVICES = 12, 12, 8
# Largest number of jobs in the table of unfinished jobs. The file report.csv has all.
MOST_UNFINISHED = 300
# Characters of a reason in the table of unfinished jobs.
LONGEST_REASON = 240
# Largest number of settings in a table, the best ones. The file report.json has all.
MOST_SETTINGS = 60
VERDICT, DETECTABLE = "better?", "min. detectable difference"
# Column of the table of a verdict on a code change.
DIFFERENCE = f"difference ({level_text(LEVEL)})"
# Verdict on the claim that a setting is better -> cell of the column "better?".
ANSWERS = {
    SUPPORTED: "yes",
    NOT_SUPPORTED: "no",
    INCONCLUSIVE: "not shown",
    NOT_MEASURABLE: NOT_MEASURABLE,
}
# Columns that are shown as n/a if the devices are threads on CPU, because they say nothing about
# GPUs.
_OF_GPUS = (
    "images/s",
    "over single (95 %)",
    "ms per step",
    "p95",
    "exposed comm., ms",
    "J per image",
)
# Keys of environment.json that are different in each run, so that the report leaves them out.
_OF_ONE_RUN = ("format", "time", "command", "topology")


@dataclass(frozen=True)
class Table:
    # Rows as column -> text. All rows have the same columns.
    rows: Sequence[dict[str, str]]
    caption: str = ""
    notes: Sequence[str] = ()
    # Columns that hold texts. All other columns hold numbers.
    text_columns: Sequence[str] = ()
    # The runs of each row. The last column of the table has links to the first of them.
    runs: Sequence[Sequence[RunRecord]] = ()


def results_table(group: Group) -> Table:
    """Build the table of a group, with a row per configuration and without columns that have no
    value.
    """
    return _points_table(group) if group.kind == "strategies" else _settings_table(group)


def _without_empty(rows: Sequence[dict[str, str]], kept: Sequence[str]) -> list[dict[str, str]]:
    """Remove the columns of a table that have no value in any row. `kept`: columns that are not
    removed even if they are empty.
    """
    empty = (DASH, NOT_HERE, "")
    filled = {name for row in rows for name, text in row.items() if text not in empty}
    names = filled.union(kept)
    return [{name: text for name, text in row.items() if name in names} for row in rows]


def _points_table(group: Group) -> Table:
    """Build the table of speed, memory and metrics of a group, with a row per strategy and number
    of devices.
    """
    titles = {
        run.metric: f"{run.metric} (lower is better)"
        if run.metric_is is not None and run.metric_is[0]
        else run.metric
        for run in group.runs
    }
    largest = max((peak.high for point in group.members for peak in point.peak_bytes), default=0)
    unit, factor = ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)
    peak = "resident" if group.runs[0].accelerator == "cpu" else "peak"
    rows = [
        _point_row(group, point)
        | {title: _summary(point.metrics.get(name)) for name, title in titles.items()}
        | {f"{peak} memory, {unit}, by device": _peaks(point, factor)}
        for point in group.members
    ]
    return Table(
        _without_empty(rows, ["images/s"]),
        caption=f"{group.runs[0].scaling.capitalize()}: medians (smallest–largest) of the repeats",
        notes=_notes(group),
        text_columns=["point"],
        runs=[point.runs for point in group.members],
    )


def _point_row(group: Group, point: Configuration) -> dict[str, str]:
    share, steps = efficiency(group, point), point.measure("steps_timed")
    marks = {
        " *": point.is_simulated,
        " †": point.needless_threads,
        " ‡": not same_threads(group, point),
    }
    flagged = f", {point.flagged} flagged" if point.flagged else ""
    row = {
        "point": point.label + "".join(mark for mark, is_set in marks.items() if is_set),
        "runs": f"{len(point.runs)}{flagged}",
        "images/s": _summary(point.speed),
        "over single (95 %)": effect_text(group.over_baseline(point)),
        "efficiency": figure(share) if share else DASH,
        "ms per step": _summary(point.measure("step_ms")),
        "p95": _median(point.measure("step_ms_p95")),
        "steps timed": f"{steps.median:,.0f}" if steps else DASH,
        "data wait, %": _median(point.measure("data_wait"), factor=100),
        "exposed comm., ms": _median(point.measure("exposed_ms")),
        "CPU s per s": _median(point.measure("cpu_seconds")),
        "J per image": _median(point.measure("joules_per_image")),
        "to first step, s": _summary(point.measure("first_step_seconds")),
    }
    return row | dict.fromkeys(_OF_GPUS, NOT_HERE) if point.is_simulated else row


def _settings_table(group: Group) -> Table:
    """Build the table of the metric of a group of settings, with a row per setting in the order of
    the sweep.
    """
    shown = group.best(MOST_SETTINGS)
    return Table(
        _without_empty([_setting_row(group, setting) for setting in shown], group.keys),
        caption=f"{group.metric} by setting: mean over the {group.unit_of_repeats}s",
        notes=_rest(len(group.members) - len(shown), "{} more settings, in report.json."),
        text_columns=[*group.keys, "setting", VERDICT],
        runs=[setting.runs for setting in shown],
    )


def _setting_row(group: Group, setting: Configuration) -> dict[str, str]:
    is_baseline = setting.label == group.baseline and len(group.members) > 1
    contrast = group.over_baseline(setting)
    unit = ", points" if group.scale.is_proportion else ""
    effect = f"{'ratio' if group.scale.is_ratio else 'difference'}{unit}"
    lower = ", lower is better" if group.scale.lower_is_better else ""
    detectable = contrast.detectable if contrast else None
    to_text = points if group.scale.is_proportion else figure
    deviation = DASH if setting.deviation is None else to_text(setting.deviation)
    return {
        **(setting.settings or {"setting": setting.label}),
        f"{group.unit_of_repeats}s": str(len(setting.values)),
        "runs lost": f"{len(setting.lost)} of {len(setting.lost) + len(setting.runs)}"
        if setting.lost
        else DASH,
        f"{group.metric}{lower}": value_text(setting.mean, group.scale.unit),
        "sd": deviation,
        f"{effect} ({level_text(group.level)})": "baseline"
        if is_baseline
        else effect_text(contrast),
        VERDICT: ANSWERS[contrast.verdict] if contrast else "",
        DETECTABLE: DASH if detectable is None else size_text(detectable, group.scale.unit),
        "images/s": _summary(setting.speed),
        "memory, MiB": _median(
            max(setting.peak_bytes, key=lambda peak: peak.median, default=None), 2**-20
        ),
        "J per image": _median(setting.measure("joules_per_image")),
    }


def for_article(table: Table) -> str:
    """Format a table as LaTeX with booktabs, without verdicts and links. The file report.md has it
    as Markdown.
    """
    frame = pd.DataFrame(table.rows).drop(columns=[VERDICT, DETECTABLE], errors="ignore")
    align = "".join("l" if name in table.text_columns else "r" for name in frame)
    latex = frame.to_latex(index=False, escape=True, column_format=align).rstrip()
    # Replace characters that older versions of LaTeX know only with a package.
    return latex.replace("–", "--").replace("×", r"$\times$").replace(DASH, "---")


def contrasts_table(group: Group) -> Table:
    """Build the table of the compared pairs of configurations: ratio of images/s, confidence
    interval and verdict.
    """
    rows = [
        {
            "A over B, images/s": f"{contrast.a} over {contrast.b}",
            "ratio (95 %)": effect_text(contrast),
            "A faster than B?": "disturbed: no verdict"
            if group.disturbed
            else sentence(finding("pair", contrast=contrast.fields)),
            DETECTABLE: DASH if contrast.detectable is None else percent(contrast.detectable, 1),
            "runs of each": str(contrast.n),
        }
        for contrast in group.contrasts
    ]
    return Table(rows, "Comparisons", text_columns=["A over B, images/s", "A faster than B?"])


def verdict_table(verdict: Verdict) -> Table:
    """Build the table of a verdict on a code change: metric, images/s and memory of base and
    head.
    """
    rows = []
    if METRIC in verdict.contrasts:
        group, names = verdict.groups[0], [f"{CODE}={code}" for code in (BASE, HEAD)]
        base, head = (value_text(group.named(name).mean, group.scale.unit) for name in names)
        compared = _compared(verdict.contrasts[METRIC])
        rows.append({"measure": group.metric, BASE: base, HEAD: head, **compared})
    base, head = (_summary(version.speed) for version in verdict.versions)
    compared = _compared(verdict.contrasts[SPEED])
    rows.append({"measure": IMAGES_PER_SECOND, BASE: base, HEAD: head, **compared})
    peaks = [[max(run.peak_bytes, default=None) for run in v.runs] for v in verdict.versions]
    base, head = (_median(summarize(of_version), 2**-20) for of_version in peaks)
    memory = {"measure": "memory, MiB", BASE: base, HEAD: head, DIFFERENCE: DASH, "verdict": DASH}
    return Table([*rows, memory], text_columns=("measure", "verdict"))


def _compared(contrast: Contrast) -> dict[str, str]:
    """Return the cells that compare head with base by one measure."""
    is_known = contrast.effect is not None
    unit = " points" if contrast.scale.is_proportion and is_known else ""
    return {
        DIFFERENCE: effect_text(contrast) + unit,
        "verdict": word_of(contrast) if is_known else "not measured",
    }


def settings_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Build three tables of keys and values: the config keys that differ between the runs, the
    config keys that are equal in all runs, and hardware and versions.
    """
    config = values(run.config for run in runs)
    environment = {
        key: [value for value in seen if value not in (None, "", [], {})]
        for key, seen in values(run.environment for run in runs).items()
        if key not in _OF_ONE_RUN
    }
    return [
        _keys_table("What varied", {key: seen for key, seen in config.items() if len(seen) > 1}),
        _keys_table(
            "What all points share", {key: seen for key, seen in config.items() if len(seen) == 1}
        ),
        _keys_table(
            "Hardware and versions", {key: seen for key, seen in environment.items() if seen}
        ),
    ]


def _keys_table(caption: str, keys: dict[str, list[object]]) -> Table:
    rows = [
        {"key": key, "values": join_short(map(yaml_text, seen), 12)}
        for key, seen in sorted(keys.items())
    ]
    return Table(rows, caption, text_columns=["key", "values"])


def unfinished_table(runs: Sequence[RunRecord]) -> Table:
    """Build the table of the jobs that cannot be compared, such as failed ones, with the reason."""
    unfinished = [run for run in runs if not run.comparable]
    shown = unfinished[:MOST_UNFINISHED]
    rows = [
        {
            "overrides": " ".join(run.overrides) or DASH,
            "status": "done, not compared" if run.doubt else run.status.replace("_", " "),
            "reason": shorten(run.doubt or run.reason or DASH, LONGEST_REASON, placeholder="…"),
        }
        for run in shown
    ]
    return Table(
        rows,
        notes=_rest(len(unfinished) - len(shown), "and {} more, in report.csv"),
        text_columns=["overrides", "status", "reason"],
        runs=[[run] if run.folder.is_dir() else [] for run in shown],
    )


def _notes(group: Group) -> list[str]:
    notes = []
    if any(point.is_simulated for point in group.members):
        notes.append(finding("devices_are_threads"))
    crowded = {point.needless_threads for point in group.members if point.needless_threads}
    for threads, cores in sorted(crowded):
        notes.append(finding("more_threads_than_cores", threads=threads, cores=cores))
    if not all(same_threads(group, point) for point in group.members):
        notes.append(finding("unlike_threads"))
    odd = [
        finding("odd_run", run=run.name, label=point.label, reasons=run.flags)
        for point in group.members
        for run in point.runs
        if run.flags
    ]
    return [
        *map(sentence, [*notes, *odd[:MOST_NAMED]]),
        *_rest(len(odd) - MOST_NAMED, "Doubtful, but kept: {} more runs, in report.csv."),
    ]


def _rest(count: int, note: str) -> list[str]:
    """Return a list with one note, which tells how many rows a table does not show. Return an empty
    list if the table shows all rows.
    """
    return [note.format(count)] if count > 0 else []


def _summary(summary: Summary | None) -> str:
    return with_range(summary) if summary else DASH


def _median(summary: Summary | None, factor: float = 1) -> str:
    """Format a median without its range, because the table has many columns. The file report.json
    has the range.
    """
    return figure(summary.median * factor) if summary else DASH


def _peaks(point: Configuration, factor: float) -> str:
    peaks = [figure(peak.median * factor) for peak in point.peak_bytes]
    if peaks and any(run.shared_memory for run in point.runs):
        devices = point.first.devices
        return f"{peaks[0]} shared by {devices}" if devices > 1 else peaks[0]
    rest = [f"… ({len(peaks)})"] if len(peaks) > MOST_DEVICES else []
    return ", ".join(peaks[:MOST_DEVICES] + rest) or DASH
