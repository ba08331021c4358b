"""One group's figures as SVG text: Okabe and Ito's colours for the colour-blind, markers and hatches for grey print."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from src.engine.report.comparison import Group, Point
from src.engine.report.plot_style import COLOUR, STYLE, curve_style, errorbars, errors, finish, legend, name_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SERIES = 8  # more curves in one plot cannot be told apart; the tables have them all
MOST_EVALUATIONS = 40  # points drawn per accuracy curve; evenly spaced, the last evaluation always among them
MOST_REPEATS = 5  # accuracy curves drawn per point

_PARTS = (("data wait", "#e69f00", "//"), ("compute", "#8fb8d8", ""), ("exposed communication", "#555555", "xx"))
_WHOLE = ("compute and communication, not told apart", "#c9d3da", "\\\\")


def draw(group: Group) -> list[tuple[str, str]]:
    """(caption, SVG) of every plot this group has figures for."""
    drawn = [(caption, _svg(plot, group)) for plot, caption in _PLOTS]
    return [(caption, svg) for caption, svg in drawn if svg]


def _svg(plot: Any, group: Group) -> str:
    """Empty when `plot` finds nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"{group.title}{plot.__name__}"}):
        figure = Figure(figsize=(5.0, 3.4), layout="constrained")  # without pyplot: no display, no global state
        axes = figure.add_subplot()
        if not plot(axes, group):
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib counts from 1 in every figure; a page's ids must be unique
    return re.sub(r"'DejaVu Sans'[^;\"]*", "Helvetica, Arial, 'DejaVu Sans', sans-serif", svg)


def _speed(axes: Axes, group: Group) -> bool:
    series = _series(group)
    if not series:
        return False
    most = max(point.devices for *_, points in series for point in points)
    base = group.single.speed if group.single else None
    if base and most > 1:
        axes.plot([1, most], [base.median, base.median * most], ":", color="#777777", label="linear")
    for name, number, points in series:
        errorbars(axes, name, number, [(p, p.speed) for p in points])
    finish(axes, most, "images/s")
    return True


def _efficiency(axes: Axes, group: Group) -> bool:
    series = [curve for curve in _series(group) if any(p.devices > 1 and group.efficiency(p) for p in curve[2])]
    if not series:
        return False
    most = max(point.devices for *_, points in series for point in points)
    axes.plot([1, most], [1, 1], ":", color="#777777", label="linear")
    for name, number, points in series:
        errorbars(axes, name, number, [(p, group.efficiency(p)) for p in points])
    finish(axes, most, "efficiency (1 = linear)")
    return True


def _memory(axes: Axes, group: Group) -> bool:
    points = [point for point in group.points if point.peak_bytes][: 2 * MOST_SERIES]
    if not points:
        return False
    for place, point in enumerate(points):
        peaks = point.peak_bytes
        width = 0.8 / len(peaks)
        at = [place - 0.4 + width * (number + 0.5) for number in range(len(peaks))]
        bars = axes.bar(
            at,
            [peak.median / 2**30 for peak in peaks],
            width,
            yerr=errors(peaks, 2**-30),
            color=COLOUR.get(point.strategy, "#777777"),
            edgecolor="white",
            error_kw={"elinewidth": 0.8, "ecolor": "#999999"},
            alpha=0.85,
        )
        bars.patches[0].set_hatch("///")
    name_bars(axes, points)
    per = "resident set, GiB per process" if group.accelerator == "cpu" else "allocator peak, GiB per device"
    axes.set_ylabel(per)
    return True


def _step_time(axes: Axes, group: Group) -> bool:
    points = [point for point in group.points if point.speed and point.measure("step_ms")][: 2 * MOST_SERIES]
    if not points:
        return False
    for place, point in enumerate(points):
        bottom = 0.0
        for (name, colour, hatch), height in _parts(point):
            label = name if name not in axes.get_legend_handles_labels()[1] else None
            axes.bar(place, height, 0.6, bottom, color=colour, hatch=hatch, edgecolor="white", label=label)
            bottom += height
        step = point.measure("step_ms")
        if step and step.count > 1:
            axes.errorbar(place, step.median, yerr=errors([step]), color="#222222", capsize=3, linewidth=0.8)
    name_bars(axes, points)
    axes.set_ylabel("ms per step")
    legend(axes)
    return True


def _parts(point: Point) -> list[tuple[tuple[str, str, str], float]]:
    """Style and milliseconds of the parts of a step, from the bottom of its bar to the top."""
    step, wait, exposed = (point.measure(name) for name in ("step_ms", "data_wait", "exposed_ms"))
    assert step is not None
    data = step.median * wait.median if wait else 0.0
    # single has no process group: its exposed communication is 0 by definition, not by measurement
    communication = exposed.median if exposed else 0.0 if point.strategy == "single" else None
    waited = [(_PARTS[0], data)] if wait else []
    rest = step.median - data
    if communication is None or communication > rest:
        return [*waited, (_WHOLE, rest)]
    return [*waited, (_PARTS[1], rest - communication), (_PARTS[2], communication)]


def _accuracy(axes: Axes, group: Group) -> bool:
    points = [point for point in group.points if point.speed][:MOST_SERIES]
    for point in points:
        like = [other for other in points if other.strategy == point.strategy]
        curves = [curve for run in point.runs[:MOST_REPEATS] if (curve := run.accuracy_curve())]
        for number, curve in enumerate(curves):
            seconds, accuracies = zip(*curve[:: -1 - len(curve) // MOST_EVALUATIONS], strict=True)
            axes.plot(
                seconds,
                accuracies,
                markersize=3,
                markevery=1 + len(seconds) // 6,
                linewidth=1,
                label=None if number else point.label,
                **curve_style(point.strategy, like.index(point)),
            )
    axes.set_xlabel("seconds since the run's start")
    axes.set_ylabel("validation accuracy")
    legend(axes)
    return bool(axes.lines)


def _series(group: Group) -> list[tuple[str, int, list[Point]]]:
    """(name, number within its strategy, points that differ in devices only): single and the fastest, MOST_SERIES in all."""
    found: dict[str, list[Point]] = {}
    for point in group.points:
        if point.speed:
            found.setdefault(f"{point.strategy}{point.suffix}", []).append(point)

    def slowness(name: str) -> tuple[bool, float]:
        return name != "single", -max(point.speed.median for point in found[name] if point.speed)

    kept = sorted(found, key=slowness)[:MOST_SERIES]
    series, count = [], Counter[str]()
    for name, points in found.items():
        if name in kept:
            series.append((name, count[points[0].strategy], points))
            count[points[0].strategy] += 1
    return series


_PLOTS = (
    (
        _speed,
        "Images per second against devices: median, smallest and largest of the repeats. "
        "Dotted: linear from single on 1 device. Ringed: more threads than cores.",
    ),
    (
        _efficiency,
        "Efficiency against devices: speed-up over single on 1 device, divided by the devices. "
        "Dotted: linear. Ringed: more threads than cores.",
    ),
    (
        _memory,
        "Peak memory of every device, the first one hatched. "
        "One wide bar is one process, whose devices cannot be told apart.",
    ),
    (_step_time, "Time of one step, split by medians. What was not measured apart is not split."),
    (_accuracy, "Validation accuracy against wall time, one curve per repeat, of at most 5 repeats."),
)
