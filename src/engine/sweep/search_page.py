"""`search.html` and `search.md` at the end of a search: the best trial and its command, Optuna's own plots, every trial."""

from __future__ import annotations

import io
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import matplotlib
import optuna
from markupsafe import Markup
from matplotlib.ticker import NullFormatter
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as plots

from src.engine.machine.files import write_text
from src.engine.record.jobs import Job, Jobs
from src.engine.report.plots import STYLE
from src.schema import Config

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BEST = 10
REPORT = Path(__file__).parents[1] / "report"  # whose stylesheet the page has too
LEAST_FOR_IMPORTANCE = 6  # with fewer values the ranking is noise
MOST_NAMED = 5  # curves; a longer legend is taller than its plot
MOST_SLICES = 8  # keys; more do not fit beside each other


def write_search_page(jobs: Jobs, study: optuna.Study, config: Config) -> Path:
    """Write search.html, and search.md for a terminal; returns the path of search.html."""
    settings, metric = config.search, config.optimized_metric
    keys = [key.lstrip("+") for key in settings.params]
    asked = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    trials = [_row(job, asked.get(job.id), keys) for job in jobs.jobs]
    done = sorted(
        (trial for trial in trials if trial["value"]),
        key=lambda trial: asked[trial["number"]].value or 0.0,
        reverse=settings.direction == "maximize",
    )
    best = done[0] if done else None
    at_a_time = {1: "one at a time", "auto": "side by side"}.get(settings.n_jobs, f"{settings.n_jobs} at a time")
    page = {
        "metric": metric,
        "aim": "highest" if settings.direction == "maximize" else "lowest",
        "counts": jobs.counts(),
        "settings": f"{settings.sampler} sampler, {settings.pruner} pruner, seed {settings.seed}, {at_a_time}",
        "keys": keys,
        "best": best,
        "command": best and shlex.join(["python", "train.py", *jobs.jobs[best["number"]].overrides]),
        "top": done[:NUM_BEST],
        "trials": trials,
        "unfinished": [trial for trial in trials if trial["status"] != "done"],
        "plots": [(caption, Markup(svg)) for caption, svg in draw_study(study, metric)],  # matplotlib escaped its text
        "url": "<search.storage>" if settings.storage else f"sqlite:///{jobs.folder.resolve()}/study.db",
    }
    for kind in ("md", "html"):
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([Path(__file__).parent, REPORT]),
            autoescape=kind == "html",
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=jinja2.StrictUndefined,
        )
        write_text(jobs.folder / f"search.{kind}", environment.get_template(f"search.{kind}.j2").render(page))
    return jobs.folder / "search.html"


def _row(job: Job, trial: FrozenTrial | None, keys: list[str]) -> dict[str, Any]:
    """A trial as text; `searched` are its values of the `keys`."""
    value = trial.value if trial is not None and job.status == "done" else None
    params = trial.params if trial is not None else {}
    return {
        "number": job.id,
        "folder": "" if job.status in ("waiting", "skipped") else job.folder,
        "value": "" if value is None else f"{value:.4f}",
        "status": job.status,
        "seconds": "" if job.seconds is None else f"{job.seconds:.1f}",
        "searched": [f"{params[k]:.4g}" if isinstance(params.get(k), float) else str(params.get(k, "")) for k in keys],
        "reason": " ".join(job.reason.split()),
    }


def draw_study(study: optuna.Study, metric: str) -> list[tuple[str, str]]:
    """(caption, SVG) of each of Optuna's plots that there are values for, with the report's fonts on white."""
    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    different = {trial.value for trial in done}  # all the same, there is nothing to explain
    reported = any(trial.intermediate_values for trial in study.get_trials(deepcopy=False))
    keys = sorted({key for trial in done for key in trial.params})[:MOST_SLICES]
    at_each = f"{metric} at each evaluation; a curve that ends early is a pruned trial"
    importance = f"Share of each key in how much {metric} varies (fANOVA)"
    slices, name = f"{metric} over each key; the darker, the later", {"target_name": metric}
    drawn = []
    if done:
        drawn.append(
            _svg(f"{metric} of each trial, and the best so far", plots.plot_optimization_history, study, **name)
        )
    if len(different) >= LEAST_FOR_IMPORTANCE:
        drawn.append(_svg(importance, plots.plot_param_importances, study, **name))
    if reported:
        drawn.append(_svg(at_each, plots.plot_intermediate_values, study))
    drawn.append(_svg("When each trial ran, and how it ended: done, pruned or failed", plots.plot_timeline, study))
    if done:
        drawn.append(_svg(slices, plots.plot_slice, study, params=keys, **name))
    return drawn


def _svg(caption: str, plot: Callable[..., Any], study: optuna.Study, **options: Any) -> tuple[str, str]:
    from matplotlib import pyplot  # Optuna's plots go through it

    matplotlib.use("Agg")
    look = {**STYLE, "text.parse_math": True, "svg.hashsalt": caption}
    with warnings.catch_warnings(), matplotlib.rc_context(look):
        warnings.simplefilter("ignore")  # these plots are experimental, since version 2.2
        drawn = plot(study, **options)  # sets a style of its own, which ends with this context
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
    return caption, re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib counts from 1 in each; a page's ids are unique


def _like_the_report(figure: Figure, axes: list[Axes]) -> None:
    """No title, which the caption is; white, with thin lines."""
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
