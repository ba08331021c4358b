"""One group's figures as SVG text, each with its data: Okabe and Ito's colours for the colour-blind, marks for grey print."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from src.engine.report.comparison import Group
from src.engine.report.decisions import SPEED
from src.engine.report.measured import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET = "#010101", "#808080"  # ink becomes the reader's text colour: dark on paper, light in dark mode
LOOKS = {"single": ("o", INK), "dp": ("s", "#d55e00"), "ddp": ("^", "#0080c8")}  # mark and colour
OTHER = ("D", QUIET)
PARTS = {  # of a step: name, colour, hatch
    "data_ms": ("waits for data", "#e69f00", "//"),
    "compute_ms": ("computes", "#7fb2d9", ""),
    "communication_ms": ("waits for other ranks", "#777777", "xx"),
    "other_ms": ("all else", "#c9c9c9", ".."),
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: no search over the machine's fonts
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's own font
    "text.parse_math": False,  # a $ in a model's name is a $
}
CAPTIONS = {
    "ratios": "Ratios of images/s with their intervals. Within a grey bar: true ratios that fewer than 80 of 100 such sweeps "
    "would tell from 1. Shaded, right of 1: differences too small to be of interest.",
    "speed": "Images/s against devices: a mark for every run, lines through the medians.",
    "step": "What a mean step of rank 0 is made of.",
    "memory": "Peak memory of every device, device 0 hatched: bars are medians, lines reach from the smallest to the largest.",
    "order": "Each run's speed over its point's median, in the order of the runs: drift shows as a slope.",
}
MOST_POINTS, MOST_LINES = 24, 8  # in one plot, the fastest of them; the tables and the data files have them all


@dataclass(frozen=True)
class Plot:
    name: str
    caption: str
    svg: str
    data: pd.DataFrame


def draw(group: Group) -> list[Plot]:
    """Every plot that this group has figures for, and that would show something."""
    fastest = sorted(group.points, key=lambda point: point.speed.median if point.speed else 0, reverse=True)
    shown = [point.label for point in fastest[:MOST_POINTS]]
    runs = group.speeds
    plots: dict[str, tuple[pd.DataFrame, Callable[[Axes, pd.DataFrame], None]]] = {
        "ratios": (_ratios(group), _paint_ratios),
        "speed": (runs if runs["point"].nunique() > 1 else runs[:0], _paint_speeds),
        "step": (_steps(group), _paint_steps),
        "memory": (_memory(group), _paint_memory),
        "order": (runs if runs["point"].duplicated().any() else runs[:0], _paint_order),
    }
    drawn = []
    for name, (frame, paint) in plots.items():
        picked = frame[frame[frame.columns[0]].isin(shown)].reset_index(drop=True)
        if len(picked):
            drawn.append(Plot(name, CAPTIONS[name], _svg(paint, picked, f"{group.title}{name}"), frame))
    return drawn


def _svg(paint: Callable[[Axes, pd.DataFrame], None], frame: pd.DataFrame, salt: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        height = max(3.2, 0.6 + 0.19 * len(frame)) if paint is _paint_ratios else 3.2  # a line of text for each
        figure = Figure(figsize=(5.0, height), layout="constrained")  # without pyplot: no display, no global state
        axes = figure.add_subplot()
        paint(axes, frame)
        handles, labels = axes.get_legend_handles_labels()
        if len(handles) > 1:
            columns = 2 if max(map(len, labels)) > 14 else 4
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib counts from 1 in every figure; a page's ids must be unique
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "Helvetica, Arial, 'DejaVu Sans', sans-serif", svg)
    return svg.replace(INK, "currentColor")


def _ratios(group: Group) -> pd.DataFrame:
    columns = ["a", "b", "ratio", "low", "high", "n", "detectable", "verdict"]
    known = [contrast for contrast in group.contrasts.get(SPEED, ()) if contrast.low is not None]
    return pd.DataFrame(known, columns=columns).assign(of_interest=group.smallest_difference)


def _paint_ratios(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axvline(1, color=QUIET, linewidth=0.8)
    axes.axvspan(1, 1 + frame["of_interest"].iloc[0], color=QUIET, alpha=0.25, linewidth=0)
    end = 4 * max(1, frame["ratio"].max())  # an interval that reaches further leaves the picture
    for place, row in enumerate(frame.itertuples()):
        least, reach = min(row.detectable, end), [[row.ratio - row.low], [min(row.high, end) - row.ratio]]
        axes.plot([1 / (1 + least), 1 + least], [place, place], color=QUIET, alpha=0.45, linewidth=6, zorder=1)
        marker, colour = LOOKS.get(str(row.a).split(" ")[0], OTHER)
        axes.errorbar(row.ratio, place, None, reach, marker, color=colour, capsize=3, markersize=5, linewidth=1.2)
    axes.set_yticks(range(len(frame)), frame["a"] + " over " + frame["b"])
    axes.invert_yaxis()
    axes.margins(y=0.5 / len(frame))
    left, right = axes.get_xlim()
    axes.set_xlim(max(left, 0), min(right, end))
    axes.set_xlabel("ratio of images/s")


def _paint_speeds(axes: Axes, frame: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    most = int(frame["devices"].max())
    base = frame[(frame["strategy"] == "single") & (frame["devices"] == 1)][SPEED].median()
    if base == base and most > 1:
        axes.plot([1, most], [base, base * most], ":", color=QUIET, label="ideal")
    best = frame.groupby("series")[SPEED].median().nlargest(MOST_LINES - 1).index
    kept = frame[frame["series"].isin(["single", *best])]
    for number, (name, runs) in enumerate(kept.groupby("series", sort=False)):
        marker, colour = LOOKS.get(runs["strategy"].iloc[0], OTHER)
        middle = runs.groupby("devices")[SPEED].median()
        axes.plot(middle.index, middle, ("-", "--", "-.", ":")[number % 4], color=colour, linewidth=1.2, label=name)
        axes.plot(runs["devices"], runs[SPEED], marker, color=colour, markersize=4.5, alpha=0.75)
    _ring(axes, kept[kept["flagged"]].set_index("devices")[SPEED])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(0.8, most + 0.2), xlabel="devices", ylabel="images/s")
    axes.set_ylim(bottom=0)


def _steps(group: Group) -> pd.DataFrame:
    told = [(point, parts) for point in group.points for run in point.repeats if (parts := run.step_parts)]
    found = [{"point": point.label, **parts} for point, parts in told if not point.stand_in]
    return pd.DataFrame(found, columns=["point", *STEP_PARTS]).groupby("point", sort=False, as_index=False).mean()


def _paint_steps(axes: Axes, frame: pd.DataFrame) -> None:
    bottom = pd.Series(0.0, index=frame.index)
    for part, (name, colour, hatch) in PARTS.items():
        if frame[part].sum() > 0:
            axes.bar(frame.index, frame[part], 0.6, bottom, color=colour, hatch=hatch, edgecolor="white", label=name)
            bottom += frame[part]
    _name_bars(axes, list(frame["point"]), "ms per step")


def _memory(group: Group) -> pd.DataFrame:
    """Per device; nothing on CPU, where devices share one memory."""
    found = [
        [point.label, point.strategy, number, *(value / 2**30 for value in (peak.median, peak.low, peak.high))]
        for point in group.points
        if group.accelerator != "cpu"
        for number, peak in enumerate(point.peak_bytes)
    ]
    return pd.DataFrame(found, columns=["point", "strategy", "device", "gib", "low", "high"])


def _paint_memory(axes: Axes, frame: pd.DataFrame) -> None:
    looks: dict[str, Any] = {"edgecolor": "white", "alpha": 0.85, "error_kw": {"elinewidth": 0.8, "ecolor": QUIET}}
    for place, (_, peaks) in enumerate(frame.groupby("point", sort=False)):
        width, (_, colour) = 0.8 / len(peaks), LOOKS.get(peaks["strategy"].iloc[0], OTHER)
        places = place - 0.4 + width * (peaks["device"] + 0.5)
        reach = (peaks["gib"] - peaks["low"], peaks["high"] - peaks["gib"])
        bars = axes.bar(places, peaks["gib"], width, yerr=reach, color=colour, **looks)
        bars.patches[0].set_hatch("///")
    _name_bars(axes, list(frame["point"].unique()), "peak, GiB per device")


def _paint_order(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axhline(1, color=QUIET, linewidth=0.8)
    for strategy, runs in frame.groupby("strategy", sort=False):
        marker, colour = LOOKS.get(str(strategy), OTHER)
        axes.plot(runs.index + 1, runs["relative"], marker, color=colour, markersize=4.5, label=strategy)
    _ring(axes, frame.set_index(frame.index + 1)[frame["flagged"].to_numpy()]["relative"])
    low, high = frame["relative"].min(), frame["relative"].max()
    room = 0.02 + 0.06 * (high - low)  # for the marks
    axes.set_ylim(min(0.9, low - room), max(1.1, high + room))
    axes.set(xlabel="run, in the order they ran", ylabel="images/s over its point's median")


def _ring(axes: Axes, flagged: pd.Series[Any]) -> None:
    if len(flagged):
        axes.plot(flagged.index, flagged, "o", color=QUIET, markersize=10, markerfacecolor="none", label="flagged")


def _name_bars(axes: Axes, names: list[str], height: str) -> None:
    long = sum(map(len, names)) > 50
    axes.set_xticks(range(len(names)), names, rotation=40 if long else 0, ha="right" if long else "center")
    axes.set_ylabel(height)
