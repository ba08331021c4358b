"""Evaluation by itself: a run's checkpoint, or a model with weights from timm or a file; exact at any world size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.parallel.forward import AUTOCAST
from src.run.build import build_evaluation
from src.schema import ResolvedConfig
from src.training import checkpoint
from src.training.determinism import use_deterministic_algorithms
from src.training.metrics import evaluate

if TYPE_CHECKING:
    from torch.distributed import Store

PREPARATION = ("mean", "std", "crop_pct", "interpolation")  # keys of data, of evaluation images


def evaluate_config(
    config: ResolvedConfig, folder: Path | None, split: str, which: str | None, ranks: Ranks, store: Store | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (split, numbers) for `split` (val, test or all), of the raw weights and of the averaged ones where there are.

    With `folder` the weights are those of that run's checkpoint: `which` is best, last or a file; None: the one that
    result.json names. Without, they are the model's own.
    """
    if config.train.deterministic:
        use_deterministic_algorithms()
    with ExitStack() as on_close:
        strategy = build_strategy(config.parallel, ranks, store)
        on_close.callback(strategy.close)
        path: Path | None = None
        contents: dict[str, Any] = {}
        if folder is not None:
            path, contents = checkpoint.load_from_run(folder, which)
            _prepare_as_trained(config, contents)
        images, _, model, loaders = build_evaluation(config, strategy)
        for loader in loaders.values():
            on_close.callback(loader.close)
        if folder is None:
            _check_head(config, model, len(images.class_names))
        elif contents.get("classes", images.class_names) != images.class_names:
            raise ValueError(
                f"data: its {len(images.class_names)} classes are not the {len(contents['classes'])} that {folder} was "
                "trained on"
            )
        if split not in ("all", *loaders):
            raise ValueError(f"split={split}: this data has no such split; it has {', '.join(loaders)}")
        chosen = list(loaders) if split == "all" else [split]
        for weights, name in itertools.product(("model", "ema") if contents.get("ema") else ("model",), chosen):
            if contents:
                checkpoint.fill(model, contents, weights)
            found = evaluate(
                strategy.for_evaluation(model, AUTOCAST[config.train.precision]),
                loaders[name],
                strategy=strategy,
                num_samples=len(loaders[name].reader.split),
                num_classes=len(images.class_names),
                unreadable=loaders[name].unreadable,
            )
            assert found is not None  # nobody asked it to stop
            of = {"checkpoint": str(path), "weights": weights} if contents else {"model": config.model.name}
            yield name, {**of, "world_size": strategy.measured_world_size(), **found.numbers(), **found.details()}


def _prepare_as_trained(config: ResolvedConfig, contents: dict[str, Any]) -> None:
    """Other images go through what the model was trained to see, unless the command says otherwise."""
    for key in PREPARATION:
        if getattr(config.data, key) is None and key in contents.get("preprocessing", {}):
            value = contents["preprocessing"][key]
            setattr(config.data, key, list(value) if isinstance(value, tuple) else value)


def _check_head(config: ResolvedConfig, model: nn.Module, classes: int) -> None:
    """timm gives a head of another size fresh weights: its answers would be noise."""
    own = getattr(model, "pretrained_cfg", {}).get("num_classes")
    if config.model.weights is None and own != classes:
        raise ValueError(
            f"model.name={config.model.name}: its weights are for {own} classes, the data has {classes}; "
            "train it on the data first, and give run=<run folder>"
        )
