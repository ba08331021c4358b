"""Plots of a sweep over settings: the metric by seed, over the steps, by swept key and against
speed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from timm_parallel.lab.analysis.settings import Setting, SettingGroup
from timm_parallel.lab.analysis.statistics import mean_interval
from timm_parallel.lab.report.collect import read_curve
from timm_parallel.lab.report.plots import (
    DASHES,
    INK,
    MOST_LINES,
    QUIET,
    Plot,
    height_of,
    paint_intervals,
    paint_xy,
    short,
    svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0080c8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", INK)
MOST_SETTINGS = 20  # in one plot; of more, the best ones and the baseline, ranked
MOST_STEPS = 100  # evaluations of a curve; longer ones are thinned
MOST_CELLS = 100  # of a heat map
DECADES = 10  # values that span this factor have a logarithmic axis


def draw_settings(group: SettingGroup) -> list[Plot]:
    """Draw the plots for which this group has measurements. Of many settings, shows the best ones
    and the baseline.
    """
    factor = 100 if group.scale.is_proportion else 1
    name = f"{group.metric}, %" if group.scale.is_proportion else group.metric
    shown = [setting for setting in group.best(MOST_SETTINGS) if setting.values]
    if len(group.alive) > MOST_SETTINGS:
        shown.sort(key=lambda setting: -group.scale.sign * (setting.mean or 0.0))
    runs = pd.DataFrame(
        [
            [s.label, str(block), value * factor]
            for s in group.alive
            for block, value in s.values.items()
        ],
        columns=["setting", "block", "value"],
    )
    plots = []

    def add(plot: str, paint: Callable[..., None], frame: pd.DataFrame, **options: str) -> None:
        plots.append(
            Plot(
                plot,
                svg(partial(paint, name=name, **options), frame, f"{group.title}{plot}"),
                frame,
            )
        )

    if len(shown) > 1:
        means = _means(group, shown, factor)
        paint = partial(_paint_values, runs=runs, name=name)
        drawn = svg(paint, means, f"{group.title}values", height_of(means["label"]))
        plots.append(Plot("values", drawn, runs))
    curves = _curves([s for s in group.best(MOST_LINES) if s.values], group.metric, factor)
    if len(curves) > curves["setting"].nunique():
        add("curves", _paint_curves, curves)
    table = pd.DataFrame(
        [{**s.settings, "mean": s.mean * factor} for s in group.alive if s.mean is not None]
    )
    keys = group.keys
    numbers = (
        pd.to_numeric(table[keys[0]], errors="coerce").astype(float)
        if len(keys) == 1
        else pd.Series(dtype=float)
    )
    if len(numbers) > 2 and numbers.abs().lt(math.inf).all():
        line = runs.assign(
            x=runs["setting"].map(dict(zip((s.label for s in group.alive), numbers, strict=True)))
        )
        add("key", _paint_line, line, key=keys[0])
    elif (
        len(keys) == 2
        and all(table[key].nunique() > 1 for key in keys)
        and len(table) <= MOST_CELLS
    ):
        # Light is good, whatever the direction of the metric.
        add(
            "keys", _paint_heat, table, colors="Blues" if group.scale.lower_is_better else "Blues_r"
        )
    speeds = pd.DataFrame(
        [
            [s.label, s.speed.median, s.mean * factor]
            for s in shown
            if s.speed and s.mean is not None
        ],
        columns=["setting", "images_per_sec", "mean"],
    )
    if len(speeds) > 1 and not group.is_about_speed:
        add("tradeoff", _paint_tradeoff, speeds)
    return plots


def _means(group: SettingGroup, settings: list[Setting], factor: int) -> pd.DataFrame:
    """Return a table of the mean of each setting with its 95 % interval, which is empty for a
    single value.
    """
    rows = []
    for setting in settings:
        ends = mean_interval(setting.values.values(), group.scale, group.rounding) or (
            math.nan,
            math.nan,
        )
        assert setting.mean is not None
        # On a scale, the interval is not symmetric, and with few values it may not hold the plain
        # mean.
        low, high = min(ends[0], setting.mean), max(ends[1], setting.mean)
        interval = [low, high] if ends[0] == ends[0] else list(ends)
        rows.append([setting.label, *(value * factor for value in (setting.mean, *interval))])
    return pd.DataFrame(rows, columns=["label", "middle", "low", "high"])


def _paint_values(axes: Axes, frame: pd.DataFrame, runs: pd.DataFrame, name: str) -> None:
    labels = list(frame["label"])
    picked = runs[runs["setting"].isin(labels)].assign(
        y=lambda table: table["setting"].map(labels.index)
    )
    for _, block in picked.sort_values("y").groupby("block"):
        axes.plot(block["value"], block["y"], "-", color=QUIET, alpha=0.35, linewidth=0.7, zorder=1)
    axes.plot(picked["value"], picked["y"], "o", color=COLORS[0], alpha=0.6, markersize=4)
    paint_intervals(axes, frame, lambda _: ("|", INK))
    axes.set_xlabel(name)


def _curves(settings: list[Setting], metric: str, factor: int) -> pd.DataFrame:
    """Return a table of mean, smallest and largest value over the seeds, for each step that all
    runs evaluated.
    """
    rows = []
    for setting in settings:
        steps: dict[int, list[float]] = defaultdict(list)
        runs = [read_curve(run.folder, metric.removesuffix("_best")) for run in setting.runs]
        for curve in runs:
            for step, value in curve.items():
                steps[step].append(value * factor)
        known = [
            (step, values) for step, values in sorted(steps.items()) if len(values) == len(runs)
        ]
        stride = math.ceil(len(known) / MOST_STEPS)
        # The last evaluation is always kept.
        for step, values in reversed(known[:: -stride or None]):
            rows.append([setting.label, step, sum(values) / len(values), min(values), max(values)])
    return pd.DataFrame(rows, columns=["setting", "step", "mean", "low", "high"])


def _paint_curves(axes: Axes, frame: pd.DataFrame, name: str) -> None:
    for number, (label, curve) in enumerate(frame.groupby("setting", sort=False)):
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        axes.fill_between(
            curve["step"], curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0
        )
        axes.plot(
            curve["step"], curve["mean"], dash, color=color, linewidth=1.4, label=short(label)
        )
    axes.set(xlabel="step", ylabel=name)


def _paint_line(axes: Axes, frame: pd.DataFrame, name: str, key: str) -> None:
    paint_xy(axes, frame.rename(columns={"value": "y"}), "mean", "-", "o", INK, COLORS[0])
    if frame["x"].min() > 0 and frame["x"].max() / frame["x"].min() >= DECADES:
        axes.set_xscale("log")
        # Matplotlib's own labels are formulas, which the SVG would show as text.
        ticks = sorted(frame["x"].unique())
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    axes.set(xlabel=key, ylabel=name)


def _paint_heat(axes: Axes, frame: pd.DataFrame, name: str, colors: str) -> None:
    x, y = frame.columns[:2]
    columns, rows = list(dict.fromkeys(frame[x])), list(dict.fromkeys(frame[y]))
    cells = frame.pivot_table(index=y, columns=x, values="mean").reindex(
        index=rows, columns=columns
    )
    mesh = axes.pcolormesh(cells.to_numpy(), cmap=colors, edgecolors="white", linewidth=1)
    axes.figure.colorbar(mesh, ax=axes, label=name)
    for row, of_row in enumerate(cells.to_numpy()):
        for column, value in enumerate(of_row):
            is_dark = sum(mesh.cmap(mesh.norm(value))[:3]) < 1.6
            color = "white" if is_dark else "black"
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{value:#.4g}".rstrip("."),
                ha="center",
                va="center",
                color=color,
            )
    axes.set_xticks([place + 0.5 for place in range(len(columns))], columns)
    axes.set_yticks([place + 0.5 for place in range(len(rows))], rows)
    axes.set(xlabel=x, ylabel=y)


def _paint_tradeoff(axes: Axes, frame: pd.DataFrame, name: str) -> None:
    for number, row in enumerate(frame.itertuples()):
        color, marker = COLORS[number % len(COLORS)], "os^Dv"[number % 5]
        label = short(row.setting) if len(frame) <= MOST_LINES else None
        axes.plot(row.images_per_sec, row.mean, marker, color=color, markersize=6, label=label)
    axes.set(xlabel="images/s", ylabel=name)
    axes.set_xlim(0, 1.08 * frame["images_per_sec"].max())
