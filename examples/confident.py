"""Classification that logs how sure the model is, as train/confidence.

    cp examples/confident.py src/tasks/
    python train.py train.task=src.tasks.confident.Confident

`train_numbers` of a task returns numbers of a training batch, [B] or a mean.
"""

from torch import Tensor

from src.tasks.classification import Classification


class Confident(Classification):
    def train_numbers(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        confidence = scores.softmax(1).amax(1)
        return {**super().train_numbers(scores, targets), "confidence": confidence}
