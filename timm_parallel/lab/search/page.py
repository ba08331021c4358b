"""Write `search.html`, the page of a hyper-parameter search: the best trial with its command,
Optuna's plots, and a table of the trials.
"""

from __future__ import annotations

import base64
import io
import shlex
import warnings
from html import escape
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.visualization import matplotlib as plots

from timm_parallel.keys import Config
from timm_parallel.machine.files import write_text
from timm_parallel.machine.text import plural
from timm_parallel.record.jobs import Jobs

# Least number of trials with a value for a ranking of the keys. A ranking from fewer is noise.
MIN_FOR_IMPORTANCES = 20
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Search: {metric}</title>
<style>{style} img {{max-width: 100%}}</style></head>
<body><h1>Search: {metric}</h1><p class="quiet">{counts}</p><p class="lead">{lead}</p>
{figures}<div class="wide" tabindex="0">{table}</div></body></html>
"""


def write_search_page(jobs: Jobs, study: optuna.Study, config: Config) -> Path:
    """Write search.html into the folder of a search and return its path."""
    metric = config.objective
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    rows = []
    for job in jobs.jobs:
        value = trials[job.id].value if job.status == "done" else None
        params = trials[job.id].params if job.id in trials else {}
        row = {"trial": job.id, metric: value, "status": job.status, "seconds": job.seconds}
        rows.append({**row, **params, "reason": job.reason})
    table = pd.DataFrame(rows).sort_values(metric, ascending=config.search.direction == "minimize")
    lead, job, value = (
        "No trial has a value yet.",
        jobs.jobs[table["trial"].iloc[0]],
        table[metric].iloc[0],
    )
    if pd.notna(value):
        command = escape(shlex.join(["python", "train.py", *job.overrides]))
        lead = (
            f"Best: {metric} {value:.4f} in trial <a "
            f'href="{job.folder}/">{job.id}</a>.<br><code>{command}</code>'
        )
        count = plural(int(table[metric].count()), "trial")
        lead += (
            f"</p>\n<p>Chance helped to choose this value as the best of {count}, so it is too "
            "good. For a value to publish, train these settings next to the default ones in a "
            "sweep with sweep.repeats=5 and another seed."
        )
    path = jobs.folder / "search.html"

    html = table.to_html(
        index=False, na_rep="", float_format="{:.4g}".format, border=0, classes="figures"
    )
    page = PAGE.format(
        metric=metric,
        style=(Path(__file__).parents[1] / "report" / "page.css").read_text(encoding="utf-8"),
        counts=jobs.counts(),
        lead=lead,
        figures="\n".join(draw_study(study, metric)),
        table=html,
    )
    write_text(path, page)
    return path


def draw_study(study: optuna.Study, metric: str) -> list[str]:
    """Draw Optuna's plots of a study and return them as HTML images. Plots for which the study has
    too few trials are left out.
    """
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    values = [
        trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"
    ]
    # Plot functions of Optuna that have a parameter `target_name`, the name of the metric.
    of_values: list[Any] = [plots.plot_optimization_history, plots.plot_slice] if values else []
    if len(values) >= MIN_FOR_IMPORTANCES and len(set(values)) > 1:
        of_values.append(plots.plot_param_importances)
    images = []
    for plot in (*of_values, plots.plot_intermediate_values, plots.plot_timeline):
        with warnings.catch_warnings():
            # Hide Optuna's warning that its plots with matplotlib are experimental.
            warnings.simplefilter("ignore")
            plot(study, **({"target_name": metric} if plot in of_values else {}))
        svg = io.BytesIO()
        pyplot.savefig(svg, format="svg", bbox_inches="tight")
        pyplot.close("all")
        encoded = base64.b64encode(svg.getvalue()).decode()
        images.append(f'<img alt="{plot.__name__}" src="data:image/svg+xml;base64,{encoded}">')
    return images
