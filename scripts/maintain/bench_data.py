"""How fast image files become training batches: our loader, timm's, and what one core can do at most.

    python scripts/maintain/bench_data.py make <folder>     # 500x375 JPEG files that decode like photographs
    python scripts/maintain/bench_data.py measure <folder>  # all with 1 and 2 workers, an epoch each, in turns

Prints JSON: of each round, images per second. A first round, which starts the workers, is not told.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

SIZE, BATCH = 224, 32
LINKS = 2  # names of each file: an epoch's start and end, where the workers have nothing to do, weigh little


def make(folder: Path, count: int = 480) -> None:
    """Noise of several scales, so that a file has the bytes of a photograph (about 60 kB at quality 85)."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 2)):
        for index in range(number):
            path = folder / split / f"class_{index % 2}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = np.zeros((375, 500, 3))
            for scale, weight in ((64, 0.5), (16, 0.3), (4, 0.2)):
                coarse = draw.integers(0, 256, (375 // scale + 2, 500 // scale + 2, 3), dtype=np.uint8)
                picture += weight * np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC))
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path, quality=85)
            for link in range(1, LINKS):
                path.with_stem(f"{index}_{link}").hardlink_to(path)


Epoch = Callable[[], Iterator[int]]  # the sizes of its batches


def ours(folder: Path, workers: int) -> Epoch:
    loader = _our_loader(folder, workers)
    return lambda: (len(labels) for _, labels in loader.epoch(0))


def core(folder: Path) -> Epoch:
    """Decode and transform alone, in this process: no batches sent, none normalised."""
    loader = _our_loader(folder, 0)

    def epoch() -> Iterator[int]:
        loader.requests.start_at(0, 0)
        for request in loader.requests:
            yield len(loader.reader.read(request)[1])

    return epoch


def _our_loader(folder: Path, workers: int) -> Any:
    import torch

    from src.data.augment import Preprocessing, train_transform
    from src.data.datasets import build_images
    from src.data.feed import DeviceFeed
    from src.data.loader import Reader, TrainLoader
    from src.data.sampling import TrainRequests
    from src.schema import AugmentConfig, DataConfig

    split = build_images(DataConfig(name="folder", root=str(folder))).train
    transform = train_transform(AugmentConfig(scale=[0.08, 1.0], hflip=0.5), SIZE, True)
    preprocessing = Preprocessing((3, SIZE, SIZE), (0.5,) * 3, (0.5,) * 3, 0.875, "center", "bilinear")
    reader = Reader(split, 2, transform, 0, substitutes=len(split))
    feed = DeviceFeed(torch.device("cpu"), preprocessing, channels_last=False)
    return TrainLoader(reader, TrainRequests(len(split), BATCH, 0, 1, 0), feed, workers)


def timm(folder: Path, workers: int) -> Epoch:
    loader = timms_loader(folder, workers, BATCH, persistent_workers=True)
    return lambda: (len(labels) for _, labels in loader)


def timms_loader(folder: Path, workers: int, batch_size: int, **options: Any) -> Any:
    """timm's own loader as its train.py makes it: its transform, uint8 batches, normalised after the workers."""
    import torch
    from timm.data import create_dataset, create_loader

    return create_loader(
        create_dataset("", root=str(folder), split="train", is_training=True),
        input_size=(3, SIZE, SIZE),
        batch_size=batch_size,
        is_training=True,
        hflip=0.5,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=workers,
        device=torch.device("cpu"),
        **options,
    )


def measure(folder: Path, rounds: int) -> list[dict[str, float]]:
    import torch

    from src.engine.machine.process import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as a run on a CPU does
    epochs = {"core": core(folder)}
    for workers in (1, 2):
        epochs |= {f"ours x{workers}": ours(folder, workers), f"timm x{workers}": timm(folder, workers)}
    found = []
    for _ in range(rounds + 1):
        found.append({name: rate(epoch) for name, epoch in epochs.items()})
    return found[1:]


def rate(epoch: Epoch) -> float:
    began = time.perf_counter()
    count = sum(epoch())
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder)
    else:
        print(json.dumps(measure(given.folder, given.rounds)))


if __name__ == "__main__":
    main()
