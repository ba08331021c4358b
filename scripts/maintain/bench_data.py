"""Measure the speed at which image files become training batches: with our loader, with timm's, and
with one core that only decodes and transforms.

    python scripts/maintain/bench_data.py make <folder>     # 500x375 JPEG files, like photographs
    python scripts/maintain/bench_data.py measure <folder>  # all with 1 and 2 workers, in turns

The script prints images per second of each round as JSON. It omits the first round, in which the
workers start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZE, BATCH = 224, 32
# Number of names (hard links) of each file. More names make an epoch longer, so its start and end,
# when workers are idle, have less weight.
LINKS = 2


def make(folder: Path, count: int = 480, links: int = LINKS) -> None:
    """Write JPEG files of random noise on several scales. Each is as large as a photograph: about
    60 kB at quality 85. `links`: number of names of each file.
    """
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 2)):
        for index in range(number):
            path = folder / split / f"class_{index % 2}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = np.zeros((375, 500, 3))
            for scale, weight in ((64, 0.5), (16, 0.3), (4, 0.2)):
                coarse = draw.integers(
                    0, 256, (375 // scale + 2, 500 // scale + 2, 3), dtype=np.uint8
                )
                picture += weight * np.asarray(
                    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
                )
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path, quality=85)
            for link in range(1, links):
                path.with_stem(f"{index}_{link}").hardlink_to(path)


# Function that runs an epoch and yields the number of images of each batch.
Epoch = Callable[[], Iterator[int]]


def ours(folder: Path, workers: int) -> Epoch:
    loader = _our_loader(folder, workers)
    return lambda: (len(labels) for _, labels in loader.epoch(0))


def core(folder: Path) -> Epoch:
    """Return a function that runs an epoch on one core. It only decodes and transforms images, in
    this process, without batches and normalization.
    """
    loader = _our_loader(folder, 0)

    def epoch() -> Iterator[int]:
        loader.sampler.start_at(0, 0)
        for batch in loader.sampler:
            yield len(loader.fetcher.read(batch)[1])

    return epoch


def _our_loader(folder: Path, workers: int) -> Any:
    import torch

    from src.data.transforms import OnImage, train_transform
    from src.schema import AugmentConfig, DataConfig
    from timm_parallel.data.build import build_dataset
    from timm_parallel.data.loader import TrainLoader
    from timm_parallel.data.prefetch import DevicePrefetcher
    from timm_parallel.machine.ranks import Ranks
    from timm_parallel.parallel.group import ProcessGroup
    from timm_parallel.task import Targets

    split = build_dataset(DataConfig(name="folder", root=str(folder))).train
    augment = AugmentConfig(scale=[0.08, 1.0], hflip=0.5)
    transform = OnImage.of(train_transform(augment, (SIZE, SIZE), True))
    prefetcher = DevicePrefetcher(torch.device("cpu"), (0.5,) * 3, (0.5,) * 3, channels_last=False)
    return TrainLoader(
        split,
        Targets(),
        prefetcher,
        ProcessGroup(Ranks()),
        batch_size=BATCH,
        seed=0,
        transform=transform,
        workers=workers,
    )


def timm(folder: Path, workers: int) -> Epoch:
    loader = timms_loader(folder, workers, BATCH, persistent_workers=True)
    return lambda: (len(labels) for _, labels in loader)


def timms_loader(
    folder: Path, workers: int, batch_size: int, device: str = "cpu", **options: Any
) -> Any:
    """Create timm's loader as timm's train.py does. Its workers transform images and return uint8
    batches, which are normalized afterwards.
    """
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
        device=torch.device(device),
        **options,
    )


def measure(folder: Path, rounds: int) -> list[dict[str, float]]:
    import torch

    from timm_parallel.machine.allocator import keep_freed_memory

    torch.set_num_threads(1)
    # Set the memory allocator as a run on a CPU does, so that loading is as fast as in a run.
    keep_freed_memory()
    epochs = {"core": core(folder)}
    for workers in (1, 2):
        epochs |= {
            f"ours x{workers}": ours(folder, workers),
            f"timm x{workers}": timm(folder, workers),
        }
    measured = []
    for _ in range(rounds + 1):
        measured.append({name: rate(epoch) for name, epoch in epochs.items()})
    return measured[1:]


def rate(epoch: Epoch) -> float:
    began = time.perf_counter()
    count = sum(epoch())
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
