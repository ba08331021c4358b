"""One group's figures as SVG text, each with its data: Okabe and Ito's colours for the colour-blind, marks for grey print."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from src.engine.report.comparison import Group
from src.engine.report.families import SPEED
from src.engine.report.measured import STEP_PARTS
from src.engine.report.plot_style import COLOUR, INK, MARKER, QUIET, STYLE, legend, name_bars, ring
from src.engine.report.statistics import SMALLEST_DIFFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"data_ms": ("waits for data", "#e69f00", "//"), "compute_ms": ("computes", "#7fb2d9", "")}
PARTS |= {
    "communication_ms": ("waits for other ranks", "#777777", "xx"),
    "other_ms": ("all else", "#c9c9c9", ".."),
}
MOST_ROWS = 24  # contrasts or points in one plot; the tables have them all


@dataclass(frozen=True)
class Plot:
    name: str
    caption: str
    svg: str
    data: pd.DataFrame


def draw(group: Group) -> list[Plot]:
    """Every plot that this group has figures for, and that would show something."""
    drawn = []
    for name, caption, data, paint in _PLOTS:
        frame = data(group)
        if len(frame):
            drawn.append(Plot(name, caption, _svg(paint, frame, f"{group.title}{name}"), frame))
    return drawn


def _svg(paint: Callable[[Axes, pd.DataFrame], None], frame: pd.DataFrame, salt: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(5.0, 3.2), layout="constrained")  # without pyplot: no display, no global state
        paint(figure.add_subplot(), frame)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib counts from 1 in every figure; a page's ids must be unique
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "Helvetica, Arial, 'DejaVu Sans', sans-serif", svg)
    return svg.replace(INK, "currentColor")


def _ratios(group: Group) -> pd.DataFrame:
    found = [c for c in group.contrasts.get(SPEED, ()) if c.low is not None]
    columns = ["a", "b", "ratio", "low", "high", "n", "detectable", "verdict"]
    return pd.DataFrame([[getattr(c, name) for name in columns] for c in found], columns=columns)


def _paint_ratios(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axvline(1, color=QUIET, linewidth=0.8)
    axes.axvspan(1, 1 + SMALLEST_DIFFERENCE, color=QUIET, alpha=0.25, linewidth=0)
    shown = frame.head(MOST_ROWS)
    for place, row in enumerate(shown.itertuples()):
        least = row.detectable
        axes.plot([1 / (1 + least), 1 + least], [place, place], color=QUIET, alpha=0.45, linewidth=6, zorder=1)
        axes.errorbar(
            row.ratio,
            place,
            xerr=[[row.ratio - row.low], [row.high - row.ratio]],
            color=COLOUR.get(str(row.a).split(" ")[0], INK),
            marker=MARKER.get(str(row.a).split(" ")[0], "D"),
            markersize=5,
            capsize=3,
            linewidth=1.2,
        )
    axes.set_yticks(range(len(shown)), [f"{row.a} over {row.b}" for row in shown.itertuples()])
    axes.invert_yaxis()
    axes.margins(y=0.5 / max(1, len(shown)))
    axes.set_xlabel("ratio of images/s")


def _runs(group: Group) -> pd.DataFrame:
    """Every run with a speed, in run order; `relative` is over its point's median."""
    found = [
        {"run": run.name, "sweep": run.sweep, "position": run.position, "block": run.block, "point": point.label}
        | {"strategy": point.strategy, "devices": point.devices, "series": f"{point.strategy}{point.suffix}"}
        | {"images_per_sec": own, "relative": own / speed.median, "flagged": bool(run.flags)}
        for point in group.points
        if (speed := point.speed)
        for run in point.runs
        if (own := run.measure(SPEED)) is not None
    ]
    return pd.DataFrame(found).sort_values(["sweep", "position"], ignore_index=True) if found else pd.DataFrame(found)


def _speeds(group: Group) -> pd.DataFrame:
    """Nothing where one point is all there is."""
    frame = _runs(group)
    return frame if len(frame) and frame["point"].nunique() > 1 else frame[:0]


def _order(group: Group) -> pd.DataFrame:
    """Nothing where no point was repeated."""
    frame = _runs(group)
    return frame if len(frame) and frame["point"].duplicated().any() else frame[:0]


def _paint_speeds(axes: Axes, frame: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    most = int(frame["devices"].max())
    base = frame[(frame["strategy"] == "single") & (frame["devices"] == 1)]["images_per_sec"].median()
    if base == base and most > 1:
        axes.plot([1, most], [base, base * most], ":", color=QUIET, label="ideal")
    best = frame.groupby("series")["images_per_sec"].median().sort_values(ascending=False)
    kept = [name for name in frame["series"].unique() if name == "single" or name in best.index[:7]]
    styles = ("-", "--", "-.", ":")
    for number, name in enumerate(kept):
        runs = frame[frame["series"] == name]
        strategy = runs["strategy"].iloc[0]
        colour, marker = COLOUR.get(strategy, QUIET), MARKER.get(strategy, "D")
        middle = runs.groupby("devices")["images_per_sec"].median()
        axes.plot(middle.index, middle, styles[number % 4], color=colour, linewidth=1.2, label=name)
        axes.plot(runs["devices"], runs["images_per_sec"], marker, color=colour, markersize=4.5, alpha=0.75)
    flagged = frame[frame["flagged"] & frame["series"].isin(kept)]
    ring(axes, flagged["devices"], flagged["images_per_sec"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.8, most + 0.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("images/s")
    legend(axes)


def _steps(group: Group) -> pd.DataFrame:
    found = [
        {"point": point.label, **parts}
        for point in group.points
        if not point.stand_in
        for run in point.runs
        if (parts := run.step_parts)
    ]
    columns = ["point", *STEP_PARTS]
    return pd.DataFrame(found, columns=columns).groupby("point", sort=False, as_index=False).mean()


def _paint_steps(axes: Axes, frame: pd.DataFrame) -> None:
    shown = frame.head(MOST_ROWS)
    bottom = pd.Series(0.0, index=shown.index)
    for part, (name, colour, hatch) in PARTS.items():
        if shown[part].sum() > 0:
            axes.bar(shown.index, shown[part], 0.6, bottom, color=colour, hatch=hatch, edgecolor="white", label=name)
            bottom += shown[part]
    name_bars(axes, list(shown["point"]))
    axes.set_ylabel("ms per step")
    legend(axes)


def _memory(group: Group) -> pd.DataFrame:
    """Per device; nothing on CPU, where devices share one memory."""
    columns = ["point", "strategy", "device", "gib", "low", "high"]
    found = [
        [point.label, point.strategy, number, *(value / 2**30 for value in (peak.median, peak.low, peak.high))]
        for point in group.points
        if group.accelerator != "cpu"
        for number, peak in enumerate(point.peak_bytes)
    ]
    return pd.DataFrame(found, columns=columns)


def _paint_memory(axes: Axes, frame: pd.DataFrame) -> None:
    names = list(frame["point"].unique()[:MOST_ROWS])
    for place, name in enumerate(names):
        peaks = frame[frame["point"] == name].reset_index()
        width = 0.8 / len(peaks)
        bars = axes.bar(
            [place - 0.4 + width * (number + 0.5) for number in peaks.index],
            peaks["gib"],
            width,
            yerr=[peaks["gib"] - peaks["low"], peaks["high"] - peaks["gib"]],
            color=COLOUR.get(peaks["strategy"].iloc[0], QUIET),
            edgecolor="white",
            error_kw={"elinewidth": 0.8, "ecolor": QUIET},
            alpha=0.85,
        )
        bars.patches[0].set_hatch("///")
    name_bars(axes, names)
    axes.set_ylabel("peak, GiB per device")


def _paint_order(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axhline(1, color=QUIET, linewidth=0.8)
    for strategy, runs in frame.groupby("strategy", sort=False):
        colour, marker = COLOUR.get(str(strategy), QUIET), MARKER.get(str(strategy), "D")
        axes.plot(runs.index + 1, runs["relative"], marker, color=colour, markersize=4.5, label=str(strategy))
    flagged = frame[frame["flagged"]]
    ring(axes, flagged.index + 1, flagged["relative"])
    low, high = frame["relative"].min(), frame["relative"].max()
    axes.set_ylim(min(0.9, low - 0.02), max(1.1, high + 0.02))
    axes.set_xlabel("run, in the order they ran")
    axes.set_ylabel("images/s over its point's median")
    legend(axes)


_PLOTS: tuple[tuple[str, str, Callable[[Group], pd.DataFrame], Callable[[Axes, pd.DataFrame], None]], ...] = (
    (
        "ratios",
        "Ratios of images/s with their intervals. Grey bars: what this sweep could not have told from no difference "
        "in 80 of 100 cases. Shaded from 1: differences too small to be of interest.",
        _ratios,
        _paint_ratios,
    ),
    ("speed", "Images/s against devices: every run a mark, lines through medians.", _speeds, _paint_speeds),
    ("step", "What a mean step of rank 0 is made of; the parts add up to it.", _steps, _paint_steps),
    (
        "memory",
        "Peak memory of every device, the first one hatched; lines from smallest to largest.",
        _memory,
        _paint_memory,
    ),
    ("order", "Each run's speed over its point's median, in run order: drift shows as a slope.", _order, _paint_order),
)
