"""Table of a sweep over settings, and its conversion to Markdown or LaTeX for an article."""

from __future__ import annotations

import pandas as pd

from timm_parallel.lab.analysis.settings import Setting, SettingGroup
from timm_parallel.lab.analysis.statistics import Contrast
from timm_parallel.lab.analysis.wording import (
    DASH,
    effect_text,
    figure,
    points,
    size_text,
    value_text,
    verdict_text,
    with_range,
)
from timm_parallel.lab.report.tables import Table

MOST_ROWS = 60  # of the page, the best ones; report.json has all
VERDICT, DETECTABLE = "better?", "min. detectable difference"


def settings_table(group: SettingGroup) -> Table:
    """Return a table with a row per setting in the order of the sweep, without empty columns."""
    shown = group.best(MOST_ROWS)
    rows = [_row(group, setting) for setting in shown]
    filled = {name for row in rows for name, text in row.items() if text not in (DASH, "")} | set(
        group.keys
    )
    rows = [{name: text for name, text in row.items() if name in filled} for row in rows]
    notes = [group.note] if group.note else []
    if any(setting.lost for setting in group.settings):
        notes.append(
            "The mean of a setting that lost runs is that of the runs that are left, and may be "
            "too good."
        )
    if not group.is_about_speed and any(
        _differs_from_means(group, contrast) for contrast in group.contrasts
    ):
        notes.append(
            f"A difference comes from means on the {group.scale.name} scale in the "
            f"{group.unit_of_repeats}s that both settings have, so it is not exactly the "
            "difference of two means of this table."
        )
    if len(shown) < len(group.settings):
        notes.append(f"{len(group.settings) - len(shown)} more settings, in report.json.")
    caption = f"{group.metric} by setting: mean over the {group.unit_of_repeats}s"
    text = [*group.keys, "setting", VERDICT]
    return Table(rows, caption, notes, text, [setting.runs for setting in shown])


def _differs_from_means(group: SettingGroup, contrast: Contrast) -> bool:
    a, b = group.named(contrast.a).mean, group.named(contrast.b).mean
    if a is None or b is None or contrast.effect is None:
        return False
    return abs(contrast.effect - (a - b)) > (0.001 if group.scale.is_proportion else 0.01 * abs(b))


def _row(group: SettingGroup, setting: Setting) -> dict[str, str]:
    is_baseline = setting is group.baseline and len(group.settings) > 1
    contrast = group.contrast(setting)
    unit = ", points" if group.scale.is_proportion else ""
    lower = ", lower is better" if group.scale.lower_is_better else ""
    peak = max((peak.median for peak in setting.peak_bytes), default=None)
    detectable = contrast.detectable if contrast else None
    joules = setting.measure("joules_per_image")
    return {
        **(setting.settings or {"setting": setting.label}),
        f"{group.unit_of_repeats}s": str(len(setting.values)),
        "runs lost": f"{len(setting.lost)} of {len(setting.lost) + len(setting.runs)}"
        if setting.lost
        else DASH,
        f"{group.metric}{lower}": value_text(group.scale, setting.mean),
        "sd": _deviation(group, setting),
        f"{'ratio' if group.is_about_speed else 'difference'}{unit} (95 %)": "baseline"
        if is_baseline
        else effect_text(contrast),
        VERDICT: verdict_text(contrast).partition(":")[0] if contrast else "",
        DETECTABLE: DASH if detectable is None else size_text(group.scale, detectable),
        "images/s": with_range(setting.speed) if setting.speed else DASH,
        "memory, MiB": DASH if peak is None else figure(peak / 2**20),
        "J per image": DASH if joules is None else figure(joules.median),
    }


def _deviation(group: SettingGroup, setting: Setting) -> str:
    if setting.deviation is None:
        return DASH
    return points(setting.deviation) if group.scale.is_proportion else figure(setting.deviation)


def for_article(table: Table, kind: str) -> str:
    """Return the table as Markdown (`markdown`) or LaTeX with booktabs (`latex`), without verdicts
    and links.
    """
    frame = pd.DataFrame(table.rows).drop(columns=[VERDICT, DETECTABLE], errors="ignore")
    if kind == "markdown":
        rule = ["---" if name in table.text_columns else "---:" for name in frame]
        lines = [list(frame), rule, *frame.to_numpy().tolist()]
        return "\n".join(
            f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines
        )
    align = "".join("l" if name in table.text_columns else "r" for name in frame)
    latex = frame.to_latex(index=False, escape=True, column_format=align).rstrip()
    # Older versions of LaTeX know these characters only with a package.
    return latex.replace("–", "--").replace("×", r"$\times$").replace(DASH, "---")
