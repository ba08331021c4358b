"""How every plot looks: colours, marks, fonts, legends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET = "#010101", "#808080"  # ink becomes the reader's text colour: dark on paper, light in dark mode
COLOUR = {"single": INK, "dp": "#d55e00", "ddp": "#0080c8"}
MARKER = {"single": "o", "dp": "s", "ddp": "^"}
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


def ring(axes: Axes, x: Any, y: Any) -> None:
    """Mark flagged runs."""
    if len(y):
        axes.plot(x, y, "o", label="flagged", markersize=10, markerfacecolor="none", markeredgecolor=QUIET)


def name_bars(axes: Axes, names: list[str]) -> None:
    long = sum(map(len, names)) > 50
    axes.set_xticks(range(len(names)), names, rotation=40 if long else 0, ha="right" if long else "center")


def legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) > 14 else 4)
