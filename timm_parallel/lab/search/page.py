"""Write `search.html`, the page of a hyper-parameter search: the best trial with its command,
Optuna's plot of the values against each key, and a table of the trials.
"""

from __future__ import annotations

import base64
import io
import shlex
import warnings
from pathlib import Path

import optuna
import pandas as pd
from optuna.visualization import matplotlib as plots

from timm_parallel.keys import Config
from timm_parallel.lab.image_page import render_page
from timm_parallel.machine.text import plural
from timm_parallel.record.result import Jobs


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
        image=draw_study(study, metric),
        table=table.to_html(
            index=False, na_rep="", float_format="{:.4g}".format, border=0, classes="figures"
        ),
    )
    return path


def draw_study(study: optuna.Study, metric: str) -> str:
    """Draw the values of the trials against each searched key, and return the plot as an HTML
    image. Without a value, the text is empty.
    """
    from matplotlib import pyplot

    if not study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]):
        return ""
    pyplot.switch_backend("Agg")
    with warnings.catch_warnings():
        # Hide Optuna's warning that its plots with matplotlib are experimental.
        warnings.simplefilter("ignore")
        plots.plot_slice(study, target_name=metric)
    svg = io.BytesIO()
    pyplot.savefig(svg, format="svg", bbox_inches="tight")
    pyplot.close("all")
    encoded = base64.b64encode(svg.getvalue()).decode()
    return f'<img alt="plot_slice" src="data:image/svg+xml;base64,{encoded}">'
