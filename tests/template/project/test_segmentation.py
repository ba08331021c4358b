"""Segmentation: image and mask change together, and metrics are exact on any ranks."""

from __future__ import annotations

import csv
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

import evaluate as evaluate_script
from scripts import check_data as check_data_script
from scripts import predict
from src.models.build import build_model
from src.models.segmenter import Segmenter
from src.schema import (
    Config,
    DataConfig,
    ResolvedTrain,
    TrainConfig,
)
from src.tasks.images import ImageTask
from src.tasks.segmentation import (
    IGNORED,
    Segmentation,
    dice_losses,
    image_losses,
    pixel_losses,
)
from tests.template.runs import cpu_strategy, files_below, resolved, run_warm, task_of
from timm_parallel import find_task
from timm_parallel.batch import Batch
from timm_parallel.data.build import build_dataset, check_data
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import EvalLoader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.model.freeze import freeze
from timm_parallel.parallel.networks import Networks
from timm_parallel.record.result import read_result
from timm_parallel.run.evaluation import evaluate
from timm_parallel.testing.configs import plain
from timm_parallel.testing.ranks import in_ranks

SLOW = pytest.mark.slow(seconds=2)
MASKS = TrainConfig(task="segmentation")
SMALL = (
    *("experiment=segmentation", "model=segmenter", "data=shapes", "train=segmentation"),
    "model.kwargs.backbone=test_resnet",
    "+model.kwargs.width=8",
    "+data.kwargs.num_samples=24",
    "data.image_size=32",
    "data.batch_size=6",
    "data.limit_train=null",
    "data.workers=0",
    "train.log_every=1",
    "parallel.accelerator=cpu",
)


@pytest.mark.slow(seconds=1)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    flips=st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from([0.0, 1.0, 0.5])),
    padding=st.integers(0, 5),
    scale=st.sampled_from([None, [0.3, 1.0]]),
    size=st.tuples(st.integers(8, 30), st.integers(8, 30)),
)
def test_mask_still_matches_the_image_after_every_augmentation(
    seed: int,
    flips: tuple[float, float],
    padding: int,
    scale: list[float] | None,
    size: tuple[int, int],
) -> None:
    """The image is a gradient, so the value of each pixel shows where it comes from."""
    augment = {"hflip": flips[0], "vflip": flips[1], "scale": scale}
    task = task_of(250, MASKS, **augment, crop_padding=0 if scale else padding)
    transform = task.train_transform(size, True, (0.5, 0.5, 0.5))
    rows, columns = torch.arange(20)[:, None], torch.arange(20)
    mask = (6 * rows + 6 * columns).byte()
    torch.manual_seed(seed)
    image, moved = transform(mask.expand(3, 20, 20).clone(), mask)
    assert image.shape == (3, *size) and moved.shape == size
    is_inside = moved != IGNORED
    difference = (image[0].int() - moved.int()).abs()[is_inside]
    # Allow a shift of one pixel in each direction. A flip of the image alone would cause a larger
    # difference.
    assert int(difference.max()) <= sum(6 * (max(1, 20 / side) + 0.5) for side in size)
    if padding and not scale:
        assert bool((image[0][~is_inside] == 0).all())


def test_whole_training_images_are_resized_with_the_interpolation_of_the_config() -> None:
    image, mask = torch.randint(0, 256, (3, 40, 30), dtype=torch.uint8), torch.zeros(40, 30)
    for name in ("bilinear", "bicubic"):
        task = task_of(250, MASKS, interpolation=name)
        resized, _ = task.train_transform((16, 24), True, (0.5, 0.5, 0.5))(image, mask.byte())
        expected = v2.functional.resize(image, [16, 24], InterpolationMode(name))
        assert torch.equal(resized, expected), name


def task_for(size: list[int], **options: Any) -> Any:
    """Build a task of four classes that evaluates with `options`, by windows of `size`."""
    config = resolved()
    config.train = ResolvedTrain(task="segmentation", task_kwargs=options)
    config.data.image_size = size
    return find_task(config.train.task, ImageTask)(config, list("abcd"))


class Truth:
    """Images with masks. They have equal sizes, or every second image is larger."""

    def __init__(self, larger: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.samples = []
        for number in range(11):
            size = (6 + larger * (number % 2), 5 + 2 * larger * (number % 2))
            image = torch.randint(0, 256, (3, *size), generator=draw, dtype=torch.uint8)
            mask = torch.randint(0, 4, size, generator=draw, dtype=torch.uint8)
            mask[torch.rand(size, generator=draw) < 0.2] = IGNORED
            self.samples.append((image, mask))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index]


def truth() -> tuple[Tensor, Tensor]:
    images, masks = zip(*Truth(0).samples, strict=True)
    return torch.stack(images), torch.stack(masks)


def pixelwise() -> nn.Module:
    torch.manual_seed(1)
    return nn.Conv2d(3, 4, 1)


def measured(ranks: Ranks, store: Any, mode: str) -> dict[str, Any]:
    strategy = cpu_strategy("ddp", ranks.world_size, ranks, store)
    # The windows are larger than some images.
    task = task_for([8, 8], evaluation=mode)
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(3, 0.5, 0.25), channels_last=False)
    split: Any = InMemory(*truth()) if mode == "resize" else Truth(larger=3)
    batch = ranks.world_size if task.options.evaluation != "resize" else 4
    loader = EvalLoader(split, task, prefetcher, strategy.group, batch_size=batch, workers=0)
    networks = Networks({"model": pixelwise()})
    evaluation = evaluate(networks, loader, task, strategy.group, keep_rows=True)
    assert evaluation is not None
    strategy.group.close()
    return {**evaluation.numbers, **task.details(evaluation), "table": task.table(evaluation)}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("mode", ["slide", "whole", "resize"])
@pytest.mark.sample(3)
def test_segmentation_metrics_match_scikit_learn_on_1_and_3_ranks(mode: str) -> None:
    alone = measured(Ranks(), None, mode)
    labels, found = [], []
    for place, (image, mask) in enumerate(Truth(0 if mode == "resize" else 3).samples):
        with torch.no_grad():
            winners = pixelwise()((image[None] / 255 - 0.5) / 0.25).argmax(1)[0]
        labels.append(mask[mask != IGNORED].numpy())
        found.append(winners[mask != IGNORED].numpy())
        of_image = jaccard_score(labels[-1], found[-1], average=None, labels=range(4))
        row = [alone["table"][f"iou_{name}"][place] for name in "abcd"]
        assert row == pytest.approx(of_image.tolist())
    labeled, predicted = np.concatenate(labels), np.concatenate(found)
    each = jaccard_score(labeled, predicted, average=None, labels=range(4))
    assert list(alone["iou_per_class"].values()) == pytest.approx(each.tolist())
    assert alone["miou"] == pytest.approx(each.mean())
    assert alone["pixel_acc"] == pytest.approx(accuracy_score(labeled, predicted))
    for of_rank in in_ranks(measured, 3, mode):
        assert of_rank.pop("loss") == pytest.approx(alone["loss"], rel=1e-6)
        assert of_rank == {name: value for name, value in alone.items() if name != "loss"}


@pytest.mark.parametrize(
    ("size", "window", "stride"),
    [((1, 20), (5, 4), None), ((13, 7), (6, 7), 1), ((11, 12), (9, 3), 2)],
)
def test_sliding_window_scores_are_the_mean_over_windows_that_contain_a_pixel(
    size: tuple[int, int], window: tuple[int, int], stride: int | None
) -> None:
    """The model returns the mean of its window, so the score of a pixel depends on each window."""

    class OfWindow(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            assert images.shape[2:] == window
            return images.mean((1, 2, 3))[:, None, None, None].expand(-1, 4, *window)

    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(3))
    task = task_for(list(window), evaluation="slide", stride=stride)
    actual = task.predict(Networks({"model": OfWindow()}), Batch({"image": image}))
    sides = [max(side, length) for side, length in zip(size, window, strict=True)]
    whole = torch.zeros(1, 3, *sides)
    whole[..., : size[0], : size[1]] = image
    starts = []
    for side, length in zip(sides, window, strict=True):
        step = stride or length // 2
        # The last window ends at the border of the image.
        starts.append(sorted({min(start, side - length) for start in range(0, side, step)}))
    for row, column in ((0, 0), (size[0] - 1, size[1] - 1), (size[0] // 2, size[1] // 3)):
        means = [
            whole[..., top : top + window[0], left : left + window[1]].mean().item()
            for top in starts[0]
            for left in starts[1]
            if top <= row < top + window[0] and left <= column < left + window[1]
        ]
        assert actual[0, 0, row, column].item() == pytest.approx(np.mean(means), abs=1e-5)
    assert actual.shape == (1, 4, *size)


def test_evaluation_of_whole_images_pads_inputs_and_crops_outputs() -> None:
    shapes = []

    class Noted(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            shapes.append(tuple(images.shape[2:]))
            return images.repeat(1, 2, 1, 1)

    image = torch.randn(1, 3, 33, 64)
    networks = Networks({"model": Noted()})
    scores = task_for([8, 8], evaluation="whole").predict(networks, Batch({"image": image}))
    assert shapes == [(64, 64)]
    assert torch.equal(scores, image.repeat(1, 2, 1, 1)[:, :4])


def scores_of_truth() -> Tensor:
    return torch.randn(11, 4, 6, 5, generator=torch.Generator().manual_seed(2))


def test_segmentation_losses_ignore_unlabeled_pixels() -> None:
    (_, masks), scores = truth(), scores_of_truth()
    changed = scores + 9 * (masks == IGNORED)[:, None] * torch.randn(1, 4, 1, 1)
    for losses in (pixel_losses, image_losses, dice_losses):
        assert torch.allclose(losses(scores, masks), losses(changed, masks), atol=1e-6)
    one = masks[0] != IGNORED
    expected = nn.functional.cross_entropy(scores[0][:, one].T, masks[0][one].long())
    assert image_losses(scores, masks)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_segmentation_class_weights_have_mean_1_and_move_with_the_loss() -> None:
    (_, masks), scores = truth(), scores_of_truth()
    weights = torch.tensor([1.0, 2.0, 0.5, 0.5])
    losses = {
        "ce": pixel_losses(scores, masks, weights),
        "ce_dice": image_losses(scores, masks, weights) + dice_losses(scores, masks),
    }
    for loss, expected in losses.items():
        train = TrainConfig(task="segmentation", loss=loss, class_weights=[2, 4, 1, 1])
        task = task_of(4, train)
        task.prepare(None)
        criterion = task.build_criterion()
        actual = criterion(scores, masks)
        assert torch.allclose(actual, expected)
        # The library divides the losses of a step by their weight.
        if loss == "ce":
            mean = actual.sum() / task.weight(Batch({"image": scores, "target": masks}))
            theirs = nn.functional.cross_entropy(
                scores, masks.long(), weights, ignore_index=IGNORED
            )
            assert mean.item() == pytest.approx(theirs.item(), rel=1e-5)
        assert criterion.state_dict() == {}
        assert criterion.to("meta").class_weight.device.type == "meta"


def test_segmentation_losses_are_equal_with_and_without_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_, masks), scores = truth(), scores_of_truth()
    expected = pixel_losses(scores, masks, smoothing=0.1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.allclose(pixel_losses(scores, masks, smoothing=0.1), expected, rtol=1e-6)


@pytest.fixture(scope="module")
def segmenting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmenting") / "run"
    return run_warm(folder, *SMALL, "train.max_steps=1", "parallel=single")


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("test_resnet", {}),
        ("test_efficientnet", {}),
        ("test_vit", {"dynamic_img_size": True}),
        pytest.param("swin_tiny_patch4_window7_224", {"img_size": 64}, marks=SLOW),
    ],
)
def test_segmenter_trains_on_cnns_and_transformers(backbone: str, options: dict[str, Any]) -> None:
    model = Segmenter(3, 3, backbone, width=8, **options)
    model.set_grad_checkpointing(backbone != "test_efficientnet")
    outputs = model.train()(torch.randn(2, 3, 64, 64))
    assert outputs.shape == (2, 3, 64, 64)
    outputs.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_freezing_the_backbone_of_a_segmenter_leaves_the_whole_decoder_trainable() -> None:
    model = Segmenter(3, 3, "test_resnet", width=8)
    freeze(model, "backbone")
    frozen = {name.partition(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert (frozen, trained) == ({"backbone"}, {"laterals", "smooth", "head"})


def test_segmenter_refuses_unknown_or_unloadable_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no connection")

    config = resolved("experiment=segmentation", "model.pretrained=true").model
    monkeypatch.setattr("src.models.segmenter.timm.create_model", fail)
    monkeypatch.setattr("timm_parallel.model.checks.skip_unreachable_hub", lambda: None)
    with pytest.raises(ValueError, match=r"model\.pretrained=true"):
        build_model(config, 3, 3, None, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model\.kwargs\.backbone=resnet19"):
        Segmenter(3, 3, "resnet19")


OF_ROADS = (
    *("train=segmentation", "model=segmenter", "model.kwargs.backbone=test_resnet"),
    *("+model.kwargs.width=8", "data=segmentation", "data.val_fraction=0.5"),
    *("+data.kwargs.classes=[ground,box]", "data.batch_size=4", "data.image_size=[36,40]"),
    *("data.limit_train=null", "data.workers=0", "train.log_every=1"),
    "parallel.accelerator=cpu",
)


@pytest.fixture
def roads(tmp_path: Path) -> Path:
    """Write 12 images of two sizes, with a bright box that the mask shows."""
    draw = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(12):
        height, width = (40, 48) if number % 2 else (36, 36)
        pixels = draw.integers(0, 90, (height, width, 3), dtype=np.uint8)
        mask = np.zeros((height, width), np.uint8)
        pixels[8:24, 10:26], mask[8:24, 10:26] = 230, 1
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


@pytest.mark.slow(seconds=3)
def test_predicted_png_masks_have_the_iou_that_evaluate_py_writes(
    roads: Path, tmp_path: Path
) -> None:
    for kind in ("images", "masks"):
        (roads / kind / "north").mkdir()
        (roads / kind / "0.png").rename(roads / kind / "north" / "0.png")
    words = (*OF_ROADS, f"data.root={roads}", "parallel=single", "optim.lr=0.01", "train.epochs=9")
    run = run_warm(tmp_path / "run", *words, "+train.task_kwargs.evaluation=whole")
    assert read_result(run).val["iou_per_class"].keys() == {"ground", "box"}
    table, output = tmp_path / "table.csv", tmp_path / "predicted"
    by_windows = [f"run={run}", "train.task_kwargs.evaluation=slide", f"predictions={table}"]
    assert evaluate_script.main(by_windows) == 0
    of_windows = table.read_text()
    assert evaluate_script.main([f"run={run}", f"predictions={table}"]) == 0
    assert table.read_text() != of_windows
    assert predict.main([f"run={run}", f"images={roads / 'images'}", f"folder={output}"]) == 0
    with Image.open(output / "1.png") as mask:
        assert mask.mode == "P" and mask.size == (48, 40)
    # Masks are in subfolders, because images in different folders may have the same name.
    assert (output / "north" / "0.png").is_file()
    assert len(list(output.rglob("*_overlay.png"))) == 12
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name = Path(row["path"]).relative_to(roads / "images")
        labels, found = (np.array(Image.open(of / name)) for of in (roads / "masks", output))
        expected = jaccard_score(labels.ravel(), found.ravel(), average=None, labels=[0, 1])
        assert [float(row["iou_ground"]), float(row["iou_box"])] == pytest.approx(expected.tolist())


def write_photos(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * number, 90, 200)).save(path)
    return paths


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("images", "option"),
    [
        ("photos", "folder=linked"),
        ("photos/b.png", "folder=photos"),
        ("photos", "folder=truth"),
        # Two images would have one mask, and the mask of an image would be the overlay of another.
        ("alike", "folder=new"),
        ("overlaid", "folder=new"),
    ],
)
def test_predict_py_refuses_to_overwrite_an_image_or_another_file(
    segmenting_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    images: str,
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = Path("photos")
    write_photos(photos, "b.png", "c.webp", "a/b.png", "a/a/y.jpg", "a/a/b.png")
    Path("linked").symlink_to("photos")
    write_photos(Path("alike"), "x.jpg", "x.png")
    write_photos(Path("overlaid"), "v.webp", "v_overlay.jpg")
    # Masks that a person has drawn.
    write_photos(Path("truth"), "c.png")
    before = files_below(tmp_path)
    assert predict.main([f"run={segmenting_run}", f"images={images}", option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option.split("=")[0] in line
    assert files_below(tmp_path) == before


@pytest.mark.slow(seconds=1)
def test_predict_py_overwrites_no_file_of_an_earlier_prediction(
    segmenting_run: Path, tmp_path: Path
) -> None:
    write_photos(tmp_path / "photos", "x.jpg", "s/x.png")
    output = tmp_path / "predicted"
    words = [f"run={segmenting_run}", f"images={tmp_path / 'photos'}", f"folder={output}"]
    assert predict.main(words) == 0
    written = {path.relative_to(output).as_posix() for path in output.rglob("*.*")}
    assert written == {"x.png", "x_overlay.png", "s/x.png", "s/x_overlay.png"}
    (tmp_path / "photos" / "x.jpg").rename(tmp_path / "photos" / "other.jpg")
    assert predict.main(words) == 2
    assert not (output / "other.png").exists()


@pytest.mark.slow(seconds=1)
def test_task_may_change_its_outputs_in_place_when_predict_py_writes_them(
    segmenting_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(
        task: Segmentation, scores: torch.Tensor, image: Path, folder: Path, name: str
    ) -> None:
        written.append(scores.sub_(scores.amax(0)).amax().item())

    monkeypatch.setattr(Segmentation, "write", write)
    write_photos(tmp_path / "photos", "x.jpg")
    words = [f"run={segmenting_run}", f"images={tmp_path / 'photos'}", f"folder={tmp_path / 'new'}"]
    assert predict.main(words) == 0
    assert written == [0]


def config_of_roads(roads: Path, **kwargs: Any) -> DataConfig:
    kwargs = {"classes": ["ground", "box"], **kwargs}
    return DataConfig(name="segmentation", root=str(roads), val_fraction=0.3, kwargs=kwargs)


@pytest.mark.parametrize(
    ("missing", "kwargs", "named"),
    [
        ("masks", {"classes": None}, r"data\.kwargs\.classes"),
        ("masks", {"classes": ["a", False]}, r"data\.kwargs\.classes"),
        ("masks", {"classes": ["é", "e\u0301"]}, r"data\.kwargs\.classes"),
        ("masks", {}, r"for 1 file .*images/3\.png"),
        ("images", {}, r"masks/3\.png"),
    ],
)
def test_mask_dataset_is_refused_when_masks_images_or_class_names_are_missing_or_no_text(
    roads: Path, missing: str, kwargs: dict[str, Any], named: str
) -> None:
    (roads / missing / "3.png").unlink()
    with pytest.raises(ValueError, match=named):
        check_data(Config(data=config_of_roads(roads, **kwargs), train=MASKS))


@pytest.mark.parametrize("folder", ["images", "masks"])
def test_mask_dataset_is_refused_when_a_folder_is_missing(roads: Path, folder: str) -> None:
    (roads / folder).rename(roads / "other")
    with pytest.raises(ValueError, match=rf"^data\.root=.*no folder .*{folder};"):
        check_data(Config(data=config_of_roads(roads), train=MASKS))


def split_of(roads: Path, **kwargs: Any) -> Any:
    return build_dataset(config_of_roads(roads, **kwargs), target="mask").train


def test_mask_pixels_with_ignore_index_are_read_as_unlabeled(roads: Path) -> None:
    _, mask = split_of(roads)[0]
    _, other = split_of(roads, ignore_index=0)[0]
    assert set(mask.unique().tolist()) == {0, 1}
    assert torch.equal(other, mask.masked_fill(mask == 0, IGNORED))


Write = Callable[[Path, np.ndarray], None]


def with_palette(colors: list[tuple[int, int, int]], numbers: list[int]) -> Write:
    """Return a function that writes a mask whose class k is the entry numbers[k] of a palette."""

    def write(path: Path, mask: np.ndarray) -> None:
        image = Image.fromarray(np.array(numbers, np.uint8)[mask], "P")
        image.putpalette([value for color in colors for value in color])
        image.save(path.with_suffix(".png"))

    return write


def gray_ramp(*grays: int) -> list[tuple[int, int, int]]:
    return [(gray, gray, gray) for gray in grays]


def tiff(bits: int, photometric: int = 1) -> Write:
    """Return a function that writes a gray TIFF. With `photometric` 0, its number 0 is white."""

    def write(path: Path, mask: np.ndarray) -> None:
        height, width = mask.shape
        binary = (mask[..., None] >> np.arange(bits)[::-1]) & 1
        pixels = np.packbits(binary.reshape(height, -1), axis=1).tobytes()
        tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8}
        tags |= {278: height, 279: len(pixels)}
        pixels += bytes(len(pixels) % 2)
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        directory = struct.pack("<H", len(tags)) + entries + bytes(4)
        header = struct.pack("<2sHI", b"II", 42, 8 + len(pixels))
        path.with_suffix(".tif").write_bytes(header + pixels + directory)

    return write


def pgm(largest: int) -> Write:
    def write(path: Path, mask: np.ndarray) -> None:
        height, width = mask.shape
        header = f"P5 {width} {height} {largest}\n".encode()
        path.with_suffix(".pgm").write_bytes(header + mask.tobytes())

    return write


def saved(suffix: str, **options: Any) -> Write:
    return lambda path, mask: Image.fromarray(mask).save(path.with_suffix(suffix), **options)


def pair_of(root: Path, write: Write, classes: int, rows: int = 21) -> tuple[Any, np.ndarray]:
    """Write two images with the same mask of 4 classes. Return the dataset and the mask."""
    mask = np.random.default_rng(3).integers(0, 4, (rows, 30), dtype=np.uint8)
    for folder in ("images", "masks"):
        (root / "train" / folder).mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (30, rows)).save(root / "train" / "images" / f"{number}.png")
        write(root / "train" / "masks" / str(number), mask)
    return dataset_of(root, *(f"class {number}" for number in range(classes))), mask


def dataset_of(root: Path, *classes: str) -> Any:
    config = DataConfig(name="segmentation", root=str(root), kwargs={"classes": [*classes]})
    return build_dataset(config, target="mask")


@pytest.mark.parametrize("name", ["exif.webp", "deep.png", "turned.jpg"])
def test_masks_and_overlays_are_written_for_each_image_that_decode_reads(
    tmp_path: Path, name: str
) -> None:
    exif, pixels = Image.Exif(), np.full((6, 8), 40_000, np.uint16)
    exif[0x112] = 6
    if name == "deep.png":
        Image.fromarray(pixels).save(tmp_path / name)
    else:
        options = {"exif.webp": b"Exif\0\0not a TIFF", "turned.jpg": exif.tobytes()}
        gray = Image.fromarray((pixels >> 8).astype(np.uint8))
        gray.save(tmp_path / name, exif=options[name])
    config = resolved(
        "data=segmentation", "train=segmentation", "+data.kwargs.classes=[a,b]", "data.root=x"
    )
    task = find_task("segmentation", ImageTask)(config, ["a", "b"])
    task.write(
        torch.tensor([1.0, 0.0])[:, None, None].expand(2, 2, 2), tmp_path / name, tmp_path, "m"
    )
    size = (6, 8) if name == "turned.jpg" else (8, 6)
    assert Image.open(tmp_path / "m.png").size == size
    # The mask of class 0 is black, so the overlay has half of the brightness.
    overlay = np.array(Image.open(tmp_path / "m_overlay.png"))
    assert np.abs(overlay.astype(int) - (40_000 >> 9)).max() < 3


EXACT: dict[str, Write] = {
    "2 bits": tiff(2),
    "4 bits": tiff(4),
    "LZW": saved(".tif", compression="tiff_lzw"),
    "PGM of 200": pgm(200),
    "GIF": saved(".gif"),
    "colors": with_palette([(0, 0, 0), (9, 0, 0), (0, 9, 0), (9, 9, 9)], [0, 1, 2, 3]),
    "visible grays": with_palette(gray_ramp(0, 85, 170, 255), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", EXACT)
def test_mask_numbers_are_those_of_the_file_for_each_depth_and_palette(
    tmp_path: Path, name: str
) -> None:
    dataset, expected = pair_of(tmp_path, EXACT[name], classes=5)
    assert torch.equal(dataset.train[1][1], torch.from_numpy(expected))


def test_masks_with_a_palette_of_grays_and_of_colors_fit_if_each_gray_is_its_number(
    tmp_path: Path,
) -> None:
    dataset, mask = pair_of(tmp_path, EXACT["colors"], classes=4)
    with_palette(gray_ramp(*range(256)), [0, 1, 2, 3])(tmp_path / "train" / "masks" / "1", mask)
    assert all(torch.equal(of, torch.from_numpy(mask)) for _, of in dataset.train)


def test_palette_of_black_and_white_means_the_classes_0_and_1(tmp_path: Path) -> None:
    write = with_palette(gray_ramp(0, 255), [0, 1, 1, 1])
    dataset, expected = pair_of(tmp_path, write, classes=2)
    assert torch.equal(dataset.train[0][1], torch.from_numpy(expected.clip(0, 1)))


UNCERTAIN: dict[str, Write] = {
    "JPEG named PNG": saved(".png", format="JPEG", quality=100),
    "TIFF of JPEG": saved(".tiff", compression="jpeg"),
    "TIFF with white first": lambda path, mask: tiff(8, photometric=0)(path, mask + 251),
    "white before black": with_palette(gray_ramp(255, 0), [1, 0, 0, 0]),
    "grays in another order": with_palette(gray_ramp(3, 1, 0, 2), [2, 1, 3, 0]),
    "visible grays in another order": with_palette(gray_ramp(0, 255, 90, 180), [0, 2, 3, 1]),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_mask_whose_numbers_are_uncertain_is_unreadable(tmp_path: Path, name: str) -> None:
    dataset, _ = pair_of(tmp_path, UNCERTAIN[name], classes=5)
    with pytest.raises(UnreadableImageError, match=r"masks/1\."):
        dataset.train[1]


def test_masks_whose_palettes_disagree_are_unreadable(tmp_path: Path) -> None:
    """A program may choose a palette for each mask. One number then stands for several classes."""
    colors = [(0, 0, 0), (200, 0, 0), (0, 200, 0), (0, 0, 200)]
    dataset, mask = pair_of(tmp_path, with_palette(colors, [0, 1, 2, 3]), classes=4)
    masks = tmp_path / "train" / "masks"
    with_palette(colors[::-1], [3, 2, 1, 0])(masks / "1", mask)
    dataset.train[0]
    with pytest.raises(UnreadableImageError, match=r"masks/1\.png.*palette"):
        dataset.train[1]
    # The first mask shows only the background.
    with_palette(colors, [0, 0, 0, 0])(masks / "0", mask)
    for number, color in ((2, (9, 0, 0)), (3, (0, 9, 0))):
        Image.new("RGB", (30, 21)).save(tmp_path / "train" / "images" / f"{number}.png")
        with_palette([(0, 0, 0), color], [0, 1, 1, 1])(masks / str(number), mask)
    (masks / "1.png").unlink()
    (tmp_path / "train" / "images" / "1.png").unlink()
    dataset = dataset_of(tmp_path, *dataset.target_names)
    dataset.train[1]
    with pytest.raises(UnreadableImageError, match=r"masks/3\.png.*palette"):
        dataset.train[2]


def rotate_by_exif(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(path) as image:
        image.save(path, exif=exif)


def test_mask_is_turned_like_its_image_when_the_sizes_show_that_it_is_not(tmp_path: Path) -> None:
    dataset, stored = pair_of(tmp_path, saved(".png"), classes=4)
    rotate_by_exif(tmp_path / "train" / "images" / "0.png", 6)
    image, mask = dataset.train[0]
    assert image.shape[1:] == mask.shape == (30, 21)
    # The orientation 6 is a quarter turn to the right.
    assert np.array_equal(mask.numpy(), np.rot90(stored, -1))
    # A mask that has the size of the turned image stays as it is.
    Image.fromarray(stored.T).save(tmp_path / "train" / "masks" / "0.png")
    assert np.array_equal(dataset.train[0][1].numpy(), stored.T)


@pytest.mark.parametrize(("orientation", "rows"), [(3, 21), (6, 30)])
def test_image_is_unreadable_when_exif_turns_it_and_the_size_of_its_mask_does_not_tell(
    tmp_path: Path, orientation: int, rows: int
) -> None:
    dataset, _ = pair_of(tmp_path, saved(".png"), classes=4, rows=rows)
    rotate_by_exif(tmp_path / "train" / "images" / "1.png", orientation)
    dataset.train[0]
    with pytest.raises(UnreadableImageError, match=r"images/1\.png: its EXIF"):
        dataset.train[1]


def test_notes_name_classes_without_a_pixel_in_the_training_masks(tmp_path: Path) -> None:
    def write(path: Path, mask: np.ndarray) -> None:
        Image.fromarray(np.array([0, 255, 255, 0], np.uint8)[mask]).save(path.with_suffix(".png"))

    dataset, _ = pair_of(tmp_path, write, classes=2)
    (note,) = dataset.notes("mask")
    assert "class 1" in note and "class 0" not in note and "255" in note
    saved(".png")(tmp_path / "train" / "masks" / "1", np.full((21, 30), 1, np.uint8))
    assert dataset.notes("mask") == []


def test_images_and_masks_are_paired_when_their_names_have_other_unicode_forms(
    tmp_path: Path,
) -> None:
    names = {"images": "Übung/é", "masks": unicodedata.normalize("NFD", "Übung/é")}
    for folder, name in names.items():
        path = tmp_path / "train" / folder / f"{name}.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (8, 8)).save(path)
    (tmp_path / "train" / "masks" / ".Trash").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "train" / "masks" / ".Trash" / "old.png")
    dataset = dataset_of(tmp_path, "ground", "box")
    assert len(dataset.train) == 1 and dataset.train[0][1].sum() == 0
    assert dataset.left_out == {"folder .Trash": 1}


def test_check_data_py_names_each_bad_mask(roads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (48, 40), 7).save(roads / "masks" / "1.png")
    Image.new("L", (9, 9), 0).save(roads / "masks" / "2.png")
    Image.new("RGB", (48, 40)).save(roads / "masks" / "3.png")
    (roads / "masks" / "4.png").write_bytes(b"no image")
    words = ("train=segmentation", "data=segmentation", f"data.root={roads}")
    more = ("data.val_fraction=0.3", "+data.kwargs.classes=[ground,box]")
    assert check_data_script.main([*words, *more]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if ".png" in line]
    assert all(any(f"{number}.png" in line for line in lines) for number in (1, 2, 3, 4))
    assert not any("5.png" in line for line in lines)
