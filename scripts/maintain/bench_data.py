"""JPEG files for benchmarks, and timm's loader of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_loader

from scripts.maintain.bench_speed import Workload
from timm_parallel.machine import hardware


def make(folder: Path, count: int, links: int) -> None:
    """Write JPEG files of random noise on several scales. Each is as large as a photograph: about
    60 kB at quality 85. `links`: number of names of each file.
    """
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


def timms_loader(workload: Workload, folder: Path, device: torch.device) -> Any:
    """Create timm's loader as timm's train.py does. Its workers transform images and return uint8
    batches, which are normalized afterwards.
    """
    workers = hardware.cores()
    return create_loader(
        create_dataset("", root=str(folder), split="train", is_training=True),
        input_size=(3, workload.pixels, workload.pixels),
        batch_size=workload.batch,
        is_training=True,
        hflip=0.5,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=workers,
        device=device,
        persistent_workers=workers > 0,
    )
