"""`data=timm`: datasets with timm's names, read from disk or refused with a fix. These tests do not download data."""

from __future__ import annotations

import gzip
import io
import struct
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from configs import resolved
from ranks import in_ranks
from src.data.datasets import build_dataset
from src.data.transforms import train_transform
from src.engine.data import tar_index as tars
from src.engine.data.dataset import train_labels
from src.engine.data.loader import BatchFetcher
from src.engine.data.samplers import IndexBatch, TrainSampler, class_balance
from src.engine.errors import UnreadableImageError
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.schema import Config, TrainConfig, as_resolved
from src.train.build import EvaluationParts, RunParts
from src.train.losses import class_weights

CLASSES = ("cat", "dog")


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, contents in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))


def folders(count: int, start: int = 0) -> dict[str, bytes]:
    return {f"{CLASSES[n % 2]}/{n}.png": png(n) for n in range(start, start + count)}


def pairs(count: int, start: int = 0) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for n in range(start, start + count):
        members |= {f"{n:06d}.png": png(n), f"{n:06d}.cls": str(n % 2).encode(), f"{n:06d}.json": b"{}"}
    return members


def config_of(name: str, root: Path, *overrides: str) -> Config:
    return resolved("data=timm", f"data.name={name}", f"data.root={root}", "data.batch_size=4", *overrides)


def values_and_labels(split: Any) -> list[tuple[int, int]]:
    """Return (red value, label) of every sample. In these data the label is the red value modulo 2."""
    return [(int(image[0, 0, 0]), label) for image, label in (split[n] for n in range(len(split)))]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ({"train.tar": 6}, {"val.tar": 3}),
        ({"train/a.tar": 4, "train/b.tar": 2}, {"validation/a.tar": 3}),
        ({"x-train-00.tar": 2, "x-train-01.tar": 4}, {"x-valid-00.tar": 3}),
    ],
)
@pytest.mark.parametrize("name", ["tar", "wds"])
def test_tar_and_webdataset_samples_are_read_with_labels_from_several_file_layouts(
    tmp_path: Path, name: str, train: dict[str, int], val: dict[str, int]
) -> None:
    members = folders if name == "tar" else pairs
    for layout in (train, val):
        start = 0
        for file, count in layout.items():
            write_tar(tmp_path / file, members(count, start))
            start += count
    images = build_dataset(config_of(name, tmp_path).data)
    assert images.class_names == (list(CLASSES) if name == "tar" else ["0", "1"])
    assert values_and_labels(images.train) == [(n, n % 2) for n in range(6)]
    assert values_and_labels(images.val) == [(n, n % 2) for n in range(3)]


def test_labels_of_tar_files_give_class_weights_and_balanced_draws(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", folders(5))
    write_tar(tmp_path / "val.tar", folders(2))
    labels = train_labels(build_dataset(config_of("tar", tmp_path).data).train, None)
    assert labels is not None
    weights = class_weights(TrainConfig(class_weights="auto"), labels, 2)["class_weight"]
    assert weights.tolist() == pytest.approx([5 / 6, 5 / 4])
    assert class_balance(labels, 1.0).tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3])


def test_train_split_pattern_selects_tar_files_and_names_a_missing_one(tmp_path: Path) -> None:
    for number in range(9, 12):
        write_tar(tmp_path / f"shard-{number:04d}.tar", pairs(2, 2 * number))
    write_tar(tmp_path / "val.tar", pairs(2))
    config = config_of("wds", tmp_path, "+data.kwargs.train_split='shard-{0009..0011}.tar'")
    assert [value for value, _ in values_and_labels(build_dataset(config.data).train)] == list(range(18, 24))
    (tmp_path / "shard-0010.tar").unlink()
    with pytest.raises(ValueError, match=r"shard-0010\.tar of .* is not there"):
        build_dataset(config.data)


@given(first=st.integers(0, 99), more=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_brace_range_in_a_split_pattern_expands_to_zero_padded_file_names(first: int, more: int) -> None:
    names = tars._expand_braces(f"a-{{{first:03d}..{first + more:03d}}}.tar")
    assert names == [f"a-{n:03d}.tar" for n in range(first, first + more + 1)]


@pytest.mark.parametrize(
    ("name", "members", "classes"),
    [
        ("tar", {"002/a.png": png(0), "010/a.png": png(1)}, ["002", "010"]),
        ("tar", {"cat/a.png": png(0), "cat/._a.png": b"", "./dog/a.png": png(1)}, ["cat", "dog"]),
        ("wds", {"./a.png": png(0), "./a.cls": b"0", "./b.png": png(1), "./b.cls": b"01"}, ["0", "1"]),
        ("wds", {"v1.0/a.png": png(0), "v1.0/a.cls": b"0", "v1.0/b.png": png(1), "v1.0/b.cls": b"1"}, ["0", "1"]),
        ("wds", {"a.png": png(0), "a.cls": b"0", "._a.png": b"", "b.x.png": png(1), "b.cls": b"1"}, ["0", "1"]),
    ],
    ids=["numbers as names", "hidden files", "tar of .", "dots in folders", "two dots"],
)
def test_tar_dataset_accepts_numeric_and_dotted_member_names_and_ignores_hidden_files(
    tmp_path: Path, name: str, members: dict[str, bytes], classes: list[str]
) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
    images = build_dataset(config_of(name, tmp_path).data)
    assert images.class_names == classes
    assert values_and_labels(images.train) == [(0, 0), (1, 1)]


def compressed(root: Path) -> None:
    write_tar(root / "plain.tar", folders(2))
    (root / "train.tar").write_bytes(gzip.compress((root / "plain.tar").read_bytes()))


def cut_off(root: Path) -> None:
    write_tar(root / "train.tar", folders(4))
    whole = (root / "train.tar").read_bytes()
    (root / "train.tar").write_bytes(whole[:700])


@pytest.mark.parametrize(
    ("name", "prepare", "reason"),
    [
        ("tar", lambda root: None, r"no tar of the split train; expected .*train\.tar"),
        ("tar", compressed, "not readable as an uncompressed tar"),
        ("tar", lambda root: (root / "train.tar").write_bytes(b"x" * 3000), "not readable as an uncompressed tar"),
        ("tar", cut_off, "not readable as an uncompressed tar|no images"),
        ("tar", lambda root: write_tar(root / "train.tar", {"readme.txt": b"hello"}), "no images in it"),
        ("wds", lambda root: write_tar(root / "train.tar", folders(2)), "has no label"),
        ("wds", lambda root: write_tar(root / "train.tar", {"a.png": png(0), "a.cls": b"cat"}), "must hold a number"),
    ],
    ids=["none", "compressed", "rubbish", "cut off", "no images", "no labels", "label is no number"],
)
def test_tar_dataset_error_names_path_and_reason_when_a_tar_is_unusable(
    tmp_path: Path, name: str, prepare: Any, reason: str
) -> None:
    prepare(tmp_path)
    write_tar(tmp_path / "val.tar", folders(2) if name == "tar" else pairs(2))
    with pytest.raises(ValueError, match=reason) as refusal:
        build_dataset(config_of(name, tmp_path).data)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("names", [("carnival-train", "carnival-test"), ("constrained-train", "constrained-val")])
def test_tar_file_is_refused_when_its_name_matches_two_splits(tmp_path: Path, names: tuple[str, str]) -> None:
    """`carnival` contains `val`, and `constrained` contains `train`."""
    for name in names:
        write_tar(tmp_path / f"{name}.tar", folders(2))
    with pytest.raises(ValueError, match=r"\.tar matches the splits train and validation; .*data\.kwargs\.train_split"):
        build_dataset(config_of("tar", tmp_path).data)
    overrides = [f"+data.kwargs.{part}_split='{name}'" for part, name in zip(("train", "val"), names, strict=True)]
    images = build_dataset(config_of("tar", tmp_path, *overrides).data)
    assert len(images.train) == len(images.val) == 2


def test_tar_dataset_is_refused_when_a_validation_class_has_no_training_images(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", {"cat/1.png": png(0), "dog/1.png": png(1)})
    write_tar(tmp_path / "val.tar", {"cow/1.png": png(0)})
    with pytest.raises(ValueError, match="'cow'"):
        build_dataset(config_of("tar", tmp_path).data)


def write_mnist(root: Path, count: int) -> None:
    """Write the raw files as torchvision unpacks them. torchvision checks only that they exist."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = np.arange(count, dtype=np.uint8).repeat(28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def test_torchvision_dataset_is_read_when_already_downloaded(tmp_path: Path) -> None:
    write_mnist(tmp_path, 24)
    images = build_dataset(config_of("torch/mnist", tmp_path).data)
    assert (images.in_chans, len(images.class_names), len(images.train)) == (1, 10, 24)
    image, label = images.train[7]
    assert (image.shape, image.dtype, int(image[0, 3, 3]), label) == ((1, 28, 28), torch.uint8, 7, 7)


def test_batches_of_a_torchvision_array_are_gathered_and_equal_its_images(tmp_path: Path) -> None:
    write_mnist(tmp_path, 24)
    augment = ("data.augment.crop_padding=2", "data.augment.hflip=0.5", "data.limit_train=20", "data.crop_pct=1.0")
    batches = []
    for side in (28, 32):
        config = config_of("torch/mnist", tmp_path, f"data.image_size={side}", *augment, "parallel.accelerator=cpu")
        run = RunParts(as_resolved(config), build_strategy(as_resolved(config).parallel, Ranks(), None))
        loaders = (run.train, *run.evaluation.values())
        assert {loader.fetcher.gathers for loader in loaders} == {side == 28}
        assert {loader.num_workers == 0 for loader in loaders} == {side == 28}
        fetcher, request = run.train.fetcher, IndexBatch(0, np.arange(6))
        if side == 28:
            images, labels, _, draws = fetcher.read(request)
            batches.append((fetcher.finish(images, draws, lambda pixels: pixels), labels))
            fetcher.transform = train_transform(run.config.data.augment, side, resize=True)
            fetcher.gathers, fetcher.on_pixels = False, None
            batches.append(fetcher.read(request)[:2])
        for loader in loaders:
            loader.close()
    assert all(torch.equal(gathered, single) for gathered, single in zip(*batches, strict=True))


def read_in_rank(ranks: Ranks, store: Any, root: str) -> tuple[int, int, int]:
    """Build the data with a download that writes local files. Return (downloads by this rank, images, last label)."""
    downloads = []

    def download(dataset: torchvision.datasets.MNIST) -> None:
        if not dataset._check_exists():
            downloads.append(dataset.root)
            # Others would start to write, or read half of the files, in this time.
            time.sleep(1)
            write_mnist(Path(root), 24)

    torchvision.datasets.MNIST.download = download  # type: ignore[method-assign]
    config = config_of("torch/mnist", Path(root), "+data.kwargs.download=true", "parallel=ddp", "parallel.devices=2")
    strategy = build_strategy(as_resolved(config).parallel, ranks, store)
    split = EvaluationParts(as_resolved(config), strategy).dataset.train
    strategy.close()
    return len(downloads), len(split), split[23][1]


@pytest.mark.processes
def test_only_one_ddp_rank_downloads_a_torchvision_dataset_that_is_not_on_disk(tmp_path: Path) -> None:
    outcomes = in_ranks(read_in_rank, 2, str(tmp_path), timeout=120)
    assert sorted(downloads for downloads, _, _ in outcomes) == [0, 1]
    assert [outcome[1:] for outcome in outcomes] == [(24, 3)] * 2


def test_hugging_face_dataset_is_read_from_local_files(tmp_path: Path) -> None:
    """Class names come from the file, and images are decoded here, so that a damaged one has an error with its number."""
    hub = pytest.importorskip("datasets", reason="needs the package datasets")
    features = hub.Features({"picture": hub.Image(), "kind": hub.ClassLabel(names=list(CLASSES))})
    for split, count in (("train", 6), ("validation", 3)):
        pictures = [
            {"bytes": png(n) if (split, n) != ("validation", 2) else b"cut", "path": None} for n in range(count)
        ]
        table = hub.Dataset.from_dict({"picture": pictures, "kind": [n % 2 for n in range(count)]}, features=features)
        table.to_parquet(tmp_path / "here" / f"{split}-00000-of-00001.parquet")
    columns = ("+data.kwargs.input_key=picture", "+data.kwargs.target_key=kind")
    images = build_dataset(config_of(f"hfds/{tmp_path / 'here'}", tmp_path / "cache", *columns).data)
    assert images.class_names == list(CLASSES)
    assert values_and_labels(images.train) == [(n, n % 2) for n in range(6)]
    assert [images.val[n][1] for n in range(2)] == [0, 1]
    with pytest.raises(UnreadableImageError, match="image 2 of validation"):
        images.val[2]


@pytest.mark.parametrize("name", ["torch/cifar10", "torch/mnist", "torch/fashion_mnist"])
def test_error_names_the_download_key_when_torchvision_data_is_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"data\.kwargs\.download=true") as refusal:
        build_dataset(config_of(name, tmp_path).data)
    assert str(refusal.value).startswith(f"data.name={name}: ") and "\n" not in str(refusal.value)


def test_hugging_face_dataset_error_has_pip_command_when_the_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    # timm imports the package in this module.
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    with pytest.raises(ValueError, match=r"data\.name=hfds/ylecun/mnist: .*pip install datasets"):
        build_dataset(config_of("hfds/ylecun/mnist", tmp_path).data)


@pytest.mark.parametrize("label", [2, -1])
def test_batch_fetcher_refuses_a_label_outside_the_number_of_classes(label: int) -> None:
    class Split:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(3, 4, 4, dtype=torch.uint8), label if index == 1 else 0

    with pytest.raises(ValueError, match=rf"labels from .*{label}.*, but 2 classes"):
        BatchFetcher(Split(), 2, None, 0).read(IndexBatch(0, np.arange(3)))


@given(
    num_images=st.integers(6, 60),
    copies=st.integers(1, 4),
    world_size=st.integers(1, 3),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_aug_repeats_puts_all_copies_of_an_image_into_one_global_batch(
    num_images: int, copies: int, world_size: int, batch: int, seed: int
) -> None:
    """An epoch has the same number of samples from fewer images. Each copy of an image has a separate index."""
    global_batch = batch * world_size * copies
    if num_images < global_batch:
        return
    shards = [TrainSampler(num_images, global_batch, rank, world_size, seed, copies) for rank in range(world_size)]
    own = [shard.shard().split(global_batch // world_size) for shard in shards]
    assert all(len(batches) == num_images // global_batch for batches in own)
    for step in zip(*own, strict=True):
        indices = torch.cat(step).tolist()
        assert len(set(indices)) == global_batch
        images = [index % num_images for index in indices]
        assert all(images.count(image) == copies for image in images)
        # As in timm's RepeatAugSampler, the copies are spread over as many ranks as there are.
        ranks = [{index % num_images for index in part.tolist()} for part in step]
        assert all(sum(image in rank for rank in ranks) == min(copies, world_size) for image in images)
    assert sorted(shards[0].global_batches(0, 1)) == sorted(index % num_images for b in own for index in b[0].tolist())
