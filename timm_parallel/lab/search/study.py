"""Calls of Optuna in a hyper-parameter search: open the study, choose the values of the next trial,
and report the metrics of running trials.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from timm_parallel.keys import Config, SearchConfig
from timm_parallel.lab.search.space import Dimension
from timm_parallel.machine.secrets import hide
from timm_parallel.record.result import read_metrics

# Optuna is slow to import, so that it is only imported for type checks here.
if TYPE_CHECKING:
    import optuna


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
    trial = (
        Trial(study, begun[0]._trial_id)
        if begun and not begun[0].state.is_finished()
        else study.ask()
    )
    if trial.number != number:
        raise ValueError(
            f"search.study_name={study.study_name}: the study of this name contains trials of "
            "another search; choose another name"
        )
    for dimension in space:
        # A trial that a stopped search has begun keeps its values.
        trial._suggest(dimension.name, dimension.distribution())
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
    with warnings.catch_warnings():
        # Hide Optuna's warning that the option constant_liar is experimental.
        warnings.simplefilter("ignore")
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
            with warnings.catch_warnings():
                # Hide Optuna's warning about a step that was reported before, because a resumed
                # trial reports its first values again.
                warnings.simplefilter("ignore")
                self.trial.report(value, step=number)
            if self.trial.should_prune():
                return (
                    f"{self.metric} {value:.4f} after {number} evaluations is worse than the "
                    "median of earlier trials"
                )
        return ""
