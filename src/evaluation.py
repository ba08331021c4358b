"""A finished run evaluated again, on one device, from its frozen config and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.build import AUTOCAST, build_evaluation
from src.config.compose import read_frozen
from src.config.resolve import global_batch, resolve
from src.config.schema import ParallelConfig
from src.launch.ranks import Ranks
from src.parallel import build_strategy
from src.records import read_result
from src.training import checkpoint
from src.training.metrics import evaluate


def evaluate_run(folder: Path, split: str, weights: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (split, numbers) for `split` (val, test or all).

    Errors: ValueError for a folder that is no run folder, or whose checkpoint is damaged or of another model.
    """
    config = read_frozen(folder)
    config.data.batch_size, config.data.batch_size_per_device = global_batch(config), None
    config.parallel, config.model.sync_bn = ParallelConfig(strategy="single"), False
    config = resolve(config)
    strategy = build_strategy(config.parallel, Ranks(), None)
    images, model, loaders = build_evaluation(config, strategy)
    path = _weights(folder, weights)
    checkpoint.restore_weights(model, checkpoint.load(path, strategy.device))
    chosen = list(loaders) if split == "all" else [split]
    for name in chosen:
        if name not in loaders:
            raise ValueError(f"split={name}: this data has no such split; it has {', '.join(loaders)}")
        found = evaluate(
            model,
            loaders[name],
            strategy=strategy,
            num_samples=len(loaders[name].reader.split),
            num_classes=len(images.class_names),
            autocast=AUTOCAST[config.train.precision],
            unreadable=loaders[name].unreadable,
        )
        assert found is not None  # nobody asked it to stop
        yield name, {"checkpoint": str(path), **found.numbers()}


def _weights(folder: Path, wanted: str | None) -> Path:
    if wanted in ("best", "last"):
        return folder / "checkpoints" / f"{wanted}.pt"
    if wanted is not None:
        return Path(wanted)
    try:
        named = read_result(folder).checkpoint
    except ValueError:
        named = None
    if named is not None:
        return folder / named
    newest = checkpoint.newest(folder)
    if newest is None:
        raise ValueError(f"run={folder}: it has no checkpoint")
    return newest
