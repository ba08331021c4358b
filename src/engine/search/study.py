"""Optuna's part of a search: opens the study, chooses the next trial, and reports a running trial's values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.machine.secrets import hide
from src.engine.record.result import read_metrics
from src.engine.search.space import Dimension
from src.schema import Config, SearchConfig

if TYPE_CHECKING:  # slow to import
    import optuna


def open_study(folder: Path, config: Config, is_new: bool) -> optuna.Study:
    """Create or load a search's study. Raises ValueError if a new one exists already, or an earlier one is missing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = config.search
    name, url = hide(str(settings.study_name)), settings.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if settings.pruner == "median":
        pruner = optuna.pruners.MedianPruner(settings.n_startup_trials, settings.n_warmup_steps)
    try:
        if not is_new:
            return optuna.load_study(study_name=name, storage=url, pruner=pruner)
        direction = optuna.study.StudyDirection[str(settings.direction).upper()]
        return optuna.create_study(study_name=name, storage=url, pruner=pruner, direction=direction)
    except optuna.exceptions.DuplicatedStudyError:
        reason = "exists in the storage; choose another name, or continue with sweep.resume=<its sweep folder>"
        raise ValueError(f"search.study_name={name}: {reason}") from None
    except Exception as error:  # of any database driver; the URL may contain a password
        raise ValueError(f"search.storage: no study {name} can be opened ({type(error).__name__})") from error


def ask(
    study: optuna.Study, settings: SearchConfig, space: list[Dimension], number: int, max_jobs: int | None
) -> optuna.Trial:
    """Return trial `number`, new or begun before the search was stopped. Seed and number determine its random draws."""
    from optuna.trial import Trial

    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    study.sampler = _sampler(settings, number, max_jobs)
    trial = Trial(study, begun[0]._trial_id) if begun and not begun[0].state.is_finished() else study.ask()
    if trial.number != number:
        raise ValueError(f"search.study_name={study.study_name}: has trials of another search; choose another name")
    for dimension in space:
        trial._suggest(dimension.name, dimension.distribution())  # a begun trial keeps its values
    return trial


def _sampler(settings: SearchConfig, number: int, max_jobs: int | None) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    assert settings.seed is not None
    seed = (settings.seed + number) % 2**32
    if settings.sampler == "random":
        return samplers.RandomSampler(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is experimental since version 2.8
        # Running trials count as bad ones, else concurrent trials would try nearly the same values.
        return samplers.TPESampler(seed=seed, constant_liar=max_jobs != 1)


class Follower:
    """Reports a running trial's logged metrics to the study; each call returns the reason to prune it, or ""."""

    def __init__(self, trial: optuna.Trial, path: Path, metric: str) -> None:
        self.trial, self.path, self.metric = trial, path, metric
        # A resumed trial is judged after its next evaluation: pruned before its ranks start, it would leave no result.
        self._size = self._file_size()
        self._reported = 0

    def _file_size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else -1

    def __call__(self) -> str:
        """Return the reason to prune the trial, or an empty text. Compares n-th values, because steps may differ."""
        size = self._file_size()
        if size == self._size:
            return ""
        self._size = size
        values = [line[self.metric] for line in read_metrics(self.path) if line.get(self.metric) is not None]
        for number, value in enumerate(values[self._reported :], start=self._reported + 1):
            self._reported = number
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a resumed trial reports its first values again
                self.trial.report(value, step=number)
            if self.trial.should_prune():
                return (
                    f"{self.metric} {value:.4f} after {number} evaluations is worse than the median of earlier trials"
                )
        return ""
