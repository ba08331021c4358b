"""Headline result of a report: a sentence, and the command that trains the recommended
configuration.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from timm_parallel.keys import TrainConfig
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import Contrast

if TYPE_CHECKING:
    from timm_parallel.lab.analysis.groups import Group
    from timm_parallel.lab.analysis.settings import SettingGroup


TUNE = "experiment=tune"


@dataclass(frozen=True)
class Recommendation:
    """Headline result of a group of configurations. Recommends none if the measurements are
    inconclusive.
    """

    group: Group | SettingGroup
    sentence: str
    command: str = ""
    point: str | None = None  # label of the recommended configuration
    contrast: Contrast | None = None
    value: float | None = (
        None  # of the headline metric, corrected for the choice; None on a page about speed
    )
    value_interval: tuple[float, float] | None = None  # of 95 %
    difference: float | None = None  # of `contrast`, corrected for the choice
    notes: tuple[str, ...] = ()  # what a reader must know to rely on the sentence, a sentence each


def command(run: RunRecord) -> str:
    """Return the `python train.py …` command with the settings of this run, but without the step
    limit of a benchmark.
    """
    full: dict[str, object] = {}
    if run.is_benchmark:
        # The benchmark also chose the epochs, which it did not reach.
        full = {"train.max_steps": "null", "train.epochs": TrainConfig.epochs}
        full["train.evaluate_every"] = TrainConfig.evaluate_every
    arguments = ["--config-path", str(run.folder), "--config-name", "config"]
    if run.overrides:
        given = {override.lstrip("+~").partition("=")[0]: override for override in run.overrides}
        dropped = ("hydra.", "hydra/", "sweep.")
        kept = [
            key
            for key in given
            if not key.startswith(dropped) and key not in ("debug", "print_config", *full)
        ]
        if given.get("experiment") == TUNE:
            # Nothing in that file is for a real training.
            kept.remove("experiment")
            full = {}
        arguments = [given[key] for key in kept]
    return shlex.join(
        ["python", "train.py", *arguments, *(f"{key}={value}" for key, value in full.items())]
    )


def disturbed_sentence(runs: Sequence[RunRecord]) -> str:
    """Return the sentence that a report has no verdict,
    because most of its `runs` were disturbed.
    """
    disturbed = [run for run in runs if run.flags]
    [(reason, _)] = Counter(flag for run in disturbed for flag in run.flags).most_common(1)
    return (
        f"No verdict: {len(disturbed)} of {len(runs)} runs were disturbed ({reason}). "
        "The figures below are what was measured; run the sweep again on a quiet machine."
    )
