"""`search.md` at the end of a search: the best trial and its command, every trial, and two plots."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.machine.files import write_text
from src.engine.record.jobs import Jobs
from src.schema import Config

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

LEAST_FOR_IMPORTANCE = 6  # with fewer values the ranking is noise


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """None while no trial has a value."""
    try:
        return study.best_trial
    except ValueError:
        return None


def write_search_page(jobs: Jobs, study: optuna.Study, config: Config) -> Path:
    """Write search.md, and its plots beside it as PNG; returns the path of search.md."""
    counts = ", ".join(f"{count} {status}" for status, count in jobs.counts().items())
    settings, metric = config.search, config.optimized_metric
    lines = [f"# Search for the {'highest' if settings.direction == 'maximize' else 'lowest'} {metric}", ""]
    lines += [f"{settings.sampler} sampler, {settings.pruner} pruner, seed {settings.seed}: {counts}.", ""]
    best = best_trial(study)
    if best is None:
        lines += ["No trial has a value yet.", ""]
    else:
        job = jobs.jobs[best.number]
        lines += [f"Best: **{metric} {best.value:.4f}** in trial {job.id} ([{job.folder}]({job.folder}/))", ""]
        lines += ["    " + shlex.join(["python", "train.py", *job.overrides]), ""]
    lines += [f"![{caption}]({name})\n" for name, caption in _draw(jobs.folder, study, metric)]
    lines += [f"| trial | {metric} | status | seconds | {' | '.join(settings.params)} | reason |"]
    lines += ["| ---: | ---: | --- | ---: |" + " ---: |" * len(settings.params) + " --- |"]
    lines += _rows(jobs, study, [key.lstrip("+") for key in settings.params])
    url = "<search.storage>" if settings.storage else f"sqlite:///{jobs.folder}/study.db"
    lines += ["", f"Live, from any shell: `pip install optuna-dashboard && optuna-dashboard {url}`", ""]
    path = jobs.folder / "search.md"
    write_text(path, "\n".join(lines))
    return path


def _rows(jobs: Jobs, study: optuna.Study, keys: list[str]) -> list[str]:
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    rows = []
    for job in jobs.jobs:
        trial = trials.get(job.id)
        value = trial.value if trial is not None and job.status == "done" else None
        params = trial.params if trial is not None else {}
        cells = [
            str(job.id) if job.status == "waiting" else f"[{job.id}]({job.folder}/)",
            "" if value is None else f"{value:.4f}",
            job.status,
            "" if job.seconds is None else f"{job.seconds:.1f}",
            *(f"{params[key]:.4g}" if isinstance(params.get(key), float) else str(params.get(key, "")) for key in keys),
            job.reason.replace("|", "\\|").replace("\n", " "),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _draw(folder: Path, study: optuna.Study, metric: str) -> list[tuple[str, str]]:
    """(file name, caption) of each plot that there are values for."""
    import matplotlib

    matplotlib.use("Agg")
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as plots

    values = {trial.value for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])}
    drawn = []
    with warnings.catch_warnings(), matplotlib.rc_context({"font.size": 9, "figure.figsize": (7, 4)}):
        warnings.simplefilter("ignore")  # these plots are experimental, since version 2.2
        if values:
            axes = plots.plot_optimization_history(study, target_name=metric)
            drawn.append((axes, "search_history.png", f"{metric} of each trial, and the best so far"))
        if len(values) >= LEAST_FOR_IMPORTANCE:  # of different values: all the same, there is nothing to explain
            axes = plots.plot_param_importances(study, target_name=metric)
            drawn.append((axes, "search_importance.png", f"share of each key in how much {metric} varies (fANOVA)"))
        for axes, name, _ in drawn:
            figure = axes.get_figure(root=True)
            assert figure is not None
            figure.savefig(folder / name, dpi=120, bbox_inches="tight")
            matplotlib.pyplot.close(figure)
    return [(name, caption) for _, name, caption in drawn]
