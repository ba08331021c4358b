"""Train each named model twice for two steps with train.deterministic=true. Print for each model,
as a line of JSON, if its weights are equal.

python scripts/maintain/gpu_steps.py resnet50 convnext_tiny
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Set this variable before CUDA starts, because cuBLAS needs it for deterministic results.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.maintain.gpu_profile import prepare
from src.train.loop import run_steps
from timm_parallel.parallel.build import use_deterministic_algorithms

STEPS = 2


def trained(name: str) -> list[torch.Tensor]:
    """Train a timm model for two steps on random images, and return its weights."""
    torch.manual_seed(0)
    _, run = prepare(
        *(
            "parallel.accelerator=cuda",
            "model=resnet18",
            f"model.name={name}",
            "data.image_size=224",
        ),
        *(
            "data.batch_size=8",
            f"data.kwargs.num_samples={8 * STEPS}",
            "train.epochs=1",
            "train.deterministic=true",
        ),
        *("train.precision=bf16", "optim.warmup_epochs=0"),
    )
    batches = run.train_loader.epoch(0)
    for _ in run_steps(run, batches):
        pass
    return [parameter.detach().cpu() for parameter in run.state.model.parameters()]


def verdict(name: str) -> str:
    """Train a model twice, and return `equal` or `different` for its weights. Return the error
    message if an operation has no deterministic kernel.
    """
    try:
        first, second = trained(name), trained(name)
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return "equal" if all(map(torch.equal, first, second)) else "different"


if __name__ == "__main__":
    use_deterministic_algorithms()
    for model in sys.argv[1:]:
        print(json.dumps({"model": model, "verdict": verdict(model)}), flush=True)
