"""Draw the SVG plots of one group of configurations: intervals, curves, speed and memory.

The colors, by Okabe and Ito, suit color-blind readers, and the marks can be told apart in gray
print.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from timm_parallel.lab.analysis.groups import SPEED, Configuration, Group
from timm_parallel.lab.analysis.strategies import speed_table
from timm_parallel.lab.report.collect import read_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Color of texts and lines that becomes the reader's text color: dark on paper, light in dark mode.
INK, QUIET = "#010101", "#808080"
COLORS = ("#0080c8", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", INK)
DASHES = ("-", "--", "-.", ":")
# Strategy -> (mark, color) in all plots.
LOOKS = {"single": ("o", INK), "dp": ("s", "#d55e00"), "ddp": ("^", "#0080c8")}
OTHER = ("D", QUIET)
STYLE = Path(__file__).with_name("plots.mplstyle")
HEIGHT = 3.2  # inches
LONGEST_LABEL = 44  # characters
# Largest number of configurations and of lines in a plot. If there are more, the plot shows the
# fastest ones. The tables and data files have all.
MOST_POINTS, MOST_LINES = 24, 8
# Largest number of settings in a plot. If there are more, the plot shows the baseline and the best
# ones.
MOST_SETTINGS = 20
# Largest number of evaluations in a curve. A longer curve skips evaluations at regular distances.
MOST_STEPS = 100


@dataclass(frozen=True)
class Plot:
    name: str
    svg: str
    data: pd.DataFrame


def draw(group: Group) -> list[Plot]:
    """Draw all plots for which a group of configurations has measurements."""
    return list(_of_speed(group) if group.kind == "strategies" else _of_settings(group))


def _plot(
    group: Group,
    name: str,
    paint: Callable[[Axes, pd.DataFrame], None],
    frame: pd.DataFrame,
    data: pd.DataFrame | None = None,
) -> Plot:
    """Draw one plot as SVG with the function `paint(axes, frame)`, where `frame` is the table with
    the values to draw.

    `data`: table for the CSV file next to the plot, by default `frame`. A column `label` in `frame`
    has the labels of the y axis; the plot is then as high as these texts need.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [_whole(label) for label in dict.fromkeys(frame.get("label", ()))]
    lines = max(sum(text.count("\n") + 1 for text in rows), len(frame) / 6)
    height = 1.4 + 0.24 * lines if rows else HEIGHT
    # Give each plot its own salt for the ids in the SVG, so that no two plots of a page share one.
    with matplotlib.rc_context({"svg.hashsalt": f"{group.title}{name}"}, fname=STYLE):
        # Do not use pyplot, because it needs a display and has global state.
        figure = Figure(figsize=(5.0, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes, frame)
        if rows:
            axes.set_yticks(range(len(rows)), rows)
            axes.margins(y=0.6 / len(rows))
            axes.invert_yaxis()
        handles, labels = axes.get_legend_handles_labels()
        if len(handles) > 1:
            columns = 2 if max(map(len, labels)) > 14 else 4
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].rstrip()
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    # Remove the ids of groups. Matplotlib counts them from 1 in every figure, but the ids of a page
    # must be unique.
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "Helvetica, Arial, 'DejaVu Sans', sans-serif", drawn)
    return Plot(name, drawn.replace(INK, "currentColor"), frame if data is None else data)


def _of_speed(group: Group) -> Iterable[Plot]:
    """Draw ratios, speed and memory of a group. If there are many configurations, the plots show
    the fastest ones.
    """
    fastest = sorted(
        group.members,
        key=lambda point: point.speed.median if point.speed else 0,
        reverse=True,
    )
    shown = [point.label for point in fastest[:MOST_POINTS]]
    runs, ratios, memory = speed_table(group), _ratios(group), _memory(group)
    scales = len(runs[["strategy", "devices"]].drop_duplicates()) > 1
    tables: list[tuple[str, Callable[[Axes, pd.DataFrame], None], pd.DataFrame]] = [
        ("ratios", _paint_ratios, ratios.assign(label=ratios["a"] + " over " + ratios["b"])),
        ("speed", _paint_speeds, runs if scales else runs[:0]),
        ("memory", _paint_memory, memory.assign(label=memory["point"])),
    ]
    for name, paint, table in tables:
        picked = table[table[table.columns[0]].isin(shown)].reset_index(drop=True)
        if len(picked):
            yield _plot(group, name, paint, picked, table.drop(columns="label", errors="ignore"))


def _of_settings(group: Group) -> Iterable[Plot]:
    """Draw the metric of a group of settings by seed and over the steps. If there are many
    settings, the plots show the baseline and the best ones.
    """
    factor = 100 if group.scale.is_proportion else 1
    name = f"{group.metric}, %" if group.scale.is_proportion else group.metric
    # On a linear axis, one diverged run would make the losses of all other runs look equal.
    scale = "log" if group.scale.name == "log" else "linear"
    shown = [setting for setting in group.best(MOST_SETTINGS) if setting.values]
    rows = [
        [s.label, str(block), value * factor]
        for s in group.alive
        for block, value in s.values.items()
    ]
    runs = pd.DataFrame(rows, columns=["setting", "block", "value"])
    if len(shown) > 1:
        means = _means(group, shown, factor)
        yield _plot(
            group, "values", partial(_paint_values, runs=runs, name=name, scale=scale), means, runs
        )
    curves = _curves([s for s in group.best(MOST_LINES) if s.values], group.metric, factor)
    if len(curves) > curves["setting"].nunique():
        yield _plot(group, "curves", partial(_paint_curves, name=name, scale=scale), curves)


def _paint_intervals(
    axes: Axes, frame: pd.DataFrame, look_of: Callable[[str], tuple[str, str]]
) -> None:
    """Draw each row of a table as a mark at `middle` with an interval from `low` to `high`, next to
    its `label`. A row without an interval is only a mark.

    `look_of`: function that returns (mark, color) for a label.
    """
    for y, row in enumerate(frame.itertuples()):
        marker, color = look_of(str(row.label))
        reach = None if pd.isna(row.low) else [[row.middle - row.low], [row.high - row.middle]]
        axes.errorbar(
            row.middle,
            y,
            xerr=reach,
            fmt=marker,
            color=color,
            capsize=3,
            markersize=5,
            linewidth=1.2,
        )


def _whole(label: str) -> str:
    """Break a label into several lines of at most LONGEST_LABEL characters."""
    return textwrap.fill(label, LONGEST_LABEL)


def _ratios(group: Group) -> pd.DataFrame:
    columns = ["a", "b", "ratio", "low", "high", "n", "detectable", "verdict"]
    known = [contrast.fields for contrast in group.contrasts if contrast.low is not None]
    return pd.DataFrame(known, columns=columns).assign(of_interest=group.smallest_difference)


def _paint_ratios(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axvline(1, color=QUIET, linewidth=0.8)
    axes.axvspan(1, 1 + frame["of_interest"].iloc[0], color=QUIET, alpha=0.25, linewidth=0)
    # A logarithmic axis shows 1/2 and 2 equally far from 1. Its ends cut wide intervals.
    first, last = min(1, frame["ratio"].min()) / 4, 4 * max(1, frame["ratio"].max())
    cut = frame.assign(middle=frame["ratio"], high=frame["high"].clip(upper=2 * last))
    _paint_intervals(axes, cut, lambda label: LOOKS.get(label.split(" ")[0], OTHER))
    axes.set(xscale="log", xlabel="ratio of images/s")
    left, right = axes.get_xlim()
    axes.set_xlim(max(left, first), min(right, last))
    _label_values(axes.xaxis, "log")


def _paint_speeds(axes: Axes, frame: pd.DataFrame) -> None:
    devices = int(frame["devices"].max())
    single = frame[(frame["strategy"] == "single") & (frame["devices"] == 1)][SPEED].median()
    # The median is NaN if single did not run.
    if single > 0 and devices > 1:
        axes.plot([1, devices], [single, single * devices], ":", color=QUIET, label="ideal")
    best = frame.groupby("series")[SPEED].median().nlargest(MOST_LINES - 1).index
    kept = frame[frame["series"].isin(["single", *best])]
    for number, (name, runs) in enumerate(kept.groupby("series", sort=False)):
        marker, color = LOOKS.get(runs["strategy"].iloc[0], OTHER)
        medians = runs.groupby("devices")[SPEED].median()
        dash = DASHES[number % len(DASHES)]
        axes.plot(medians.index, medians, dash, color=color, linewidth=1.2, label=str(name))
        axes.plot(runs["devices"], runs[SPEED], marker, color=color, markersize=4.5, alpha=0.75)
    axes.set_xticks(sorted(frame["devices"].unique()))
    axes.set(xlim=(0.8, devices + 0.2), xlabel="devices", ylabel="images/s")
    axes.set_ylim(bottom=0)


def _memory(group: Group) -> pd.DataFrame:
    """Build a table of the peak memory of each device. It is empty on a CPU, where the devices
    share memory.
    """
    rows = [
        [point.label, point.first.strategy, device]
        + [value / 2**30 for value in (peak.median, peak.low, peak.high)]
        for point in group.members
        if point.first.accelerator != "cpu"
        for device, peak in enumerate(point.peak_bytes)
    ]
    return pd.DataFrame(rows, columns=["point", "strategy", "device", "gib", "low", "high"])


def _paint_memory(axes: Axes, frame: pd.DataFrame) -> None:
    for y, (_, peaks) in enumerate(frame.groupby("point", sort=False)):
        _, color = LOOKS.get(peaks["strategy"].iloc[0], OTHER)
        width = 0.8 / len(peaks)
        centers = y - 0.4 + width * (peaks["device"] + 0.5)
        reach = (peaks["gib"] - peaks["low"], peaks["high"] - peaks["gib"])
        bars = axes.barh(
            centers,
            peaks["gib"],
            width,
            xerr=reach,
            color=color,
            edgecolor="white",
            alpha=0.85,
            error_kw={"elinewidth": 0.8, "ecolor": QUIET},
        )
        bars.patches[0].set_hatch("///")
    axes.set_xlabel("peak, GiB per device")


def _means(group: Group, settings: list[Configuration], factor: int) -> pd.DataFrame:
    """Build a table with the mean of each setting and its 95 % confidence interval. The interval is
    empty for a setting with a single value.
    """
    rows = []
    for setting in settings:
        mean, ends = setting.mean, group.interval(setting)
        assert mean is not None
        # Extend the interval to the plain mean. The interval comes from a transformed scale, and
        # with few values it may not contain the mean.
        low, high = (min(ends[0], mean), max(ends[1], mean)) if ends else (math.nan, math.nan)
        rows.append([setting.label, mean * factor, low * factor, high * factor])
    return pd.DataFrame(rows, columns=["label", "middle", "low", "high"])


def _paint_values(
    axes: Axes, frame: pd.DataFrame, runs: pd.DataFrame, name: str, scale: str
) -> None:
    labels = list(frame["label"])
    picked = runs[runs["setting"].isin(labels)].assign(
        y=lambda table: table["setting"].map(labels.index)
    )
    for _, block in picked.sort_values("y").groupby("block"):
        axes.plot(block["value"], block["y"], "-", color=QUIET, alpha=0.35, linewidth=0.7, zorder=1)
    axes.plot(picked["value"], picked["y"], "o", color=COLORS[0], alpha=0.6, markersize=4)
    _paint_intervals(axes, frame, lambda _: ("|", INK))
    axes.set(xlabel=name, xscale=scale)
    _label_values(axes.xaxis, scale)


def _curves(settings: list[Configuration], metric: str, factor: int) -> pd.DataFrame:
    """Build a table of learning curves: mean, smallest and largest value over the seeds, for each
    step that all runs of a setting evaluated.
    """
    curves = []
    for setting in settings:
        of_runs = [read_curve(run.folder, metric.removesuffix("_best")) for run in setting.runs]
        known = pd.DataFrame(of_runs).T.dropna().sort_index() * factor
        # Count the distance from the end, so that the last evaluation is always drawn.
        shown = known.iloc[:: -math.ceil(len(known) / MOST_STEPS) or None].iloc[::-1]
        curve = {
            "setting": setting.label,
            "step": shown.index,
            "mean": shown.mean(axis=1),
            "low": shown.min(axis=1),
            "high": shown.max(axis=1),
        }
        curves.append(pd.DataFrame(curve))
    # A setting without a curve has columns of objects, which Matplotlib cannot draw.
    return pd.concat(curves, ignore_index=True).infer_objects()


def _paint_curves(axes: Axes, frame: pd.DataFrame, name: str, scale: str) -> None:
    """Draw the learning curve of each setting: its mean, and a band from the smallest to the
    largest value.
    """
    for number, (setting, curve) in enumerate(frame.groupby("setting", sort=False)):
        dash, color = DASHES[number % len(DASHES)], COLORS[number % len(COLORS)]
        axes.fill_between(
            curve["step"], curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0
        )
        label = _whole(str(setting))
        axes.plot(curve["step"], curve["mean"], dash, color=color, linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel=name, yscale=scale)
    axes.set_xlim(left=0)
    _label_values(axes.yaxis, scale)


def _label_values(axis: Axis, scale: str) -> None:
    """Label the ticks of a logarithmic axis with plain numbers, because losses of one sweep often
    lie between two powers of ten.
    """
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

    if scale == "log":
        low, high = axis.get_view_interval()
        wide = LogLocator(subs=(1, 2, 5), numticks=8)
        axis.set_major_locator(wide if high > 4 * low else AutoLocator())
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
