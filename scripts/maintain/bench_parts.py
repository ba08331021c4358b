"""Evaluation and saving, each against the least that does the same, in one process and in turns.

    python scripts/maintain/bench_parts.py evaluation   # images per second, ours over those of a loop under inference_mode
    python scripts/maintain/bench_parts.py checkpoint   # seconds to save a ResNet-50, and of a training step of it

Prints JSON: a list of the rounds' figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

import torch

from src.engine.config.compose import compose_command
from src.engine.config.resolve import resolve
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.parallel.single import Single
from src.run.build import Run
from src.schema import ResolvedConfig
from src.training import checkpoint
from src.training.metrics import evaluate

Figures = dict[str, float]


def prepare(*words: str) -> tuple[ResolvedConfig, Single, Run]:
    from hydra._internal.utils import get_args_parser

    machine = ("parallel=single", "parallel.accelerator=cpu", "parallel.threads_per_device=1", "data=synthetic")
    config = resolve(compose_command(get_args_parser().parse_args([*machine, *words])).config)
    strategy = build_strategy(config.parallel, Ranks(), None)
    return config, strategy, Run(config, strategy)


def seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def evaluation(rounds: int) -> list[Figures]:
    _, strategy, run = prepare("data.kwargs.num_samples=8192", "data.batch_size=64")
    model, loader = run.state.model, run.evaluation["val"]
    split = run.images.val

    def ours() -> object:
        return evaluate(
            strategy.for_evaluation(model, None),
            loader,
            strategy=strategy,
            num_samples=len(split),
            num_classes=run.num_classes,
        )

    @torch.inference_mode()
    def by_hand() -> float:
        right, loss = 0, torch.zeros(())
        for images, labels in zip(split.images.split(64), split.labels.split(64), strict=True):  # type: ignore[attr-defined]
            scores = model.eval()(images.sub(127.5).div_(127.5))
            loss += torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
            right += int((scores.argmax(1) == labels).sum())
        return right / len(split) + float(loss)

    ours(), by_hand()
    return [{"ours_s": seconds(ours), "by_hand_s": seconds(by_hand)} for _ in range(rounds)]


def saving(rounds: int) -> list[Figures]:
    _, strategy, run = prepare("model.name=resnet50", "data.kwargs.num_samples=256", "data.batch_size=32")
    state, batches = run.state, run.train.epoch(0)

    def step() -> None:
        state.wrapped(*next(batches)).backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)

    with tempfile.TemporaryDirectory(prefix="bench_") as folder:

        def save(number: int) -> None:
            contents = checkpoint.snapshot(state, strategy, run.images.class_names, run.preprocessing, {})
            checkpoint.save(Path(folder), contents, number, keep=1, is_best=False)

        step()
        save(0)
        return [{"step_s": seconds(step), "save_s": seconds(partial(save, n))} for n in range(1, rounds + 1)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["evaluation", "checkpoint"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps((evaluation if given.what == "evaluation" else saving)(given.rounds)))
