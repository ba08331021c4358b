"""A hyper-parameter search: Optuna proposes each next trial, and a trial is a job like those of a sweep.

Only this process talks to the study; ranks know nothing of it. A trial's value is the objective in its result.json, and
pruning is decided by what its metrics.jsonl says while it runs. All that later trials need is frozen in search.yaml when
the search starts, so editing YAML changes nothing. A search that was stopped or killed goes on from its folder, and a
half-done trial from its checkpoint. With cluster=slurm each trial is a job of Slurm's, which runs on meanwhile.
`optuna-dashboard sqlite:///<folder>/study.db` shows the study at any time.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.config.compose import Command
from src.engine.launch.slurm import JOB_ID, check_scheduler
from src.engine.machine.files import claim_folder
from src.engine.machine.secrets import hide
from src.engine.record.jobs import FAILED, UNFINISHED, Job, Jobs, new_jobs, read_jobs
from src.engine.record.result import read_result
from src.engine.sweep.child import read_end
from src.engine.sweep.devices import jobs_at_a_time
from src.engine.sweep.points import Point, freeze_job, keys_that_may_change
from src.engine.sweep.runner import Runner
from src.engine.sweep.space import check_space, freeze_search, natural_direction, read_search, read_space, trial_point
from src.engine.sweep.study import Follower, ask, open_study
from src.engine.sweep.submitted import SlurmQueue
from src.schema import ClusterConfig

if TYPE_CHECKING:  # its import takes a while, and only a search needs it
    import optuna


def start_search(command: Command, base: Point) -> int:
    """Run a new search. Returns the exit code."""
    config, settings = command.config, command.config.search
    if config.cluster.scheduler == "slurm" and not config.cluster.submit:
        raise ValueError("cluster.submit=false: a search submits its trials as it goes; leave it at true")
    check_scheduler(config.cluster)
    space = read_space(command)
    check_space(config, base.tree, space)
    most = jobs_at_a_time("search.n_jobs", settings.n_jobs, [] if base.reason else [base.config], command.config)
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
        search = Search(new_jobs(folder), settings.n_trials, most, config.cluster, is_new=True)
    except ValueError:
        shutil.rmtree(folder)
        raise
    try:
        return search.run()
    except ValueError:
        # Slurm refuses the first trial, and so would all others. Whatever else is wrong, what there is stays.
        if search.slurm is not None and not any(folder.glob(f"*/{JOB_ID}")):
            import optuna

            optuna.delete_study(study_name=search.study.study_name, storage=search.study._storage)  # its name is free
            shutil.rmtree(folder)
        raise


def resume_search(folder: Path, command: Command) -> int:
    """Go on with the search in `folder` until it has had its n_trials. Returns the exit code."""
    config, base, space = read_search(folder)
    check_scheduler(config.cluster)
    check_space(config, base, space)  # on a machine that has not what it needs, each trial would be skipped for good
    keys = keys_that_may_change(command, folder, "search", "search.n_trials", "search.n_jobs")
    now = command.config.search
    n_trials = now.n_trials if "search.n_trials" in keys else config.search.n_trials
    n_jobs = now.n_jobs if "search.n_jobs" in keys else config.search.n_jobs
    point = trial_point(base, [], 0)
    most = jobs_at_a_time("search.n_jobs", n_jobs, [] if point.reason else [point.config], config)
    jobs = read_jobs(folder)
    jobs.status = "running"
    return Search(jobs, n_trials, most, command.config.cluster, is_new=False).run()


class Search(Runner):
    """Asks for a trial when there is room for it, tells how it ended. Trial number and job id are the same."""

    needed_at_end = ("src.engine.sweep.search_page",)

    def __init__(self, jobs: Jobs, n_trials: int, most: int | None, command: ClusterConfig, *, is_new: bool) -> None:
        """`most`: trials at a time; None: as many as there are devices for. `command`: this one's `cluster`, for its code."""
        self.config, self.base, self.space = read_search(jobs.folder)
        super().__init__(jobs, most, SlurmQueue(command) if self.config.cluster.scheduler == "slurm" else None)
        self.study = open_study(jobs.folder, self.config, is_new)
        self.n_trials = n_trials
        self.failed = 0  # since this start
        told = {trial.number: trial.user_attrs for trial in self.study.get_trials() if trial.state.is_finished()}
        for job in jobs.jobs:  # killed before it could write jobs.json, the study knows more
            if job.status in UNFINISHED and job.id in told:
                job.status, job.reason = told[job.id]["status"], told[job.id]["reason"]
        begun = sum(job.status not in UNFINISHED or bool(job.overrides) for job in jobs.jobs)
        del jobs.jobs[max(begun, n_trials) :]
        for number in range(len(jobs.jobs), n_trials):
            jobs.jobs.append(Job(number, f"trial {number}", str(number), []))
        self._to_come = [job for job in jobs.jobs if job.status in UNFINISHED]
        for job in self._to_come:
            if job.status == "running" and self.slurm is None:  # whose queue knows more than a trial's folder
                read_end(job, jobs.folder / job.folder)
            if job.status in UNFINISHED:
                job.wait_again()
        self._next: Job | None = None  # asked for, and not started yet
        self._trials: dict[int, optuna.Trial] = {}  # asked for, and not told yet

    def waiting(self) -> list[Job]:
        """The next trial, asked for only when another may start, so that it knows how the earlier ones have ended."""
        if self._next is None and not self._packing.is_full and not self._has_failed_too_often():
            self._next = self._ask()
        return [] if self._next is None else [self._next]

    def watch(self, job: Job) -> Follower:
        self._next = None
        path = self.jobs.folder / job.folder / "metrics.jsonl"
        return Follower(self._trials[job.id], path, self.config.optimized_metric)

    def ended(self, job: Job) -> None:
        self._tell(job, self._trials.pop(job.id))
        super().ended(job)

    def _ask(self) -> Job | None:
        """The next trial to run, frozen; None: there are no more. Tells of those that cannot run, or have ended already."""
        while self._to_come:
            job = self._to_come.pop(0)
            trial = ask(self.study, self.config.search, self.space, job.id, self.most)
            self._trials[job.id] = trial
            if not (job.overrides and (self.jobs.folder / job.folder / "config.yaml").exists()):  # else half-done
                self._freeze(job, trial)
            if job.status == "waiting":
                return job
            self.ended(job)
        return None

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
        """Tell the study how a trial has ended. An interrupted one is not told: it goes on when the search does."""
        from optuna.trial import TrialState

        value = read_result(self.jobs.folder / job.folder).objective if job.status == "done" else None
        if job.status == "done" and (value is None or not math.isfinite(value)):
            job.status, job.reason = "not_finite", f"{self.config.optimized_metric} is {value}"
        trial.set_user_attr("status", job.status)
        trial.set_user_attr("reason", job.reason)
        self.failed += job.status in FAILED
        if job.status == "done":
            self.study.tell(trial, value)
        elif job.status != "interrupted":
            self.study.tell(trial, state=TrialState.PRUNED if job.status == "pruned" else TrialState.FAIL)

    def _has_failed_too_often(self) -> bool:
        """True if so many have failed that no more are to be tried; says so once."""
        limit = self.config.search.max_failure_rate
        if self.failed <= limit * self.n_trials:
            return False
        if self._to_come:
            print(
                f"{self.failed} of {self.n_trials} trials have failed, more than search.max_failure_rate={limit:g} allows",
                file=sys.stderr,
            )
        self._to_come.clear()
        return True

    def _close(self) -> int:
        """Page, last lines, exit code: 0 when any trial has a value."""
        from src.engine.sweep.search_page import write_search_page

        print(f"search       {self.jobs.counts()}")
        has_value = any(job.status == "done" for job in self.jobs.jobs)
        if has_value:
            job = self.jobs.jobs[self.study.best_trial.number]
            print(
                f"best         {self.config.optimized_metric} {self.study.best_value:.4f} in trial {job.id}: {job.name}"
            )
            print(f"again        {shlex.join(['python', 'train.py', *job.overrides])}")
        print(f"page         {write_search_page(self.jobs, self.study, self.config)}")
        if self.stopped_by is not None:
            return self._say_stopped(self.stopped_by)
        return 0 if has_value and self.jobs.status == "done" else 1
