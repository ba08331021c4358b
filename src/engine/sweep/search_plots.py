"""Optuna's own plots of a study as SVG text, with the report's fonts on white."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from src.engine.report.plots import STYLE

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_FOR_IMPORTANCE = 6  # with fewer values the ranking is noise
MOST_NAMED = 5  # curves; a longer legend is taller than its plot
MOST_SLICES = 8  # keys; more do not fit beside each other


def draw_study(study: optuna.Study, metric: str) -> list[tuple[str, str]]:
    """(caption, SVG) of each plot that there are values for."""
    import matplotlib

    matplotlib.use("Agg")  # Optuna's plots go through pyplot
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as plots

    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    different = {trial.value for trial in done}  # all the same, there is nothing to explain
    reported = any(trial.intermediate_values for trial in study.get_trials(deepcopy=False))
    keys = sorted({key for trial in done for key in trial.params})[:MOST_SLICES]
    named = {"target_name": metric}
    at_each = f"{metric} at each evaluation; a curve that ends early is a pruned trial"
    possible: list[tuple[bool, str, Callable[..., Any], dict[str, Any]]] = [
        (bool(done), f"{metric} of each trial, and the best so far", plots.plot_optimization_history, named),
        (
            len(different) >= LEAST_FOR_IMPORTANCE,
            f"Share of each key in how much {metric} varies (fANOVA)",
            plots.plot_param_importances,
            named,
        ),
        (reported, at_each, plots.plot_intermediate_values, {}),
        (True, "When each trial ran, and how it ended: done, pruned or failed", plots.plot_timeline, {}),
        (bool(done), f"{metric} over each key; the darker, the later", plots.plot_slice, {"params": keys, **named}),
    ]
    return [(caption, _svg(partial(plot, study, **more), caption)) for has, caption, plot, more in possible if has]


def _svg(plot: Callable[[], Any], caption: str) -> str:
    import matplotlib
    from matplotlib import pyplot

    with warnings.catch_warnings(), matplotlib.rc_context({**STYLE, "text.parse_math": True, "svg.hashsalt": caption}):
        warnings.simplefilter("ignore")  # these plots are experimental, since version 2.2
        drawn = plot()  # sets a style of its own, which ends with this context
        axes = list(drawn.ravel()) if hasattr(drawn, "ravel") else [drawn]
        figure = axes[0].get_figure(root=True)
        _like_the_report(figure, axes)
        text = io.StringIO()
        figure.savefig(
            text, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None, "Creator": None}
        )
        pyplot.close(figure)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :].rstrip(), flags=re.DOTALL)
    return _with_own_ids(svg, sha256(caption.encode()).hexdigest()[:6])


def _like_the_report(figure: Figure, axes: list[Axes]) -> None:
    """No title, which the caption is; white, with thin lines."""
    from matplotlib.ticker import NullFormatter

    figure.set_size_inches(max(5.0, 2.6 * len(axes)), 3.4)
    figure.suptitle("")
    for one in figure.axes:  # with the colour bar's
        one.set_title("")
        for text in (one.xaxis.label, one.yaxis.label, *one.get_xticklabels(), *one.get_yticklabels()):
            text.set_color("#1a1a1a")
            text.set_fontsize(8)
        one.xaxis.set_minor_formatter(NullFormatter())  # less than a decade wide, a log scale would name 2, 3, 4 …
        legend = one.get_legend()
        if legend is not None and len(legend.get_texts()) > MOST_NAMED:
            legend.remove()
    for one in axes:
        one.set_facecolor("white")
        one.grid(visible=True, color="#e5e5e2", linewidth=0.6)
        for side, spine in one.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color("#1a1a1a")


def _with_own_ids(svg: str, prefix: str) -> str:
    """matplotlib counts from 1 in every figure, and a page's ids must be unique."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="p{prefix}_\1"', svg)
    return re.sub(r'(url\(#|href="#)', rf"\1p{prefix}_", svg)
