"""Write `search.html`, the page of a hyper-parameter search: the best trial with its command,
Optuna's plots, and a table of the trials.
"""

from __future__ import annotations

import base64
import io
import shlex
import warnings
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.visualization import matplotlib as plots

from timm_parallel.keys import Config
from timm_parallel.lab.image_page import render_page
from timm_parallel.machine.text import plural
from timm_parallel.record.jobs import Jobs

# Least number of trials with a value for a ranking of the keys. A ranking from fewer is noise.
MIN_FOR_IMPORTANCES = 20


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
    best, path = table.iloc[0], jobs.folder / "search.html"
    job = jobs.jobs[best["trial"]]
    render_page(
        "search/page.html.j2",
        path,
        metric=metric,
        counts=jobs.counts(),
        value=best[metric] if pd.notna(best[metric]) else None,
        trials=plural(int(table[metric].count()), "trial"),
        job=job,
        command=shlex.join(["python", "train.py", *job.overrides]),
        images=draw_study(study, metric),
        table=table.to_html(
            index=False, na_rep="", float_format="{:.4g}".format, border=0, classes="figures"
        ),
    )
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
