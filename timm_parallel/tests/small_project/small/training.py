"""Parts of a run of the small project, and its training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from small.config import ResolvedConfig
from small.data import MEAN, SIDE, STD
from timm_parallel import (
    Learning,
    Strategy,
    Task,
    Training,
    build_eval_loaders,
    build_parts,
    find_task,
    import_class,
    is_own_class,
    load_dataset,
)

# Each rank reads its tiny images itself, without loader workers.
WORKERS = 0


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalization of the images, which a checkpoint stores."""

    # Channels, height and width.
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def train(training: Training) -> None:
    """Take all steps of a run. All ranks must call this function."""
    for step in training.steps():
        training.log(step.train())


def build(config: ResolvedConfig, strategy: Strategy) -> Any:
    """Build data, model and optimizer of a run on this rank. All ranks must call this function."""
    dataset, device = load_dataset(config), strategy.device
    task = find_task(config.train.task, Task)(config, dataset.target_names)
    model_class = import_class("model.name", config.model.name, nn.Module)
    model = model_class(task.num_outputs, config.model.width, **config.model.kwargs).to(device)
    preprocessing = Preprocessing((dataset.in_chans, SIDE, SIDE), MEAN, STD)
    eval_loaders = build_eval_loaders(
        {"val": (dataset.val, None)},
        task,
        strategy,
        preprocessing,
        batch_size=config.global_batch,
        workers=WORKERS,
    )

    def learning(phase: str, networks: dict[str, nn.Module], steps_per_epoch: int) -> Learning:
        optim, trained = config.optim.of_phase(phase), nn.ModuleDict(networks)
        if is_own_class(optim.opt):
            own_class = import_class("optim.opt", optim.opt, Optimizer)
            optimizer = own_class(trained.parameters(), lr=optim.lr)  # type: ignore[call-arg]
        else:
            optimizer = create_optimizer_v2(trained, opt=optim.opt, lr=optim.lr)
        # The schedule ends with train.epochs and does not depend on train.max_steps, so that a run
        # that max_steps has stopped can continue.
        total = config.train.epochs * steps_per_epoch
        return Learning(optimizer, CosineLRScheduler(optimizer, t_initial=total, t_in_epochs=False))

    return build_parts(
        config,
        strategy,
        dataset,
        task,
        model,
        preprocessing,
        eval_loaders,
        image_size=(SIDE, SIDE),
        learning=learning,
        workers=WORKERS,
    )
