"""SVG plots of one group of configurations. Okabe and Ito's colors suit color-blind readers; marks
survive gray print.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from timm_parallel.lab.analysis.contrasts import SPEED
from timm_parallel.lab.analysis.groups import Group
from timm_parallel.lab.analysis.runs import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET = (
    "#010101",
    "#808080",
)  # INK becomes the reader's text color: dark on paper, light in dark mode
LOOKS = {"single": ("o", INK), "dp": ("s", "#d55e00"), "ddp": ("^", "#0080c8")}  # mark and color
OTHER = ("D", QUIET)
# Parts of a step: name, color, hatch.
PARTS = {
    "data_ms": ("waits for data", "#e69f00", "//"),
    "compute_ms": ("computes", "#7fb2d9", ""),
    "communication_ms": ("waits for other ranks", "#777777", "xx"),
    "other_ms": ("everything else", "#c9c9c9", ".."),
}
STYLE = Path(__file__).with_name("plots.mplstyle")
DASHES = ("-", "--", "-.", ":")
HEIGHT = 3.2  # inches
LONGEST_LABEL = 44  # characters
RATIO_TICKS = (0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
MOST_POINTS, MOST_LINES = (
    24,
    8,
)  # in one plot, the fastest ones; the tables and the data files have all


@dataclass(frozen=True)
class Plot:
    name: str
    svg: str
    data: pd.DataFrame


def draw(group: Group) -> list[Plot]:
    """Draw the plots of speed, step time and memory for which this group has measurements."""
    fastest = sorted(
        group.points, key=lambda point: point.speed.median if point.speed else 0, reverse=True
    )
    shown = [point.label for point in fastest[:MOST_POINTS]]
    runs = group.speeds
    scales = len(runs[["strategy", "devices"]].drop_duplicates()) > 1
    plots: dict[str, tuple[pd.DataFrame, Callable[[Axes, pd.DataFrame], None]]] = {
        "ratios": (_ratios(group), _paint_ratios),
        "speed": (runs if scales else runs[:0], _paint_speeds),
        "step": (_steps(group), _paint_steps),
        "memory": (_memory(group), _paint_memory),
    }
    drawn = []
    for name, (frame, paint) in plots.items():
        picked = frame[frame[frame.columns[0]].isin(shown)].reset_index(drop=True)
        if len(picked):
            height = height_of(picked["a"] + " over " + picked["b"]) if name == "ratios" else HEIGHT
            drawn.append(Plot(name, svg(paint, picked, f"{group.title}{name}", height), frame))
    return drawn


def svg(
    paint: Callable[[Axes, pd.DataFrame], None],
    frame: pd.DataFrame,
    salt: str,
    height: float = HEIGHT,
) -> str:
    """Return what `paint(axes, frame)` draws as SVG text. `salt` makes its ids unique; `height` is
    in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": salt}, fname=STYLE):
        # Without pyplot there is no display and no global state.
        figure = Figure(figsize=(5.0, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes, frame)
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
    # Matplotlib counts ids from 1 in every figure, but the ids of a page must be unique.
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "Helvetica, Arial, 'DejaVu Sans', sans-serif", drawn)
    return drawn.replace(INK, "currentColor")


def whole(label: str) -> str:
    """Break a label into lines of at most LONGEST_LABEL characters."""
    return textwrap.fill(label, LONGEST_LABEL)


def height_of(labels: Iterable[str]) -> float:
    """Return the height in inches of a plot with a line of text per label."""
    return 1.4 + 0.24 * sum(whole(label).count("\n") + 1 for label in labels)


def paint_intervals(
    axes: Axes, frame: pd.DataFrame, looks: Callable[[str], tuple[str, str]]
) -> None:
    """Draw the columns `middle`, `low` and `high` of each row as a mark with an interval, next to
    its `label`.

    `looks` returns mark and color of a label. A row without an interval is a mark.
    """
    for y, row in enumerate(frame.itertuples()):
        marker, color = looks(str(row.label))
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
    axes.set_yticks(range(len(frame)), [whole(label) for label in frame["label"]])
    axes.invert_yaxis()
    axes.margins(y=0.6 / len(frame))


def paint_xy(
    axes: Axes,
    points: pd.DataFrame,
    middle: str,
    dash: str,
    marker: str,
    line: str,
    color: str,
    label: str | None = None,
) -> None:
    """Draw the columns `x` and `y` as marks, and a line through the `middle` (mean or median) of
    each x.
    """
    middles = points.groupby("x")["y"].agg(middle)
    axes.plot(middles.index, middles, dash, color=line, linewidth=1.2, label=label)
    axes.plot(points["x"], points["y"], marker, color=color, markersize=4.5, alpha=0.75)


def short(label: str) -> str:
    """Cut a label to LONGEST_LABEL characters, so that the axes keep their room."""
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _ratios(group: Group) -> pd.DataFrame:
    columns = ["a", "b", "ratio", "low", "high", "n", "detectable", "verdict"]
    known = [
        contrast.fields for contrast in group.contrasts.get(SPEED, ()) if contrast.low is not None
    ]
    return pd.DataFrame(known, columns=columns).assign(of_interest=group.smallest_difference)


def _paint_ratios(axes: Axes, frame: pd.DataFrame) -> None:
    axes.axvline(1, color=QUIET, linewidth=0.8)
    axes.axvspan(1, 1 + frame["of_interest"].iloc[0], color=QUIET, alpha=0.25, linewidth=0)
    # Longer intervals are cut at the edge of the plot. 1/2 and 2 are equally far from 1.
    end = 4 * max(1, frame["ratio"].max())
    axes.set_xscale("log")
    for y, detectable in enumerate(frame["detectable"].clip(upper=end)):
        axes.plot(
            [1 / (1 + detectable), 1 + detectable],
            [y, y],
            color=QUIET,
            alpha=0.45,
            linewidth=6,
            zorder=1,
        )
    cut = frame.assign(
        middle=frame["ratio"],
        low=frame["low"].clip(lower=1 / end / end),
        high=frame["high"].clip(upper=end),
    )
    cut["label"] = frame["a"] + " over " + frame["b"]
    paint_intervals(axes, cut, lambda label: LOOKS.get(label.split(" ")[0], OTHER))
    left, right = axes.get_xlim()
    left, right = max(left, min(frame["ratio"].min(), 1) / 4), min(right, end)
    axes.set_xlim(left, right)
    ticks = [tick for tick in RATIO_TICKS if left <= tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ratio of images/s")


def _paint_speeds(axes: Axes, frame: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    devices = int(frame["devices"].max())
    single = frame[(frame["strategy"] == "single") & (frame["devices"] == 1)][SPEED]
    if len(single) and devices > 1:
        axes.plot(
            [1, devices],
            [single.median(), single.median() * devices],
            ":",
            color=QUIET,
            label="ideal",
        )
    best = frame.groupby("series")[SPEED].median().nlargest(MOST_LINES - 1).index
    kept = frame[frame["series"].isin(["single", *best])]
    for number, (name, runs) in enumerate(kept.groupby("series", sort=False)):
        marker, color = LOOKS.get(runs["strategy"].iloc[0], OTHER)
        points = runs.rename(columns={"devices": "x", SPEED: "y"})
        paint_xy(axes, points, "median", DASHES[number % 4], marker, color, color, str(name))
    flagged = kept[kept["flagged"]]
    if len(flagged):
        ring: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none", "label": "flagged"}
        axes.plot(flagged["devices"], flagged[SPEED], "o", color=QUIET, **ring)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(0.8, devices + 0.2), xlabel="devices", ylabel="images/s")
    axes.set_ylim(bottom=0)


def _steps(group: Group) -> pd.DataFrame:
    runs = [
        (point, run.step_parts)
        for point in group.points
        for run in point.runs
        if not point.is_simulated
    ]
    rows = [{"point": point.label, **parts} for point, parts in runs if parts]
    return (
        pd.DataFrame(rows, columns=["point", *STEP_PARTS])
        .groupby("point", sort=False, as_index=False)
        .mean()
    )


def _paint_steps(axes: Axes, frame: pd.DataFrame) -> None:
    bottom = pd.Series(0.0, index=frame.index)
    for part, (name, color, hatch) in PARTS.items():
        if frame[part].sum() > 0:
            axes.bar(
                frame.index,
                frame[part],
                0.6,
                bottom,
                color=color,
                hatch=hatch,
                edgecolor="white",
                label=name,
            )
            bottom += frame[part]
    _name_bars(axes, list(frame["point"]), "ms per step")


def _memory(group: Group) -> pd.DataFrame:
    """Return the peak memory of each device as a table; empty on a CPU,
    where devices share memory.
    """
    rows = []
    for point in group.points if group.accelerator != "cpu" else ():
        for device, peak in enumerate(point.peak_bytes):
            gib = [value / 2**30 for value in (peak.median, peak.low, peak.high)]
            rows.append([point.label, point.strategy, device, *gib])
    return pd.DataFrame(rows, columns=["point", "strategy", "device", "gib", "low", "high"])


def _paint_memory(axes: Axes, frame: pd.DataFrame) -> None:
    looks: dict[str, Any] = {
        "edgecolor": "white",
        "alpha": 0.85,
        "error_kw": {"elinewidth": 0.8, "ecolor": QUIET},
    }
    for x, (_, peaks) in enumerate(frame.groupby("point", sort=False)):
        _, color = LOOKS.get(peaks["strategy"].iloc[0], OTHER)
        width = 0.8 / len(peaks)
        centers = x - 0.4 + width * (peaks["device"] + 0.5)
        reach = (peaks["gib"] - peaks["low"], peaks["high"] - peaks["gib"])
        bars = axes.bar(centers, peaks["gib"], width, yerr=reach, color=color, **looks)
        bars.patches[0].set_hatch("///")
    _name_bars(axes, list(frame["point"].unique()), "peak, GiB per device")


def _name_bars(axes: Axes, names: list[str], height: str) -> None:
    is_long = sum(map(len, names)) > 50
    axes.set_xticks(
        range(len(names)),
        [*map(short, names)],
        rotation=40 if is_long else 0,
        ha="right" if is_long else "center",
    )
    axes.set_ylabel(height)
