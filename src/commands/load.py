"""Load a trained model from the config and a checkpoint in a run folder. The data of the run is not
needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from src.data.transforms import Preprocessing
from src.models.build import build_model
from src.schema import ResolvedConfig
from src.tasks.images import ImageTask
from timm_parallel import (
    Networks,
    build_networks,
    find_task,
    load_config,
    load_networks,
    read_checkpoint,
)


@dataclass
class Trained:
    """A trained model with the config, task and preprocessing of its run."""

    # The trained networks of the task and their averages, in evaluation mode.
    networks: Networks
    config: ResolvedConfig
    preprocessing: Preprocessing
    task: ImageTask
    checkpoint: Path
    # The set of weights that the model has: model (raw) or ema (averaged).
    weights: str
    run: Path
    # The training step at which the checkpoint was saved.
    step: int

    @property
    def model(self) -> nn.Module:
        """The network that is exported."""
        return self.networks["model"]


def load_trained(
    folder: Path,
    which: str | None = None,
    weights: str | None = None,
    device: torch.device | None = None,
) -> Trained:
    """Load the trained model of a run folder. `which`: the checkpoint, as best, last or a file;
    None: the checkpoint that result.json names.

    `weights`: model (raw) or ema (averaged); None: the set that checkpoint.metric names. `device`:
    where the model is placed; None: on the CPU.
    """
    device = device or torch.device("cpu")
    config = load_config(folder)
    assert isinstance(config, ResolvedConfig)
    path, contents = read_checkpoint(folder, which)
    preprocessing = Preprocessing(**contents["preprocessing"])
    weights = weights or ("ema" if config.checkpoint.metric.endswith("_ema") else "model")
    size = config.data.image_size
    if size is None and config.data.eval_image_size is None:
        # Without a size in the config, use the size with which the run trained.
        size = preprocessing.input_size[1:]
    untrained = replace(
        config.model, pretrained=False, weights=None, grad_checkpointing=False, sync_bn=False
    )
    task = find_task(config.train.task, ImageTask)(config, contents["classes"])
    model = build_model(
        untrained,
        task.num_outputs,
        preprocessing.input_size[0],
        size,
        device,
    )
    # Class weights need the training labels, and only training uses them.
    config.train.class_weights = None
    networks = build_networks(task, model, device)
    load_networks(networks, contents, weights)
    step = contents["progress"]["step"]
    return Trained(networks.eval(), config, preprocessing, task, path, weights, folder, step)
