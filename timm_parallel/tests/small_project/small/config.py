"""Config classes of the small project, and the rules about several keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import timm_parallel
from timm_parallel import key

# Keys that the training function of this project does not read, with their only allowed values.
FIXED = {
    "model.pretrained": False,
    "model.weights": None,
    "train.loss": "",
}


@dataclass
class ModelConfig(timm_parallel.ModelConfig):
    """Config group `model`, with the width of the model."""

    width: int = key(6, ge=1, help="Number of channels.")


@dataclass
class DataConfig(timm_parallel.DataConfig):
    """Config group `data`, with the noise of the images."""

    noise: float = key(0.2, ge=0, le=1, help="Brightness of the noise, as a share of the spot's.")


@dataclass
class Config(timm_parallel.Config):
    """All config keys of the small project."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass
class ResolvedConfig(Config, timm_parallel.ResolvedConfig):
    """All config keys of the small project, after each `auto` was replaced by a value."""

    parallel: timm_parallel.ResolvedParallel = field(default_factory=timm_parallel.ResolvedParallel)
    train: timm_parallel.ResolvedTrain = field(default_factory=timm_parallel.ResolvedTrain)


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each key that this project does not support."""
    for name, allowed in FIXED.items():
        if (value := attrgetter(name)(config)) != allowed:
            yield f"{name}={value}: not supported by this project; use {name}={allowed}"
