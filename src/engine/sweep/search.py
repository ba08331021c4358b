"""A hyper-parameter search: Optuna proposes each next trial, and a trial is a job like those of a sweep.

Only this process talks to the study; ranks know nothing of it. A trial's value is the objective of its result.json, and
what decides on pruning is what its metrics.jsonl says meanwhile. All that later trials need is frozen in search.yaml when
the search starts, so editing YAML changes nothing, and a search that was stopped or killed goes on from its folder, the
half-done trial from its checkpoint. `optuna-dashboard sqlite:///<folder>/study.db` shows the study at any time.
"""

from __future__ import annotations

import itertools
import math
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.engine.config.compose import Command
from src.engine.machine.files import claim_folder
from src.engine.machine.secrets import hide
from src.engine.record.jobs import FAILED, Job, Jobs, new_jobs, read_jobs
from src.engine.record.result import read_metrics, read_result
from src.engine.sweep.points import Point, given
from src.engine.sweep.runner import Runner, freeze_job, say_stopped
from src.engine.sweep.space import check_space, freeze_search, natural_direction, read_search, read_space, trial_point
from src.schema import Config

if TYPE_CHECKING:  # its import takes a while, and only a search needs it
    import optuna

MAY_CHANGE = ("sweep.resume", "search", "search.n_trials")  # on the command line of a search that goes on


def start_search(command: Command, base: Point) -> int:
    """Run a new search. Returns the exit code. Errors: ValueError before any trial has started."""
    config, settings = command.config, command.config.search
    space = read_space(command)
    check_space(config, base.tree, space)
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    freeze_search(
        folder,
        base.tree,
        space,
        seed=config.seed if settings.seed is None else settings.seed,
        direction=natural_direction(config.optimized_metric),
        study_name=settings.study_name or f"{config.task_name} {folder.parent.name} {folder.name}",
    )
    try:
        study = open_study(folder, read_search(folder)[0], is_new=True)
    except ValueError:
        shutil.rmtree(folder)
        raise
    return Search(new_jobs(folder), study, settings.n_trials).run()


def resume_search(folder: Path, command: Command) -> int:
    """Go on with the search in `folder` until it has had its n_trials. Returns the exit code. Errors: ValueError."""
    config, _, _ = read_search(folder)
    keys = {item.lstrip("+").partition("=")[0] for item in given(command.tree)}
    if changed := sorted(keys.difference(MAY_CHANGE)):
        raise ValueError(
            f"{changed[0]}: a search that goes on keeps its settings (sweep.resume={folder}); leave it out"
        )
    n_trials = command.config.search.n_trials if "search.n_trials" in keys else config.search.n_trials
    jobs = read_jobs(folder)
    jobs.status = "running"
    return Search(jobs, open_study(folder, config, is_new=False), n_trials).run()


def open_study(folder: Path, config: Config, is_new: bool) -> optuna.Study:
    """Errors: ValueError when the storage cannot be opened, or has no (or, for a new search, already such a) study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = config.search
    name, url = settings.study_name, settings.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if settings.pruner == "median":
        pruner = optuna.pruners.MedianPruner(settings.n_startup_trials, settings.n_warmup_steps)
    try:
        if not is_new:
            return optuna.load_study(study_name=name, storage=url, pruner=pruner)
        direction = optuna.study.StudyDirection[str(settings.direction).upper()]
        return optuna.create_study(study_name=name, storage=url, pruner=pruner, direction=direction)
    except optuna.exceptions.DuplicatedStudyError:
        raise ValueError(
            f"search.study_name={name}: the storage has such a study already; choose another name, or go on with "
            "sweep.resume=<its sweep folder>"
        ) from None
    except KeyError:
        raise ValueError(f"{folder}: the storage has no study named {name}; start the search anew") from None
    except Exception as error:  # of the database's driver, whichever it is; the URL may hold a password
        raise ValueError(f"search.storage: cannot be opened ({type(error).__name__}); give sqlite:///<file>") from error


class Search:
    """Asks for a trial, runs it as a job, tells how it ended. Trial number and job id are the same."""

    def __init__(self, jobs: Jobs, study: optuna.Study, n_trials: int) -> None:
        self.jobs, self.study = jobs, study
        self.config, self.base, self.space = read_search(jobs.folder)
        self.n_trials = n_trials
        self.failed = 0  # since this start
        for number in range(len(jobs.jobs), n_trials):
            jobs.jobs.append(Job(number, f"trial {number}", str(number), []))

    def run(self) -> int:
        with Runner(self.jobs) as runner:
            for job in list(self.jobs.jobs):
                if job.status not in ("waiting", "running", "interrupted"):
                    continue
                trial = self._trial(job.id)
                if trial is None:  # every point of the grid has been tried
                    self.jobs.jobs = self.jobs.jobs[: job.id]
                    break
                self._run_trial(job, trial, runner)
                if runner.stopped_by is not None or self._has_failed_too_often():
                    break
        ended = all(job.status not in ("waiting", "interrupted") for job in self.jobs.jobs)
        self.jobs.status = "done" if ended else "interrupted"
        self.jobs.write()
        return self._close(runner.stopped_by)

    def _run_trial(self, job: Job, trial: optuna.Trial, runner: Runner) -> None:
        result_folder = self.jobs.folder / job.folder
        if not (job.overrides and (result_folder / "config.yaml").exists()):  # else a stopped search left it half-done
            self._freeze(job, trial)
            result_folder = self.jobs.folder / job.folder
        if job.status != "skipped":
            runner.run(job, Follower(trial, result_folder / "metrics.jsonl", self.config.optimized_metric))
        self._tell(job, trial)
        runner.record(job)

    def _freeze(self, job: Job, trial: optuna.Trial) -> None:
        values = {dimension: trial.params[dimension.name] for dimension in self.space}
        job.name = ",".join(f"{d.name}={v:.4g}" if isinstance(v, float) else d.override(v) for d, v in values.items())
        try:
            point = trial_point(self.base, [d.override(value) for d, value in values.items()], job.id)
            job.overrides, job.folder = point.overrides, point.subdir
            freeze_job(self.jobs.folder, job, point)
        except ValueError as error:  # the ends of each dimension were possible, but not these values together
            job.status, job.reason = "skipped", hide(str(error))

    def _tell(self, job: Job, trial: optuna.Trial) -> None:
        """A stopped trial is not told: it goes on when the search does."""
        from optuna.trial import TrialState

        trial.set_user_attr("status", job.status)
        trial.set_user_attr("reason", job.reason)
        if job.status == "interrupted":
            return
        if job.status == "done":
            value = read_result(self.jobs.folder / job.folder).objective
            if value is not None and math.isfinite(value):
                self.study.tell(trial, value)
                return
            job.status, job.reason = "not_finite", f"{self.config.optimized_metric} is {value}"
        pruned = job.status == "pruned"
        self.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        self.failed += job.status in FAILED

    def _has_failed_too_often(self) -> bool:
        limit = self.config.search.max_failure_rate
        if self.failed <= limit * self.n_trials:
            return False
        print(
            f"{self.failed} of {self.n_trials} trials have failed, more than search.max_failure_rate={limit:g} allows",
            file=sys.stderr,
        )
        return True

    def _trial(self, number: int) -> optuna.Trial | None:
        """The trial of this number: begun before the search was stopped, or asked for now. None: the grid is exhausted.

        A trial's draws are a function of the seed and its number, so a resumed search does not repeat its first ones.
        """
        from optuna import samplers
        from optuna.trial import Trial

        begun = [trial for trial in self.study.get_trials(deepcopy=False) if trial.number == number]
        if begun and not begun[0].state.is_finished() and len(begun[0].params) == len(self.space):
            return Trial(self.study, begun[0]._trial_id)
        settings = self.config.search
        assert settings.seed is not None
        seed = (settings.seed + number) % 2**32
        sampler: samplers.BaseSampler = samplers.RandomSampler(seed)
        if settings.sampler == "tpe":
            sampler = samplers.TPESampler(seed=seed)
        elif settings.sampler == "grid":  # Optuna's own ends the study by an exception outside of study.optimize
            point = self._next_of_grid()
            if point is None:
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experimental, since version 2.4
                sampler = samplers.PartialFixedSampler(point, sampler)
        self.study.sampler = sampler
        trial = self.study.ask({dimension.name: dimension.distribution() for dimension in self.space})
        if trial.number != number:
            raise ValueError(f"{self.jobs.folder}: its study has trials of another search; start a new search")
        return trial

    def _next_of_grid(self) -> dict[str, Any] | None:
        """The first point, in the order of a sweep, that no trial has tried yet."""
        tried = [trial.params for trial in self.study.get_trials(deepcopy=False)]
        names = [dimension.name for dimension in self.space]
        for values in itertools.product(*(dimension.values() for dimension in self.space)):
            point = dict(zip(names, values, strict=True))
            if point not in tried:
                return point
        return None

    def _close(self, stopped_by: int | None) -> int:
        """Page, last lines, exit code: 0 when any trial has a value."""
        from src.engine.sweep.search_page import best_trial, write_search_page

        print("search       " + ", ".join(f"{count} {status}" for status, count in self.jobs.counts().items()))
        best = best_trial(self.study)
        if best is not None:
            job = self.jobs.jobs[best.number]
            print(f"best         {self.config.optimized_metric} {best.value:.4f} in trial {job.id}: {job.name}")
            print(f"again        {shlex.join(['python', 'train.py', *job.overrides])}")
        print(f"page         {write_search_page(self.jobs, self.study, self.config)}")
        if stopped_by is not None:
            return say_stopped(stopped_by, self.jobs.folder)
        return 0 if best is not None and self.jobs.status == "done" else 1


class Follower:
    """Hands what a running trial logs to the study, and says when it should be pruned."""

    def __init__(self, trial: optuna.Trial, path: Path, metric: str) -> None:
        self.trial, self.path, self.metric = trial, path, metric
        self._size = -1  # of the file when it was last read
        self._reported = 0

    def __call__(self) -> str:
        """Why the trial should stop now; empty: it should not.

        The n-th value is compared with the n-th of other trials, whose steps may be others (another batch size).
        """
        size = self.path.stat().st_size if self.path.exists() else -1
        if size == self._size:
            return ""
        self._size = size
        values = [line[self.metric] for line in read_metrics(self.path) if line.get(self.metric) is not None]
        for number, value in enumerate(values[self._reported :], start=self._reported + 1):
            self._reported = number
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a trial that goes on from its checkpoint has reported its first ones
                self.trial.report(value, step=number)
            if self.trial.should_prune():
                return f"{self.metric} {value:.4f} is worse than the median of the trials before, after {number} evaluations"
        return ""
