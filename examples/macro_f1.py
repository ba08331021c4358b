"""Classification with macro F1, from the confusion matrix.

    cp examples/macro_f1.py src/tasks/
    python train.py train.task=src.tasks.macro_f1.MacroF1

`headline` makes it the metric that chooses the best checkpoint.
"""

from typing import Any

from src.tasks.classification import Classification, confusion
from timm_parallel import Metric


def f1_of_confusion(counts: Any, samples: int) -> float:
    """Average 2 TP / (2 TP + FP + FN) over the classes that occur, as labels or as predictions."""
    # TP + FP, and TP + FN.
    shown = counts.sum(0) + counts.sum(1)
    return float((2 * counts.diag().double() / shown)[shown > 0].mean())


class MacroF1(Classification):
    metrics = {
        **Classification.metrics,
        "f1": Metric(confusion, f1_of_confusion, is_proportion=True),
    }
    headline = "f1"
