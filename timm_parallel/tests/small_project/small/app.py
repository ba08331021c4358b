"""App object of a small project, which tests use to check that the library works without this
template. A real project describes itself to the library in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from timm_parallel import keys
from timm_parallel.app import App
from timm_parallel.keys import key
from timm_parallel.metric import Metric


@dataclass
class LineConfig(keys.DataConfig):
    """Config section data of the small project, whose samples are points on a line."""

    slope: float = key(3.0, gt=0, help="Slope of the line.")


@dataclass
class Config(keys.Config):
    """All config keys of the small project."""

    data: LineConfig = field(default_factory=LineConfig)


@dataclass
class ResolvedConfig(Config, keys.ResolvedConfig):
    """All config keys of the small project after values such as `auto` have been replaced."""

    parallel: keys.ResolvedParallel = field(default_factory=keys.ResolvedParallel)
    train: keys.ResolvedTrain = field(default_factory=keys.ResolvedTrain)


app = App(
    name="small.app:app",
    root=Path(__file__).resolve().parents[1],
    config=Config,
    resolved=ResolvedConfig,
    run="small.fit.fit",
    rules="small.checks.rules",
    check_data="small.checks.check_data",
    check_batch="small.checks.check_batch",
    training_size="small.checks.training_size",
    strategies={
        "one": "small.strategies.One",
        "each": "small.strategies.Each",
    },
    metrics={"loss": Metric(lower_is_better=True)},
    preload=("small.fit",),
    trial=("train.max_steps=2",),
)
