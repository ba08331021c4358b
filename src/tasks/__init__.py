"""Tasks: each file defines targets, losses, metrics and augmentation of one task, such as
classification.

To add a task, write a class in this folder that extends ImageTask (images.py), and set
`train.task=src.tasks.<module>.<Class>`.
"""

from __future__ import annotations

from collections.abc import Iterator

from src.schema import Config, TrainConfig
from src.tasks.images import ImageTask, LossTask
from timm_parallel import find_task, is_own_class


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each key of the groups train and data that does not fit train.task
    or train.loss.
    """
    train, data, task = config.train, config.data, find_task(config.train.task, ImageTask)
    if not issubclass(task, LossTask):
        if train.loss != TrainConfig().loss:
            yield (
                f"train.loss={train.loss}: train.task={train.task} defines its loss itself; leave "
                "it out"
            )
    elif train.loss not in task.known_losses and not is_own_class(train.loss):
        yield (
            f"train.loss={train.loss}: not a loss of train.task={train.task}; use "
            f"{', '.join(task.known_losses)}, or a class of your own"
        )
    for phase in config.optim.of:
        if phase not in task.phases:
            yield (
                f"optim.of.{phase}: train.task={train.task} has no such phase; it has "
                f"{', '.join(task.phases)}"
            )
    weights = train.class_weights
    is_list = isinstance(weights, list) and all(
        isinstance(w, int | float) and w >= 0 for w in weights
    )
    if weights not in (None, "auto") and not is_list:
        yield f"train.class_weights={weights}: expected auto, or a number >= 0 for each class"
    if weights is not None and data.balance:
        yield (
            f"data.balance={data.balance}: train.class_weights={weights} corrects for rare "
            "classes too; use one of the two"
        )
    named = {"checkpoint.metric": config.checkpoint.metric, "optimized_metric": config.objective}
    for key, metric in named.items():
        if metric.endswith("_ema") and config.model.ema.decay is None:
            yield f"{key}={metric}: needs averaged weights; set model.ema.decay, e.g. 0.9998"
    # Ignore smoothing if mixup or cutmix is on, because these smooth the targets for every loss.
    smoothing = 0 if data.augment.mixes else train.smoothing
    reads = task.find_loss(train.loss).reads if issubclass(task, LossTask) else ()
    options = {
        "train.smoothing": ("smoothing", smoothing),
        "train.class_weights": ("class_weights", train.class_weights),
        "data.augment.mixup": ("mixup", data.augment.mixup),
        "data.augment.cutmix": ("mixup", data.augment.cutmix),
        "data.augment.cutmix_minmax": ("mixup", data.augment.cutmix_minmax),
        "data.augment.reprob": ("erasing", data.augment.reprob),
        "data.augment.aa": ("auto_augment", data.augment.aa),
        "data.balance": ("balance", data.balance),
    }
    for option, (name, value) in options.items():
        if not value:
            continue
        if name not in task.applies:
            yield f"{option}={value}: does not apply to train.task={train.task}; leave it out"
        elif name in ("smoothing", "class_weights", "mixup") and name not in reads:
            yield (
                f"{option}={value}: train.loss={train.loss} does not read it; leave it "
                f"out, or add {name} to `reads` of the loss"
            )
