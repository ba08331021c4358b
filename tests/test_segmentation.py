"""Segmentation: image and mask change together, metrics are exact on any number of ranks, and all
strategies train alike.
"""

from __future__ import annotations

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

from scripts import check_data as check_data_script
from scripts import predict
from src.data.datasets import build_dataset
from src.models.build import build_model
from src.models.freeze import freeze
from src.models.segmenter import Segmenter
from src.parallel import build_strategy
from src.schema import Config, DataConfig, ResolvedParallel, TrainConfig
from src.tasks.segmentation import IGNORED, dice_losses, pixel_losses
from src.train.check import check_data
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import eval_loader
from timm_parallel.data.prefetch import DevicePrefetcher
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.runtime.evaluation import evaluate
from timm_parallel.testing.configs import plain, read_lines, resolved, task_of
from timm_parallel.testing.ranks import in_ranks, run_warm

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
    "train.epochs=2",
    "train.log_every=1",
    "parallel.accelerator=cpu",
    "parallel.threads_per_device=1",
)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    flips=st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from([0.0, 1.0, 0.5])),
    padding=st.integers(0, 5),
    scale=st.sampled_from([None, [0.3, 1.0]]),
    size=st.tuples(st.integers(8, 30), st.integers(8, 30)),
)
def test_mask_that_is_drawn_from_the_image_stays_equal_to_it_after_every_augmentation(
    seed: int,
    flips: tuple[float, float],
    padding: int,
    scale: list[float] | None,
    size: tuple[int, int],
) -> None:
    """A gradient, of which each pixel shows where it comes from."""
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
    # A pixel of the result in each direction; a flip of the image alone would be more.
    assert int(difference.max()) <= sum(6 * (max(1, 20 / side) + 0.5) for side in size)
    if padding and not scale:
        assert bool((image[0][~is_inside] == 0).all())


def truth() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (11, 3, 6, 5), generator=draw, dtype=torch.uint8)
    masks = torch.randint(0, 4, (11, 6, 5), generator=draw, dtype=torch.uint8)
    masks[torch.rand(11, 6, 5, generator=draw) < 0.2] = IGNORED
    return images, masks


def measured(ranks: Ranks, store: Any) -> dict[str, Any]:
    config = ResolvedParallel(
        strategy="ddp", devices=ranks.world_size, accelerator="cpu", backend="gloo"
    )
    strategy, task = build_strategy(config, ranks, store), task_of(4, MASKS)
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(3, 0.5, 0.25), channels_last=False)
    loader = eval_loader(
        InMemory(*truth()), task, prefetcher, strategy.group, batch_size=4, workers=0
    )
    torch.manual_seed(1)
    evaluation = evaluate(nn.Conv2d(3, 4, 1), loader, task, strategy.group)
    assert evaluation is not None
    strategy.close()
    return {**evaluation.numbers, **task.details(evaluation)}


@pytest.mark.processes
def test_segmentation_metrics_equal_scikit_learns_on_1_2_and_3_ranks() -> None:
    alone = measured(Ranks(), None)
    images, masks = truth()
    torch.manual_seed(1)
    with torch.no_grad():
        winners = nn.Conv2d(3, 4, 1)((images / 255 - 0.5) / 0.25).argmax(1)
    labeled = masks != IGNORED
    labels, found = masks[labeled].numpy(), winners[labeled].numpy()
    each = jaccard_score(labels, found, average=None, labels=range(4))
    assert list(alone["iou_per_class"].values()) == pytest.approx(each.tolist())
    assert alone["miou"] == pytest.approx(each.mean())
    assert alone["pixel_acc"] == pytest.approx(accuracy_score(labels, found))
    for world_size in (2, 3):
        for of_rank in in_ranks(measured, world_size):
            assert of_rank.pop("loss") == pytest.approx(alone["loss"], rel=1e-6)
            assert of_rank == {name: value for name, value in alone.items() if name != "loss"}


def test_losses_of_images_ignore_unlabeled_pixels() -> None:
    _, masks = truth()
    scores = torch.randn(11, 4, 6, 5, generator=torch.Generator().manual_seed(2))
    changed = scores + 9 * (masks == IGNORED)[:, None] * torch.randn(1, 4, 1, 1)
    for losses in (pixel_losses, dice_losses):
        assert torch.allclose(losses(scores, masks), losses(changed, masks), atol=1e-6)
    one = masks[0] != IGNORED
    expected = nn.functional.cross_entropy(scores[0][:, one].T, masks[0][one].long())
    assert pixel_losses(scores, masks)[0].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow(seconds=6)
@pytest.mark.processes
@pytest.mark.parametrize("parallel", ["dp", "ddp", "fsdp"])
def test_segmentation_trains_alike_under_every_strategy(tmp_path: Path, parallel: str) -> None:
    """Without BatchNorm's statistics of a rank's own images: the norms are frozen."""
    results, losses = [], []
    frozen = ('model.freeze=".*(bn|norm|downsample|smooth.1)"',)
    for name, devices in (("single", 1), (parallel, 2)):
        words = (*SMALL, *frozen, f"parallel={name}", f"parallel.devices={devices}")
        folder = run_warm(tmp_path / name, *words)
        lines = read_lines(folder / "metrics.jsonl")
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
        results.append(read_result(folder).val)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)
    assert results[0]["miou"] == pytest.approx(results[1]["miou"], abs=0.01)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("test_resnet", {}),
        ("test_efficientnet", {}),
        ("test_vit", {"dynamic_img_size": True}),
        pytest.param("swin_tiny_patch4_window7_224", {"img_size": 64}, marks=SLOW),
    ],
)
def test_segmenter_trains_on_any_kind_of_backbone(backbone: str, options: dict[str, Any]) -> None:
    model = Segmenter(3, 3, backbone, width=8, **options)
    model.set_grad_checkpointing(backbone != "test_efficientnet")
    outputs = model.train()(torch.randn(2, 3, 64, 64))
    assert outputs.shape == (2, 3, 64, 64)
    outputs.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_freezing_the_backbone_leaves_the_whole_decoder_to_be_trained() -> None:
    model = Segmenter(3, 3, "test_resnet", width=8)
    freeze(model, "backbone")
    frozen = {name.partition(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert (frozen, trained) == ({"backbone"}, {"laterals", "smooth", "head"})


def test_backbone_without_a_model_or_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no connection")

    config = resolved("experiment=segmentation", "model.pretrained=true").model
    monkeypatch.setattr("src.models.segmenter.timm.create_model", fail)
    monkeypatch.setattr("src.models.build.skip_unreachable_hub", lambda: None)
    with pytest.raises(ValueError, match=r"model\.pretrained=true"):
        build_model(config, 3, 3, None, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model\.kwargs\.backbone=resnet19"):
        Segmenter(3, 3, "resnet19")


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


def test_folder_of_images_and_masks_is_trained_and_predicted_as_png_files(
    roads: Path, tmp_path: Path
) -> None:
    words = (
        *("data=segmentation", f"data.root={roads}", "data.val_fraction=0.3"),
        *("+data.kwargs.classes=[ground,box]", "data.batch_size=4", "data.image_size=[32,40]"),
    )
    kept = [word for word in SMALL if "num_samples" not in word and "image_size" not in word]
    folder = run_warm(tmp_path / "run", *kept, *words, "parallel=single")
    assert read_result(folder).val["iou_per_class"].keys() == {"ground", "box"}
    output = tmp_path / "predicted"
    assert predict.main([f"run={folder}", f"images={roads / 'images'}", f"folder={output}"]) == 0
    with Image.open(output / "1.png") as mask:
        assert mask.mode == "P" and mask.size == (48, 40)
        assert set(np.unique(np.array(mask))) <= {0, 1}
    assert len(list(output.glob("*_overlay.png"))) == 12


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, r"data\.kwargs\.classes"),
        ({"classes": ["ground", "box"]}, r"1 file without one .*: .*images/3\.png"),
    ],
)
def test_masks_that_are_missing_or_have_no_class_names_are_refused(
    roads: Path, kwargs: dict[str, Any], named: str
) -> None:
    (roads / "masks" / "3.png").unlink()
    data = DataConfig(name="segmentation", root=str(roads), val_fraction=0.3, kwargs=kwargs)
    with pytest.raises(ValueError, match=named):
        check_data(Config(data=data, train=MASKS))


def test_mask_without_an_image_is_refused(roads: Path) -> None:
    (roads / "images" / "3.png").unlink()
    kwargs = {"classes": ["ground", "box"]}
    data = DataConfig(name="segmentation", root=str(roads), val_fraction=0.3, kwargs=kwargs)
    with pytest.raises(ValueError, match=r"masks/3\.png"):
        check_data(Config(data=data, train=MASKS))


def split_of(roads: Path, **kwargs: Any) -> Any:
    kwargs = {"classes": ["ground", "box"], **kwargs}
    data = DataConfig(name="segmentation", root=str(roads), val_fraction=0.3, kwargs=kwargs)
    return build_dataset(data, target="mask").train


def test_pixels_of_ignore_index_have_no_class(roads: Path) -> None:
    _, mask = split_of(roads)[0]
    _, other = split_of(roads, ignore_index=0)[0]
    assert set(mask.unique().tolist()) == {0, 1}
    assert torch.equal(other, mask.masked_fill(mask == 0, IGNORED))


def test_bad_masks_are_named_by_check_data(roads: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data=digits",), "train.task=segmentation"),
        (("data.augment.mixup=0.2",), "data.augment.mixup=0.2"),
        (("data.augment.aa=rand-m9",), "data.augment.aa=rand-m9"),
        (("data.balance=1",), "data.balance=1"),
        (("+train.task_kwargs.stride=2",), "train.task_kwargs.stride=2"),
    ],
)
def test_key_that_does_not_fit_a_segmentation_is_refused(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        resolved("experiment=segmentation", *words)
    assert str(refusal.value).startswith(key)
