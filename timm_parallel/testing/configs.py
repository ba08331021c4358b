"""Helpers for tests that write command lines, config files and loaders, and read metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from timm_parallel.checked_configs import compose
from timm_parallel.config.resolve import resolve
from timm_parallel.data.loader import Loader, TrainLoader
from timm_parallel.keys import ResolvedConfig


def resolved(*overrides: str) -> ResolvedConfig:
    """Build the resolved config that `python train.py` would use with these overrides."""
    return resolve(compose(*overrides))


def parse(*words: str) -> Any:
    """Parse command-line arguments with Hydra's argument parser and return the result."""
    from timm_parallel.patches import hydra_parser

    return hydra_parser().parse_args(list(words))


def conf(folder: Path, **files: str) -> Path:
    """Write YAML files into a folder for the option `--config-dir`, and return the folder. `files`
    maps a file name without suffix to its YAML text. Two underscores in a name stand for a slash.
    """
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def merged(*overrides: str) -> list[str]:
    """Return the overrides without those whose key a later override sets."""
    return list({word.partition("=")[0]: word for word in overrides}.values())


def plain(channels: int, mean: float = 0.0, std: float = 1 / 255) -> dict[str, tuple[float, ...]]:
    """Return the mean and standard deviation per channel for a DevicePrefetcher, as a dictionary of
    keyword arguments. With the default values, normalization leaves pixel values in 0..255
    unchanged.
    """
    return {"mean": (mean,) * channels, "std": (std,) * channels}


def train_loader_of(*parts: Any) -> TrainLoader:
    """Build a training loader from a batch fetcher, a sampler, a device prefetcher and a number of
    worker processes.
    """
    loader = TrainLoader.__new__(TrainLoader)
    Loader.__init__(loader, *parts)
    return loader


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return logged metric lines without times, speeds and memory use, which differ between equal
    runs. Lines that have no metrics left are dropped.
    """
    timed = (
        "time",
        "train/images_per_sec",
        "train/data_wait",
        "seconds",
    )
    kept = [
        {k: v for k, v in line.items() if k not in timed and not k.startswith("memory/")}
        for line in lines
    ]
    return [line for line in kept if any("/" in key for key in line)]
