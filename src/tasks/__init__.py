"""Tasks: what is learned, one file each.

To add one, put a class next to these that extends Task (timm_parallel/task.py) and give
`train.task=src.tasks.<module>.<Class>`. Its module imports torch in functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from src.schema import Config
from timm_parallel import Metric, Task

TASKS = {
    "classification": "src.tasks.classification.Classification",
    "multilabel": "src.tasks.multilabel.Multilabel",
    "regression": "src.tasks.regression.Regression",
    "segmentation": "src.tasks.segmentation.Segmentation",
}


def all_metrics() -> dict[str, Metric]:
    """Return the metrics of all tasks in this folder, by name.

    Raises ValueError if two tasks give a name different directions: reports and searches know a
    metric by its name.
    """
    metrics: dict[str, Metric] = {}
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        for task in vars(module).values():
            if not (isinstance(task, type) and issubclass(task, Task)) or not hasattr(
                task, "metrics"
            ):
                continue
            for name, metric in task.metrics.items():
                known = metrics.setdefault(name, metric)
                if known.shown_as != metric.shown_as:
                    raise ValueError(
                        f"{task.__name__}: the metric {name} is another one in another task; "
                        "give it another name"
                    )
    return metrics


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each key of train or data that does not fit train.task."""
    train, data, task = config.train, config.data, Task.find(config.train.task)
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
    for key, metric in config.metrics_read.items():
        if metric.endswith("_ema") and config.model.ema.decay is None:
            yield f"{key}={metric}: needs averaged weights; set model.ema.decay, e.g. 0.9998"
    # Mixed targets are smoothed whatever the loss reads.
    smoothing = 0 if data.augment.mixes else train.smoothing
    reads = task.options_of_loss(train.loss)
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
            yield f"{option}={value}: not for train.task={train.task}; leave it out"
        elif name in ("smoothing", "class_weights", "mixup") and name not in reads:
            yield (
                f"{option}={value}: train.loss={train.loss} does not read it; leave it "
                f"out, or add {name} to `reads` of the loss"
            )
