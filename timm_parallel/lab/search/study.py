"""Calls of Optuna in a search: open the study, choose the next trial, report a running trial's
values.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from timm_parallel.keys import Config, SearchConfig
from timm_parallel.lab.search.space import Dimension
from timm_parallel.machine.secrets import hide
from timm_parallel.record.result import read_metrics

if TYPE_CHECKING:  # slow to import
    import optuna


def open_study(folder: Path, config: Config, is_new: bool) -> optuna.Study:
    """Create the study of a new search, or load that of a resumed one. Raises ValueError if that is
    not possible.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = config.search
    name, url = (
        hide(str(settings.study_name)),
        settings.storage or f"sqlite:///{(folder / 'study.db').resolve()}",
    )
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if settings.pruner == "median":
        pruner = optuna.pruners.MedianPruner(settings.n_startup_trials, settings.n_warmup_steps)
    try:
        if not is_new:
            return optuna.load_study(study_name=name, storage=url, pruner=pruner)
        direction = optuna.study.StudyDirection[str(settings.direction).upper()]
        return optuna.create_study(study_name=name, storage=url, pruner=pruner, direction=direction)
    except optuna.exceptions.DuplicatedStudyError:
        reason = (
            "search.storage has such a study; choose another name, or continue it with "
            "sweep.resume=<sweep folder>"
        )
        raise ValueError(f"search.study_name={name}: {reason}") from None
    except Exception as error:  # of any database driver; the URL may contain a password
        reason = (
            f"cannot open study {name} ({type(error).__name__}); check the URL, and that its "
            "database runs"
        )
        raise ValueError(f"search.storage: {reason}") from error


def ask(
    study: optuna.Study,
    settings: SearchConfig,
    space: list[Dimension],
    number: int,
    max_jobs: int | None,
) -> optuna.Trial:
    """Return trial `number` with a value for each searched key: a new trial, or one that a stopped
    search has begun.
    """
    from optuna.trial import Trial

    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    study.sampler = _sampler(settings, number, max_jobs)
    trial = (
        Trial(study, begun[0]._trial_id)
        if begun and not begun[0].state.is_finished()
        else study.ask()
    )
    if trial.number != number:
        fix = "the study has trials of another search; choose another name"
        raise ValueError(f"search.study_name={study.study_name}: {fix}")
    for dimension in space:
        trial._suggest(dimension.name, dimension.distribution())  # a begun trial keeps its values
    return trial


def _sampler(
    settings: SearchConfig, number: int, max_jobs: int | None
) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    # The number of the trial is a part of the seed, so that the same values are drawn after a
    # resume.
    assert settings.seed is not None
    seed = (settings.seed + number) % 2**32
    if settings.sampler == "random":
        return samplers.RandomSampler(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is experimental since version 2.8
        # Running trials count as bad ones, else concurrent trials would try nearly the same values.
        return samplers.TPESampler(seed=seed, constant_liar=max_jobs != 1)


class Follower:
    """Reports a running trial's logged metrics to the study; each call returns the reason to prune
    it, or "".
    """

    def __init__(self, trial: optuna.Trial, path: Path, metric: str) -> None:
        self.trial, self.path, self.metric = trial, path, metric
        # A resumed trial is not pruned before its next evaluation, because a trial whose ranks
        # never start writes no result.
        self._size = self._file_size()
        self._reported = 0

    def _file_size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else -1

    def __call__(self) -> str:
        """Report new values to the study. Return the reason to prune the trial,
        or an empty text.
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
        # Trials are compared at their n-th evaluation, because the steps of their evaluations may
        # differ.
        for number, value in enumerate(values[self._reported :], start=self._reported + 1):
            self._reported = number
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a resumed trial reports its first values again
                self.trial.report(value, step=number)
            if self.trial.should_prune():
                return (
                    f"{self.metric} {value:.4f} after {number} evaluations is worse than the "
                    "median of earlier trials"
                )
        return ""
