"""Hyper-parameter search: Optuna proposes the values of each trial, and each trial runs as a job
like the jobs of a sweep.

Only the process of the search accesses Optuna's study. The value of a trial is the objective in its
result.json. The metrics in metrics.jsonl decide whether a trial is stopped early. All trials start
from search.yaml, so later edits of YAML files do not change them. After a stop, the search and its
trials can be continued.
"""

from __future__ import annotations

import base64
import io
import math
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from timm_parallel.cluster.slurm import JOB_ID, check_scheduler
from timm_parallel.config.compose import Command
from timm_parallel.keys import Config, SearchConfig
from timm_parallel.lab.image_page import render_page
from timm_parallel.lab.jobs.local_job import sync_from_result
from timm_parallel.lab.jobs.scheduler import jobs_at_a_time
from timm_parallel.lab.jobs.slurm import SlurmQueue
from timm_parallel.lab.search.space import (
    Dimension,
    check_space,
    freeze_search,
    natural_direction,
    read_search,
    read_space,
    trial_point,
)
from timm_parallel.lab.sweep.points import Point, check_jobs_data, freeze_job, keys_that_may_change
from timm_parallel.lab.sweep.runner import Runner
from timm_parallel.machine.files import claim_folder
from timm_parallel.machine.secrets import hide
from timm_parallel.machine.text import plural
from timm_parallel.record.result import (
    FAILED,
    UNFINISHED,
    Job,
    Jobs,
    new_jobs,
    read_jobs,
    read_metrics,
    read_result,
    read_status,
)

# Optuna is slow to import, so that it is only imported for type checks here.
if TYPE_CHECKING:
    import optuna


def start_search(command: Command, base: Point) -> int:
    """Start a new hyper-parameter search and run its trials. Return the exit code. `base`:
    configuration on which all trials are based.
    """
    config, settings = command.config, command.config.search
    if config.cluster.scheduler == "slurm" and not config.cluster.submit:
        raise ValueError(
            "cluster.submit=false: a search must submit each trial itself, because it chooses the "
            "values of a trial from earlier results; use cluster.submit=true"
        )
    check_scheduler(config.cluster)
    space = read_space(command)
    check_jobs_data(check_space(config, base.tree, space))
    max_jobs = jobs_at_a_time("search.n_jobs", settings.n_jobs, config)
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    freeze_search(
        folder,
        base.tree,
        space,
        seed=config.seed if settings.seed is None else settings.seed,
        direction=natural_direction(config),
        study_name=settings.study_name or f"{config.task_name} {folder.parent.name} {folder.name}",
    )
    try:
        search = Search(new_jobs(folder), settings.n_trials, max_jobs, is_new=True)
    except ValueError:
        shutil.rmtree(folder)
        raise
    try:
        return search.run()
    except ValueError:
        # If Slurm rejected the first trial, it would reject all others too. Remove the folder and
        # the study, so that the name of the study can be used again.
        if search.slurm is not None and not any(folder.glob(f"*/{JOB_ID}")):
            import optuna

            optuna.delete_study(study_name=search.study.study_name, storage=search.study._storage)
            shutil.rmtree(folder)
        raise


def resume_search(folder: Path, command: Command) -> int:
    """Continue the hyper-parameter search in `folder` until it has search.n_trials trials. Return
    the exit code.
    """
    config, base, space = read_search(folder)
    check_scheduler(config.cluster)
    keys = keys_that_may_change(command, folder, "search", "search.n_trials", "search.n_jobs")
    for key in ("n_trials", "n_jobs"):
        if f"search.{key}" in keys:
            setattr(config.search, key, getattr(command.config.search, key))
    # Check the search space again when a search is resumed. On a machine that cannot run the
    # trials, all of them would otherwise be skipped.
    check_jobs_data(check_space(config, base, space))
    max_jobs = jobs_at_a_time("search.n_jobs", config.search.n_jobs, config)
    jobs = read_jobs(folder)
    jobs.status = "running"
    return Search(jobs, config.search.n_trials, max_jobs, is_new=False).run()


class Search(Runner):
    """Runner of a hyper-parameter search. When a device is free, Optuna's study chooses the values
    of the next trial. The number of a trial is the id of its job.
    """

    def __init__(self, jobs: Jobs, n_trials: int, max_jobs: int | None, *, is_new: bool) -> None:
        """Open Optuna's study and list the trials that still have to run. `max_jobs`: largest
        number of concurrent trials, or None if only the devices limit it.
        """
        from optuna.trial import TrialState

        self.config, self.base, self.space = read_search(jobs.folder)
        super().__init__(
            jobs, max_jobs, SlurmQueue() if self.config.cluster.scheduler == "slurm" else None
        )
        self.study = open_study(jobs.folder, self.config, is_new)
        self.n_trials = n_trials
        # Number of trials that have failed since this process started.
        self.failed = 0
        begun = sum(job.status not in UNFINISHED or bool(job.overrides) for job in jobs.jobs)
        del jobs.jobs[max(begun, n_trials) :]
        for number in range(len(jobs.jobs), n_trials):
            jobs.jobs.append(Job(number, f"trial {number}", str(number), []))
        self._to_come = [job for job in jobs.jobs if job.status in UNFINISHED]
        trials = self.study.get_trials(deepcopy=False)
        ended = {trial.number: trial.state for trial in trials if trial.state.is_finished()}
        for job in self._to_come:
            folder = jobs.folder / job.folder
            # For trials on Slurm, the runner asks Slurm's queue instead, which knows more than the
            # run folder.
            if job.status == "running" and self.slurm is None:
                sync_from_result(job, folder)
            # The study takes no more values of a trial that it lists as ended. If such a trial has
            # no result, the search was killed before it wrote jobs.json.
            if job.status == "running" and job.id in ended and read_status(folder) is None:
                job.status = "pruned" if ended[job.id] is TrialState.PRUNED else "failed"
                job.reason = "ended without a result"
            if job.status in UNFINISHED:
                job.reset()
        # The trial whose values are chosen and that has not started yet.
        self._next: Job | None = None
        # Trials whose values are chosen and whose results the study does not have yet.
        self._trials: dict[int, optuna.Trial] = {}

    def run(self) -> int:
        """Run the search as the base class does. Raises ValueError if the database of the study
        fails meanwhile. The search can then be continued.
        """
        from optuna.exceptions import StorageInternalError

        try:
            return super().run()
        except StorageInternalError as error:
            self.jobs.status = "interrupted"
            self.jobs.write()
            raise ValueError(
                "search.storage: the database of the study cannot be read or written, for example "
                "because another process has locked it; then continue with: python train.py -m "
                f"{shlex.quote(f'sweep.resume={self.jobs.folder}')}"
            ) from error

    def waiting(self) -> list[Job]:
        """Return a list with the next trial, or an empty list. The study chooses the values of a
        trial as late as possible, so that it can use the results of earlier trials.
        """
        if self._next is None and not self._scheduler.is_full and not self._has_failed_too_often():
            self._next = self._ask()
        return [] if self._next is None else [self._next]

    def watch(self, job: Job) -> Follower:
        self._next = None
        path = self.jobs.folder / job.folder / "metrics.jsonl"
        return Follower(self._trials[job.id], path, self.config.objective)

    def ended(self, job: Job) -> None:
        self._tell(job, self._trials.pop(job.id))
        self.jobs.write()
        self._board.ended(job, self._outcome(job))

    def _outcome(self, job: Job) -> str:
        """Format the start of the line about an ended trial: its number and its objective, or its
        status if it has no objective.
        """
        if job.status != "done":
            return f"trial {job.id}  {job.status}"
        return f"trial {job.id}  {self.config.objective} {self._objective(job):.4f}"

    def _ask(self) -> Job | None:
        """Let the study choose the next trial that can run on this machine, save its config and
        return its job. Return None if no trial is left.
        """
        while self._to_come:
            job = self._to_come.pop(0)
            trial = ask(self.study, self.config.search, self.space, job.id, self.max_jobs)
            self._trials[job.id] = trial
            # Keep the config of a trial that an earlier process of this search has started.
            if not (job.overrides and (self.jobs.folder / job.folder / "config.yaml").exists()):
                self._freeze(job, trial)
            if job.status == "waiting":
                return job
            # Record a trial that cannot run on this machine or that is done already, and choose the
            # next one.
            self.ended(job)
        return None

    def _freeze(self, job: Job, trial: optuna.Trial) -> None:
        values = {dimension: trial.params[dimension.name] for dimension in self.space}
        job.name = ",".join(
            f"{d.name}={v:.4g}" if isinstance(v, float) else d.override(v)
            for d, v in values.items()
        )
        try:
            point = trial_point(
                self.base, [d.override(value) for d, value in values.items()], job.id
            )
            job.overrides, job.folder = point.overrides, point.subdir
            freeze_job(self.jobs.folder, job, point)
        # Every value is possible alone, but the values of this trial contradict each other.
        except ValueError as error:
            job.status, job.reason = "skipped", hide(str(error))

    def _tell(self, job: Job, trial: optuna.Trial) -> None:
        """Report to Optuna's study how a trial ended. An interrupted trial is not reported, because
        it continues later.
        """
        from optuna.trial import TrialState

        value = self._objective(job) if job.status == "done" else None
        if value is not None and not math.isfinite(value):
            value, job.status = None, "not_finite"
            job.reason = f"{self.config.objective} is not finite"
        self.failed += job.status in FAILED
        if job.status != "interrupted":
            failed = TrialState.PRUNED if job.status == "pruned" else TrialState.FAIL
            state = failed if value is None else TrialState.COMPLETE
            # A search that was killed before it wrote jobs.json has reported the trial already.
            self.study.tell(trial, value, state=state, skip_if_finished=True)

    def _objective(self, job: Job) -> float:
        value = read_result(self.jobs.folder / job.folder).objective
        return math.nan if value is None else value

    def _has_failed_too_often(self) -> bool:
        """Return True if more trials have failed than search.max_failure_rate allows. Then no
        further trial starts, and a message is printed once.
        """
        limit = self.config.search.max_failure_rate
        if self.failed <= limit * self.n_trials:
            return False
        if self._to_come:
            reason = f"more than search.max_failure_rate={limit:g} allows; no more trials start"
            print(f"{self.failed} of {self.n_trials} trials have failed, {reason}", file=sys.stderr)
        self._to_come.clear()
        return True

    def _close(self) -> int:
        """Write search.html and print the summary of the search. Return the exit code, which is 0
        if the search has finished and a trial has a value.
        """
        print(f"search       {self.jobs.counts()}")
        has_value = any(job.status == "done" for job in self.jobs.jobs)
        if has_value:
            job = self.jobs.jobs[self.study.best_trial.number]
            best = f"{self.config.objective} {self.study.best_value:.4f}"
            print(f"best         {best} in trial {job.id}: {job.name}")
            print(f"command      {shlex.join(['python', 'train.py', *job.overrides])}")
        print(f"report       {write_search_page(self.jobs, self.study, self.config)}")
        if self.stopped_by is not None:
            return self._say_stopped(self.stopped_by)
        return 0 if has_value and self.jobs.status == "done" else 1


# Seconds to wait for an SQLite database that another process has locked.
LOCKED_SECONDS = 60.0


def open_study(folder: Path, config: Config, is_new: bool) -> optuna.Study:
    """Create the Optuna study of a new search, or load the study of a resumed one. Raises
    ValueError if the database cannot be opened or has another study of this name.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = config.search
    name = hide(str(settings.study_name))
    url = settings.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
    options = {"connect_args": {"timeout": LOCKED_SECONDS}} if url.startswith("sqlite") else None
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if settings.pruner == "median":
        pruner = optuna.pruners.MedianPruner(settings.n_startup_trials, settings.n_warmup_steps)
    try:
        storage = optuna.storages.RDBStorage(url, options)
        if not is_new:
            return optuna.load_study(study_name=name, storage=storage, pruner=pruner)
        return optuna.create_study(
            study_name=name,
            storage=storage,
            pruner=pruner,
            direction=optuna.study.StudyDirection[str(settings.direction).upper()],
        )
    except optuna.exceptions.DuplicatedStudyError:
        raise ValueError(
            f"search.study_name={name}: the database of search.storage already has a study of this "
            "name; choose another name, or continue that study with sweep.resume=<sweep folder>"
        ) from None
    # Catch every exception, because each database driver has its own. Do not show the URL, because
    # it may contain a password.
    except Exception as error:
        raise ValueError(
            f"search.storage: cannot open study {name} ({type(error).__name__}); check the URL, "
            "and that its database runs"
        ) from error


def ask(
    study: optuna.Study,
    settings: SearchConfig,
    space: list[Dimension],
    number: int,
    max_jobs: int | None,
) -> optuna.Trial:
    """Return trial `number` of a study, with a value for each searched key. If the search was
    stopped during this trial, the trial keeps the values that it had.

    Raises ValueError if the study has trials of another search.
    """
    from optuna.trial import Trial

    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    study.sampler = _sampler(settings, number, max_jobs)
    trial = Trial(study, begun[0]._trial_id) if begun else study.ask()
    if trial.number != number:
        raise ValueError(
            f"search.study_name={study.study_name}: the study of this name contains trials of "
            "another search; choose another name"
        )
    for dimension in space:
        # A trial that a stopped search has begun keeps its values.
        trial._suggest(dimension.name, dimension.distribution)
    return trial


def _sampler(
    settings: SearchConfig, number: int, max_jobs: int | None
) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    # Add the number of the trial to the seed, so that a resumed search draws the same values.
    assert settings.seed is not None
    seed = (settings.seed + number) % 2**32
    if settings.sampler == "random":
        return samplers.RandomSampler(seed)
    # Hide Optuna's warning that the option constant_liar is experimental.
    with warnings.catch_warnings(action="ignore"):
        # With constant_liar, running trials count as bad ones. Concurrent trials would otherwise
        # try nearly the same values.
        return samplers.TPESampler(seed=seed, constant_liar=max_jobs != 1)


class Follower:
    """Callable that reports the logged metrics of a running trial to the Optuna study. Each call
    returns the reason to stop the trial early, or an empty text.
    """

    def __init__(self, trial: optuna.Trial, path: Path, metric: str) -> None:
        self.trial, self.path, self.metric = trial, path, metric
        # Ignore the values that a resumed trial logged before. If it were pruned before its ranks
        # have started, it would write no result.
        self._size = self._file_size()
        self._reported = 0

    def _file_size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else -1

    def __call__(self) -> str:
        """Report the new values of a running trial to the study. Return the reason to stop the
        trial early, or an empty text.
        """
        size = self._file_size()
        if size == self._size:
            return ""
        self._size = size
        values = [
            line[self.metric]
            for line in read_metrics(self.path)
            if line.get(self.metric) is not None
        ]
        # Optuna compares trials at equal steps. Report the number of the evaluation as the step,
        # because trials may evaluate after different numbers of training steps.
        for number, value in enumerate(values[self._reported :], start=self._reported + 1):
            self._reported = number
            # Hide Optuna's warning about a step that was reported before, because a resumed trial
            # reports its first values again.
            with warnings.catch_warnings(action="ignore"):
                self.trial.report(value, step=number)
            if self.trial.should_prune():
                return (
                    f"{self.metric} {value:.4f} after {number} evaluations is worse than the "
                    "median of earlier trials"
                )
        return ""


def write_search_page(jobs: Jobs, study: optuna.Study, config: Config) -> Path:
    """Write search.html into the folder of a search and return its path: the best trial with its
    command, Optuna's plot of the values against each key, and a table of the trials.
    """
    # Import pandas only here, because the import is slow.
    import pandas as pd

    metric = config.objective
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    rows = []
    for job in jobs.jobs:
        value = trials[job.id].value if job.status == "done" else None
        params = trials[job.id].params if job.id in trials else {}
        rows.append(
            {
                "trial": job.id,
                metric: value,
                "status": job.status,
                "seconds": job.seconds,
                **params,
                "reason": job.reason,
            }
        )
    # Of equal values, Optuna takes the first as the best; so does a stable order.
    is_ascending = config.search.direction == "minimize"
    table = pd.DataFrame(rows).sort_values(metric, ascending=is_ascending, kind="stable")
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
    from optuna.trial import TrialState
    from optuna.visualization import matplotlib as plots

    if not study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
        return ""
    pyplot.switch_backend("Agg")
    # Hide Optuna's warning that its plots with matplotlib are experimental.
    with warnings.catch_warnings(action="ignore"):
        plots.plot_slice(study, target_name=metric)
    svg = io.BytesIO()
    pyplot.savefig(svg, format="svg", bbox_inches="tight")
    pyplot.close("all")
    encoded = base64.b64encode(svg.getvalue()).decode()
    return f'<img alt="plot_slice" src="data:image/svg+xml;base64,{encoded}">'
