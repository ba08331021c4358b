"""Train each named model twice for two steps with train.deterministic=true, and print a line of
JSON per model.

python scripts/maintain/gpu_steps.py resnet50 convnext_tiny
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# cuBLAS reads it when CUDA starts.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
# Python adds the folder of a script, not the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.maintain.gpu_profile import prepare
from src.train.loop import run_steps
from timm_parallel.parallel.build import use_deterministic_algorithms

STEPS = 2


def trained(name: str) -> list[torch.Tensor]:
    """Return the weights of a model after STEPS steps on random images."""
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
    """Return `equal`, `different` or the error of an operation that has no deterministic kernel."""
    try:
        first, second = trained(name), trained(name)
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return "equal" if all(map(torch.equal, first, second)) else "different"


if __name__ == "__main__":
    use_deterministic_algorithms()
    for model in sys.argv[1:]:
        print(json.dumps({"model": model, "verdict": verdict(model)}), flush=True)
