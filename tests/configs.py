"""The configs and commands of tests: small, and composed as train.py composes them; and what runs have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from src.data.augment import Preprocessing
from src.engine.config.compose import compose_command
from src.engine.config.resolve import resolve
from src.schema import ResolvedConfig

TINY = (
    "print_config=false",
    "model=tiny",
    "parallel.threads_per_device=1",
    "data.limit_train=192",
    "data.batch_size=32",
    "optim.warmup_epochs=0",
    "train.epochs=2",
)


def resolved(*overrides: str) -> ResolvedConfig:
    """The config of `python train.py <TINY> <overrides>`, ready to run here."""
    return resolve(compose_command(parse(*tiny(*overrides))).config)


def parse(*words: str) -> Any:
    """What Hydra's own parser makes of a command line."""
    from hydra._internal.utils import get_args_parser

    return get_args_parser().parse_args(list(words))


def conf(folder: Path, **files: str) -> Path:
    """A folder for --config-dir: file name (`__` for `/`) -> text."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def tiny(*overrides: str) -> list[str]:
    """TINY, in which later keys replace earlier ones."""
    chosen = {word.partition("=")[0]: word for word in (*TINY, *overrides)}
    return list(chosen.values())


def plain(channels: int, size: int, mean: float = 0.0, std: float = 1 / 255) -> Preprocessing:
    """The preprocessing of images that have their size; by default their values stay in 0..255."""
    return Preprocessing((channels, size, size), (mean,) * channels, (std,) * channels, 1.0, "center", "bilinear")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what depends on the clock or on memory; lines that then say nothing are left out."""
    timed = ("time", "train/images_per_sec", "train/images_per_sec_per_device", "train/data_wait", "seconds")
    kept = [{k: v for k, v in line.items() if k not in timed and not k.startswith("memory/")} for line in lines]
    return [line for line in kept if any("/" in key for key in line)]
