"""`search.html` and `search.md` at the end of a search: the best trial and its command, plots, and every trial."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.engine.machine.files import write_text
from src.engine.record.jobs import Job, Jobs
from src.schema import Config

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

NUM_BEST = 10
REPORT = Path(__file__).parents[1] / "report"  # whose stylesheet the page has too


@dataclass
class Row:
    """A trial as text."""

    number: int
    folder: str  # empty before it has one
    value: str
    status: str
    seconds: str
    values: list[str]  # of the searched keys
    reason: str


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """None while no trial has a value."""
    try:
        return study.best_trial
    except ValueError:
        return None


def write_search_page(jobs: Jobs, study: optuna.Study, config: Config) -> Path:
    """Write search.html, and search.md for a terminal; returns the path of search.html."""
    from markupsafe import Markup

    from src.engine.sweep.search_plots import draw_study

    settings, metric = config.search, config.optimized_metric
    keys = [key.lstrip("+") for key in settings.params]
    asked = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    trials = [_row(job, asked.get(job.id), keys) for job in jobs.jobs]
    best = best_trial(study)
    done = sorted(
        (trial for trial in trials if trial.value),
        key=lambda trial: asked[trial.number].value or 0.0,
        reverse=settings.direction == "maximize",
    )
    page = {
        "metric": metric,
        "aim": "highest" if settings.direction == "maximize" else "lowest",
        "counts": ", ".join(f"{count} {status}" for status, count in jobs.counts().items()),
        "settings": f"{settings.sampler} sampler, {settings.pruner} pruner, seed {settings.seed}, {_at_a_time(config)}",
        "keys": keys,
        "best": None if best is None else trials[best.number],
        "command": "" if best is None else shlex.join(["python", "train.py", *jobs.jobs[best.number].overrides]),
        "top": done[:NUM_BEST],
        "trials": trials,
        "unfinished": [trial for trial in trials if trial.status != "done"],
        "plots": [(caption, Markup(svg)) for caption, svg in draw_study(study, metric)],  # matplotlib escaped its text
        "url": "<search.storage>" if settings.storage else f"sqlite:///{jobs.folder.resolve()}/study.db",
    }
    for kind in ("md", "html"):
        write_text(jobs.folder / f"search.{kind}", _render(kind, page))
    return jobs.folder / "search.html"


def _at_a_time(config: Config) -> str:
    number = config.search.n_jobs
    return "one at a time" if number == 1 else "side by side" if number == "auto" else f"{number} at a time"


def _row(job: Job, trial: FrozenTrial | None, keys: list[str]) -> Row:
    value = trial.value if trial is not None and job.status == "done" else None
    params = trial.params if trial is not None else {}
    return Row(
        number=job.id,
        folder="" if job.status in ("waiting", "skipped") else job.folder,
        value="" if value is None else f"{value:.4f}",
        status=job.status,
        seconds="" if job.seconds is None else f"{job.seconds:.1f}",
        values=[f"{params[k]:.4g}" if isinstance(params.get(k), float) else str(params.get(k, "")) for k in keys],
        reason=" ".join(job.reason.split()),
    )


def _render(kind: str, page: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, REPORT]),
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(f"search.{kind}.j2").render(page)
