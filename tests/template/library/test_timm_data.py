"""Datasets with timm's names, read from disk or refused with a fix."""

from __future__ import annotations

import io
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from src.data.transforms import OnImage, train_transform
from src.schema import ResolvedConfig
from src.train.build import build_data_and_model
from tests.template.runs import parts_of, resolved
from timm_parallel.app import as_resolved
from timm_parallel.data import timm_datasets
from timm_parallel.data.build import build_dataset, check_data
from timm_parallel.data.samplers import IndexBatch
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import Config
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.testing.ranks import in_ranks

CLASSES = ("cat", "dog")


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def config_of(name: str, root: Path, *overrides: str) -> Config:
    return resolved(
        "data=timm", f"data.name={name}", f"data.root={root}", "data.batch_size=4", *overrides
    )


def values_and_labels(split: Any) -> list[tuple[int, int]]:
    """Return (red value, label) of every sample, where the label is the value modulo 2."""
    return [(int(image[0, 0, 0]), label) for image, label in (split[n] for n in range(len(split)))]


def write_mnist(root: Path, count: int) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = np.arange(count, dtype=np.uint8).repeat(28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes()
        )
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, count) + labels.tobytes()
        )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("data.name=torch/mnist",), r"^data\.root=null: .*data\.kwargs\.download=true"),
        (("data=timm", "data.name=torch/kmnist"), r"^data\.root=null: "),
        (("data=timm", "data.name=torch/cifar100", "data.root=gone"), r"^data\.root=/.*gone: "),
        (("data=timm", "data.name=hfds/some/images"), r"^data\.name=hfds/some/images: .*datasets"),
    ],
)
def test_dataset_of_timm_is_refused_before_the_start_when_folder_or_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=named):
        check_data(resolved(*words))


def test_torchvision_dataset_on_disk_is_read_without_a_download(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.name=torch/mnist: .*download=true.*$"):
        build_dataset(config_of("torch/mnist", tmp_path).data)
    # A download needs no existing folder.
    check_data(config_of("torch/mnist", tmp_path / "new", "+data.kwargs.download=true"))
    write_mnist(tmp_path, 24)
    images = build_dataset(config_of("torch/mnist", tmp_path).data)
    assert (images.in_chans, len(images.target_names), len(images.train)) == (1, 10, 24)
    image, label = images.train[7]
    assert (image.shape, image.dtype, int(image[0, 3, 3]), label) == (
        (1, 28, 28),
        torch.uint8,
        7,
        7,
    )


def test_batch_gathered_from_a_torchvision_array_equals_the_images_read_one_by_one(
    tmp_path: Path,
) -> None:
    write_mnist(tmp_path, 24)
    augment = (
        "data.augment.crop_padding=2",
        "data.augment.hflip=0.5",
        "data.limit_train=20",
        "data.crop_pct=1.0",
    )
    batches = []
    for side in (28, 32):
        config = config_of(
            "torch/mnist", tmp_path, f"data.image_size={side}", *augment, "parallel.accelerator=cpu"
        )
        resolved = cast(ResolvedConfig, as_resolved(config))
        run = parts_of(resolved)
        loaders = (run.train_loader, *run.eval_loaders.values())
        assert {loader.fetcher.gathers for loader in loaders} == {side == 28}
        assert {loader.num_workers == 0 for loader in loaders} == {side == 28}
        fetcher, request = run.train_loader.fetcher, IndexBatch(0, np.arange(6))
        if side == 28:
            fields, _, _, draws = fetcher.read(request)
            batches.append(fetcher.finish(fields, draws, lambda pixels: pixels))
            each = train_transform(resolved.data.augment, (side, side), resize=True)
            fetcher.transform = OnImage.of(each)
            fetcher.gathers, fetcher.on_pixels = False, None
            batches.append(fetcher.read(request)[0])
        for loader in loaders:
            loader.close()
    gathered, single = batches
    assert list(gathered) == list(single) == ["image", "target"]
    assert all(torch.equal(gathered[name], single[name]) for name in gathered)


def read_in_rank(ranks: Ranks, store: Any, root: str) -> tuple[int, int, int]:
    """Build the dataset with a fake download; return downloads, size and last label."""
    downloads = []

    def download(dataset: torchvision.datasets.MNIST) -> None:
        if not dataset._check_exists():
            downloads.append(dataset.root)
            # Wait during the fake download. Without a lock, the other rank would now start a
            # download, or read incomplete files.
            time.sleep(1)
            write_mnist(Path(root), 24)

    torchvision.datasets.MNIST.download = download  # type: ignore[method-assign]
    config = config_of(
        "torch/mnist",
        Path(root),
        "+data.kwargs.download=true",
        "parallel=ddp",
        "parallel.devices=2",
    )
    resolved = cast(ResolvedConfig, as_resolved(config))
    strategy = build_strategy(resolved, ranks, store)
    split = build_data_and_model(resolved, strategy).dataset.train
    strategy.group.close()
    return len(downloads), len(split), split[23][1]


@pytest.mark.slow(seconds=2)
def test_only_one_ddp_rank_downloads_a_torchvision_dataset_that_is_not_on_disk(
    tmp_path: Path,
) -> None:
    outcomes = in_ranks(read_in_rank, 2, str(tmp_path), timeout=120)
    assert sorted(downloads for downloads, _, _ in outcomes) == [0, 1]
    assert [outcome[1:] for outcome in outcomes] == [(24, 3)] * 2


def test_hugging_face_dataset_is_read_from_local_files(tmp_path: Path) -> None:
    """Class names must come from the file. The library decodes the images itself, so that the
    error on a damaged image has the number of the image.
    """
    hub = pytest.importorskip("datasets", reason="needs the package datasets")
    features = hub.Features({"picture": hub.Image(), "kind": hub.ClassLabel(names=list(CLASSES))})
    for split, count in (("train", 6), ("validation", 3)):
        pictures = [
            {"bytes": png(n) if (split, n) != ("validation", 2) else b"cut", "path": None}
            for n in range(count)
        ]
        table = hub.Dataset.from_dict(
            {"picture": pictures, "kind": [n % 2 for n in range(count)]}, features=features
        )
        table.to_parquet(tmp_path / "here" / f"{split}-00000-of-00001.parquet")
    columns = ("+data.kwargs.input_key=picture", "+data.kwargs.target_key=kind")
    images = build_dataset(
        config_of(f"hfds/{tmp_path / 'here'}", tmp_path / "cache", *columns).data
    )
    assert images.target_names == list(CLASSES)
    assert values_and_labels(images.train) == [(n, n % 2) for n in range(6)]
    assert [images.val[n][1] for n in range(2)] == [0, 1]
    with pytest.raises(UnreadableImageError, match="image 2 of validation"):
        images.val[2]


def test_hugging_face_dataset_is_read_and_described_through_the_reader_of_timm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reader:
        class_to_idx: ClassVar = {"dog": 1, "cat": 0}
        split = "train"

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
            stream = io.BytesIO()
            Image.fromarray(np.array([[0, 2047 * index]], np.uint16)).save(stream, "PNG")
            return io.BytesIO(stream.getvalue()), index

    reader = SimpleNamespace(reader=Reader())
    monkeypatch.setattr(timm_datasets, "create_dataset", lambda *given, **options: reader)
    config = config_of("hfds/some/images", tmp_path, "data.max_value=2047")
    dataset = build_dataset(config.data)
    assert dataset.target_names == list(CLASSES)
    image, label = dataset.train[1]
    assert (image[:, 0].tolist(), label) == ([[0, 255]] * 3, 1)
    (note,) = dataset.notes("label")
    assert "from 0 to 2047" in note and "data.max_value" in note


@pytest.mark.parametrize(("overrides", "white"), [((), 7), (("data.max_value=2047",), 255)])
def test_notes_have_the_range_of_deep_pixels_that_max_value_scales(
    tmp_path: Path, overrides: tuple[str, ...], white: int
) -> None:
    for name in CLASSES:
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            image = Image.fromarray(np.array([[0, 2047]], np.uint16))
            image.save(tmp_path / split / name / "0.png")
    config = resolved("data=folder", f"data.root={tmp_path}", *overrides)
    dataset = build_dataset(config.data)
    assert dataset.train[0][0][0].tolist() == [[0, white]]
    (note,) = dataset.notes("label")
    assert "0 to 2047" in note and "data.max_value" in note
