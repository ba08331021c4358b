"""How every plot of the report looks: colours, markers, error bars, axes, legends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from src.engine.report.comparison import Point
from src.engine.report.ranges import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR = {"single": "#222222", "dp": "#d55e00", "ddp": "#0072b2"}
_MARKERS = {"single": "o", "dp": "sDPXph", "ddp": "^v<>d*8H"}  # one strategy's curves take them in turn
_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's own font
    "text.parse_math": False,  # a $ in a model's name is a $
}


def errorbars(axes: Axes, name: str, number: int, measured: list[tuple[Point, Summary | None]]) -> None:
    known = [(point, summary) for point, summary in measured if summary]
    summaries = [summary for _, summary in known]
    axes.errorbar(
        [point.devices for point, _ in known],
        [summary.median for summary in summaries],
        yerr=errors(summaries),
        label=name,
        markersize=5,
        linewidth=1.2,
        capsize=3,
        **curve_style(known[0][0].strategy, number),
    )
    ringed = [(point.devices, summary.median) for point, summary in known if point.needless_threads]
    for devices, median in ringed:
        axes.plot(devices, median, "o", markersize=11, markerfacecolor="none", color="#777777")


def curve_style(strategy: str, number: int) -> dict[str, Any]:
    """Colour tells the strategy; marker and line, the `number`-th curve of it."""
    markers = _MARKERS.get(strategy, "D")
    return {
        "color": COLOUR.get(strategy, "#777777"),
        "marker": markers[number % len(markers)],
        "linestyle": _LINES[number % len(_LINES)],
    }


def errors(summaries: list[Summary], scale: float = 1) -> list[list[float]]:
    """Distances below and above the medians, as matplotlib takes them."""
    below = [(summary.median - summary.low) * scale for summary in summaries]
    return [below, [(summary.high - summary.median) * scale for summary in summaries]]


def finish(axes: Axes, most: int, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.8, most + 0.2 if most > 1 else 1.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel(label)
    legend(axes)


def name_bars(axes: Axes, points: list[Point]) -> None:
    long = sum(len(point.label) for point in points) > 50
    axes.set_xticks(
        range(len(points)), [p.label for p in points], rotation=40 if long else 0, ha="right" if long else "center"
    )


def legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) > 12 else 4)
