"""Task of the small project with two networks, an optimizer for each, and an average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from small.task import Position, squared_errors
from timm_parallel import Batch


class Critic(nn.Module):
    """Guess the error of a position, and count the samples of all steps."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, scores: Tensor) -> Tensor:
        return self.layer(scores)  # type: ignore[no-any-return]


class Pair(Position):
    """The model learns positions that please the critic and stay close to those of its average. The
    critic learns the errors of the model. Predictions are those of the average.
    """

    phases = {"model": ("model",), "critic": ("critic",)}
    averages = {"slow": ("model", 0.9)}
    # Number of samples of this rank in the current step.
    samples = 0

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "critic": Critic(self.num_outputs)}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        images = batch.image + 0.1 * batch.normal(*batch.image.shape[1:])
        scores = networks.model(images)
        errors, guesses = squared_errors(scores, batch.target), networks.critic(scores)[:, 0]
        if phase == "critic":
            self.samples += len(batch)
            return (guesses - errors).square(), {"guess": guesses.detach()}
        with torch.no_grad():
            slow = networks.slow(images)
        return errors + 0.1 * guesses + squared_errors(scores, slow), {}

    def after_step(self, networks: Any, ranks: Any) -> None:
        networks.critic.seen += ranks.sum(torch.full_like(networks.critic.seen, self.samples))
        self.samples = 0

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        return networks.slow(batch.image)  # type: ignore[no-any-return]
