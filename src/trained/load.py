"""A trained model out of a run folder: the frozen config makes it, a checkpoint fills it. Its data are not needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from src.data.augment import Preprocessing
from src.engine.config.compose import read_frozen
from src.models.build import build_model
from src.schema import ResolvedConfig
from src.training import checkpoint


@dataclass
class Trained:
    """What `load_trained` found."""

    model: nn.Module  # in evaluation mode
    config: ResolvedConfig
    preprocessing: Preprocessing
    class_names: list[str]
    checkpoint: Path
    weights: str  # model or ema


def load_trained(folder: Path, which: str | None, weights: str | None, device: torch.device) -> Trained:
    """The model that a run has trained.

    `which` checkpoint: best, last or a file; None: the one that result.json names. `weights`: model or ema; None: those
    that checkpoint.metric judged.
    """
    config = read_frozen(folder)
    path, contents = checkpoint.load_from_run(folder, which)
    if "preprocessing" not in contents:
        raise ValueError(f"{path}: does not say how its images are prepared; it is of an older version of this project")
    preprocessing = Preprocessing(**contents["preprocessing"])
    weights = weights or ("ema" if config.checkpoint.metric.endswith("_ema") else "model")
    size = config.data.image_size
    if size is None and config.data.eval_image_size is None:
        size = preprocessing.input_size[-1]  # the data's own, else the model's
    fresh = replace(config.model, pretrained=False, weights=None, grad_checkpointing=False, sync_bn=False)
    model = build_model(fresh, len(contents["classes"]), preprocessing.input_size[0], size, device)
    checkpoint.fill(model, contents, weights)
    return Trained(model.eval(), config, preprocessing, contents["classes"], path, weights)
