"""Config classes of the small project, and the rules about several keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import timm_parallel
from timm_parallel import key, option_problems

# Keys that the training function of this project does not read, with their only allowed values.
FIXED = {
    "model.pretrained": False,
    "model.weights": None,
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
class OptimConfig(timm_parallel.OptimConfig):
    """Config group `optim`, with keys for each phase of a task."""

    of: dict[str, dict[str, Any]] = key({}, help="Keys of `optim` that differ in a phase.")

    def of_phase(self, phase: str) -> OptimConfig:
        """Return the keys of a phase: these ones, changed by optim.of.<phase>."""
        return dataclasses.replace(self, of={}, **self.of.get(phase, {}))


@dataclass
class Config(timm_parallel.Config):
    """All config keys of the small project."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


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
    for phase, changed in config.optim.of.items():
        yield from option_problems(f"optim.of.{phase}", OptimConfig, changed)
