"""Damaged images end the run with their name, or are skipped and counted (data.on_error)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.template.runs import losses_of, resolved, train_run
from timm_parallel.data.loader import BatchFetcher, Loader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.data.samplers import EvalSampler, IndexBatch
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.task import Targets
from timm_parallel.testing.configs import plain
from timm_parallel.testing.ranks import in_ranks


def image_folder(root: Path) -> Path:
    """Write 24 training and 10 validation images of two classes, of which 6 are truncated."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 90, (16, 16, 3), dtype=np.uint8)
                pixels[..., label] += 120
                path = root / split / name / f"{number:02}.{'png' if number % 2 else 'jpg'}"
                Image.fromarray(pixels).save(path)
                if number in ((3, 4) if split == "train" else (4,)):
                    path.write_bytes(path.read_bytes()[:80])
    return root


SETTINGS = (
    "data=folder",
    "data.image_size=16",
    "data.batch_size=8",
    "train.epochs=1",
    "train.log_every=1",
    "optim=sgd",
    "optim.lr=0.01",
    "parallel.accelerator=cpu",
    "data.on_error=skip",
)


def train(ranks: Ranks, store: Any, root: str, folder: str, overrides: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    # Fork loader workers, as a rank of train.py does.
    multiprocessing.set_start_method("fork", force=True)
    config = resolved(*SETTINGS, f"data.root={root}", *overrides)
    train_run(config, Path(folder), ranks, store)


@pytest.mark.slow(seconds=4)
def test_data_on_error_skip_counts_unreadable_images_equally_under_single_dp_and_ddp(
    tmp_path: Path,
) -> None:
    root = image_folder(tmp_path / "images")
    spreads = {
        "dp": ("parallel=dp", "parallel.devices=2", "data.workers=0"),
        "ddp": ("parallel=ddp", "parallel.devices=2", "data.workers=1"),
    }
    seen = {}
    for name, overrides in spreads.items():
        (tmp_path / name).mkdir()
        in_ranks(train, 2 if name == "ddp" else 1, str(root), str(tmp_path / name), overrides)
        result = read_result(tmp_path / name)
        seen[name] = losses_of(tmp_path / name)
        assert result.skipped == {"train": 4, "val": 2}, name
        assert result.val["samples"] == 8, name
        assert result.samples_seen == 24
    assert np.allclose(seen["dp"], seen["ddp"], atol=1e-5)


class Damaged:
    """Split of numbered images with labels, in which the given indices raise an error."""

    def __init__(self, size: int, damaged: Iterable[int], error: type[Exception]) -> None:
        self.size, self.damaged, self.error = size, set(damaged), error

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.damaged:
            raise self.error(f"image {index}")
        return torch.full((1, 2, 2), index % 256, dtype=torch.uint8), 10 * index


def test_unreadable_image_is_replaced_in_training_and_dropped_in_evaluation(tmp_path: Path) -> None:
    split = Damaged(6, [1, 4, 5], UnreadableImageError)
    training, evaluation = (
        BatchFetcher(split, Targets(), None, 0, "skip", substitutes) for substitutes in (6, 0)
    )
    fields, read, unreadable, _ = training.read(IndexBatch(0, np.arange(6)))
    assert fields["target"].tolist() == [0, 20, 20, 30, 0, 0]
    assert read.indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(set(unreadable)) == [1, 4, 5]
    fields, read, unreadable, _ = evaluation.read(IndexBatch(0, np.arange(6)))
    assert fields["target"].tolist() == [0, 20, 30] and len(fields["image"]) == 3
    assert read.indices.tolist() == [0, 2, 3] and unreadable == [1, 4, 5]
    _, read, unreadable, _ = evaluation.read(IndexBatch(0, np.array([4, 5])))
    assert len(read.indices) == 0 and unreadable == [4, 5]


def test_data_on_error_skip_tries_a_skipped_image_again_in_the_next_epoch() -> None:
    """An image may be unreadable for a short time, for example while a network disk is
    unavailable.
    """

    split = Damaged(3, [1], UnreadableImageError)
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(1), channels_last=False)
    loader = Loader(
        BatchFetcher(split, Targets(), None, 0, "skip"), EvalSampler(3, 2, 0, 1), prefetcher, 0
    )
    for is_available, read, unreadable in ((False, 2, {1}), (True, 3, set())):
        split.damaged = set() if is_available else {1}
        assert sum(len(batch) for batch in loader) == read
        assert loader.unreadable == unreadable


def test_data_on_error_skip_raises_after_100_unreadable_images_in_a_row() -> None:
    split = Damaged(1000, range(1000), UnreadableImageError)
    with pytest.raises(ValueError, match=r"data\.on_error=skip: 100 "):
        BatchFetcher(split, Targets(), None, 0, "skip", 1000).read(IndexBatch(0, np.array([7])))


def test_data_on_error_skip_does_not_catch_errors_other_than_unreadable_images() -> None:
    split = Damaged(3, range(3), ValueError)
    with pytest.raises(ValueError, match="image 0"):
        BatchFetcher(split, Targets(), None, 0, "skip", 3).read(IndexBatch(0, np.array([0])))
