"""A training loop that logs the largest entry of a gradient, as train/largest_gradient.

    cp examples/watched.py src/train/
    python train.py train.loop=src.train.watched.train

`train.loop` names this function; the library does the rest of a run around it.
"""

import torch

from timm_parallel import Training


def train(training: Training) -> None:
    model = training.parts.state.model
    for step in training.steps():
        for batch in step.batches():
            step.backward(batch)
        own = {}
        # Reading a number waits for the device, so do it at logged steps only.
        if step.is_logged:
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            largest = torch.stack([each.abs().max() for each in gradients]).max()
            own["train/largest_gradient"] = float(largest)
        training.log({**step.update(), **own})
