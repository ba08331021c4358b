"""A finished run evaluated again, on one device, from its frozen config and its checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.engine.config.compose import read_frozen
from src.engine.config.resolve import resolve
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.parallel.forward import AUTOCAST
from src.run.build import build_evaluation
from src.schema import Config, ParallelConfig
from src.training import checkpoint
from src.training.checkpoint import find_checkpoint
from src.training.determinism import use_deterministic_algorithms
from src.training.metrics import evaluate


def evaluate_run(folder: Path, split: str, wanted: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (split, numbers) for `split` (val, test or all), of the raw weights and of the averaged ones where there are.

    `wanted` is the checkpoint: best, last or a file; None: what result.json names.

    Errors: ValueError for a folder that is no run folder, or whose checkpoint is damaged or of another model.
    """
    frozen = read_frozen(folder)
    config = Config(**vars(frozen))
    config.data.batch_size, config.data.batch_size_per_device = frozen.global_batch, None
    config.parallel, config.model.sync_bn = ParallelConfig(strategy="single"), False
    config.model.pretrained, config.model.weights = False, None
    resolved = resolve(config)
    if resolved.train.deterministic:
        use_deterministic_algorithms()
    strategy = build_strategy(resolved.parallel, Ranks(), None)
    images, _, model, loaders = build_evaluation(resolved, strategy)
    path = find_checkpoint(folder, wanted)
    contents = checkpoint.load(path)
    chosen = list(loaders) if split == "all" else [split]
    for weights, name in itertools.product(("model", "ema") if contents.get("ema") else ("model",), chosen):
        if name not in loaders:
            raise ValueError(f"split={name}: this data has no such split; it has {', '.join(loaders)}")
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
        yield name, {"checkpoint": str(path), "weights": weights, **found.numbers(), **found.details()}
