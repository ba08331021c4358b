"""Tasks: what is learned, one file each.

To add one, put a class next to these that extends Task (timm_parallel/task.py) and give
`train.task=src.tasks.<module>.<Class>`. Its module imports torch in functions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from src.schema import DATASETS, TIMM, Config
from timm_parallel.class_source import class_attributes, is_own_class
from timm_parallel.config.suggest import hint
from timm_parallel.config.validate import option_problems, own_class_problems
from timm_parallel.machine.process import import_name
from timm_parallel.metric import Metric
from timm_parallel.task import Task

TASKS = {
    "classification": "src.tasks.classification.Classification",
    "multilabel": "src.tasks.multilabel.Multilabel",
    "regression": "src.tasks.regression.Regression",
    "segmentation": "src.tasks.segmentation.Segmentation",
}


def find_task(name: str) -> type[Task[Any]]:
    """Return the class of a value of `train.task`. Raises ValueError for another class."""
    task = import_name(TASKS.get(name, name))
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"train.task={name}: expected a class that extends Task")
    return task


def build_task(config: Any, names: Sequence[str]) -> Task[Any]:
    """Build the task of a config. `names`: of the outputs, from the dataset."""
    return find_task(config.train.task)(config, names)


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
    """Yield an error for each key that does not fit train.task."""
    train, data = config.train, config.data
    if train.task not in TASKS:
        if not is_own_class(train.task, "tasks"):
            yield (
                f"train.task={train.task}: unknown{hint(train.task, TASKS)}, or give "
                "src.tasks.<module>.<Class>"
            )
            return
        yield from own_class_problems("train.task", train.task)
    task, weights = find_task(train.task), train.class_weights
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
    yield from option_problems("train.task_kwargs", task.Options, train.task_kwargs)
    if not is_own_class(train.loss) and train.loss not in task.losses:
        yield (
            f"train.loss={train.loss}: not a loss of train.task={train.task}"
            f"{hint(train.loss, task.losses)}; it has {', '.join(task.losses)}"
        )
    metrics = {
        "checkpoint.metric": config.checkpoint.metric,
        "optimized_metric": config.objective,
    }
    for setting, metric in metrics.items():
        if metric.endswith("_ema") and config.model.ema.decay is None:
            yield (f"{setting}={metric}: needs averaged weights; set model.ema.decay, e.g. 0.9998")
        name = metric.removeprefix("val/").removesuffix("_best").removesuffix("_ema")
        if metric.startswith("val/") and name not in task.metrics:
            known = ", ".join(f"val/{name}" for name in task.metrics)
            yield (
                f"{setting}={metric}: not a metric of train.task={train.task}; use one of {known}"
            )
    # Mixed targets are smoothed whatever the loss reads.
    smoothing = 0 if data.augment.mixes else train.smoothing
    reads = loss_reads(task, train.loss)
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
    kinds = target_kinds(data.name)
    if kinds is not None and task.target not in (*kinds, "none"):
        able = [name for name in DATASETS if task.target in (target_kinds(name) or ())]
        yield (
            f"train.task={train.task}: its targets are of the kind {task.target}, but "
            f"data={data.name} gives {' or '.join(kinds)}; use "
            f"{' or '.join(f'data={name}' for name in able) or 'a dataset of your own'}"
        )


def loss_reads(task: Any, name: str) -> tuple[str, ...]:
    """Return the options that a loss of a task, or your own class, reads: smoothing, mixup,
    class_weights.
    """
    if name in task.losses:
        return tuple(task.losses[name].reads)
    return tuple(class_attributes(name).get("reads", ()))


def target_kinds(dataset: str) -> tuple[str, ...] | None:
    """Return the kinds of targets that a dataset gives; None for a class that does not tell."""
    dotted = DATASETS.get(dataset.partition("/")[0], dataset if is_own_class(dataset) else TIMM)
    kinds = class_attributes(dotted).get("targets")
    return None if is_own_class(dataset) and kinds is None else tuple(kinds or ("label",))
