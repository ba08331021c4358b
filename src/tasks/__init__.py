"""Tasks: what is learned, one file each.

To add one, put a class next to these that extends Task (timm_parallel/task.py) and give
`train.task=src.tasks.<module>.<Class>`. Its module imports torch in functions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from timm_parallel.machine.process import import_name
from timm_parallel.metric import Metric
from timm_parallel.task import Task

TASKS = {
    "classification": "src.tasks.classification.Classification",
    "multilabel": "src.tasks.multilabel.Multilabel",
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
            if not (isinstance(task, type) and issubclass(task, Task)) or task is Task:
                continue
            for name, metric in task.metrics.items():
                known = metrics.setdefault(name, metric)
                if known.shown_as != metric.shown_as:
                    raise ValueError(
                        f"{task.__name__}: the metric {name} is another one in another task; "
                        "give it another name"
                    )
    return metrics
