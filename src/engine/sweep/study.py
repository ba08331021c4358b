"""Optuna's side of a search: the study in its database, its next trial, and what a running trial reports to it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.record.result import read_metrics
from src.engine.sweep.space import Dimension
from src.schema import Config, SearchConfig

if TYPE_CHECKING:  # its import takes a while, and only a search needs it
    import optuna


def open_study(folder: Path, config: Config, is_new: bool) -> optuna.Study:
    """The study of a search, from its storage. A new one is refused where the storage has a study of that name."""
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


def ask(
    study: optuna.Study, settings: SearchConfig, space: list[Dimension], number: int, most: int | None
) -> optuna.Trial:
    """The trial of this number: one begun before the search was stopped, or a new one.

    A trial's draws are a function of the seed and its number, so a resumed search does not repeat its first draws.
    `most`: trials at a time, None for as many as there are devices for.
    """
    from optuna.trial import Trial

    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.number == number]
    study.sampler = _sampler(settings, number, most)
    trial = Trial(study, begun[0]._trial_id) if begun and not begun[0].state.is_finished() else study.ask()
    if trial.number != number:
        raise ValueError(
            f"search.study_name={study.study_name}: the study has trials of another search; start a new one"
        )
    for dimension in space:
        trial._suggest(dimension.name, dimension.distribution())  # what it has a value for already, it keeps
    return trial


def _sampler(settings: SearchConfig, number: int, most: int | None) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    assert settings.seed is not None
    seed = (settings.seed + number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental: constant_liar, since version 2.8
        if settings.sampler == "tpe":
            # Trials under way count as bad ones, else trials side by side would try nearly the same values.
            return samplers.TPESampler(seed=seed, constant_liar=most != 1)
        return samplers.RandomSampler(seed)


class Follower:
    """Reports to the study what a running trial logs, and says when the trial should be pruned."""

    def __init__(self, trial: optuna.Trial, path: Path, metric: str) -> None:
        self.trial, self.path, self.metric = trial, path, metric
        self._size = -1  # of the file when it was last read
        self._reported = 0

    def __call__(self) -> str:
        """Why the trial should stop now; empty if it should not.

        The n-th value is compared with the n-th of other trials: their steps may differ (another batch size).
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
