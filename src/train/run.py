"""The training loop of all tasks. The library builds a run with `build_run` (build.py) before this
loop, and does the rest of the run around it: limits, stop signals, evaluation, logs, checkpoints.
"""

from __future__ import annotations

from timm_parallel import Training


def train(training: Training) -> None:
    """Take all steps of a run. Between two steps, the library evaluates, logs and saves where this
    is due. All ranks call this function.

    A loop of your own (`train.loop=src.<module>.<function>`) may take a step in parts, and may log
    more numbers.
    """
    for step in training.steps():
        training.log(step.train())
