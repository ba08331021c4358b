"""Images of two different sides: `data.image_size=[height,width]`, and data.eval_image_size."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch.overrides import TorchFunctionMode
from torchvision import tv_tensors
from torchvision.transforms import v2

import evaluate as entry
from scripts import export as export_script
from src.commands.load import load_trained
from src.commands.predict import predict
from src.data.transforms import Preprocessing, evaluation_transform, train_transform
from src.models.preprocessing import preprocessing_for
from src.schema import AugmentConfig, DataConfig
from tests.template.runs import cpu_strategy, run_warm
from timm_parallel.record.result import read_result

SIZES = ((50, 80), (80, 50), (31, 200))


def picture(height: int, width: int) -> Image.Image:
    """Return a smooth image, because resizing rounds differently at hard edges."""
    rows, columns = np.mgrid[:height, :width]
    pixels = [127 + 100 * np.sin(columns / 7 + rows / 11 + channel) for channel in range(3)]
    return Image.fromarray(np.stack(pixels, axis=2).astype(np.uint8))


@pytest.mark.parametrize("size", [(32, 48), (48, 32)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_non_square_evaluation_transform_matches_timm(mode: str, size: tuple[int, int]) -> None:
    preprocessing = Preprocessing((3, *size), (0.5,) * 3, (0.5,) * 3, 0.875, mode, "bicubic")
    for sides in SIZES:
        image = picture(*sides)
        theirs = torch.as_tensor(create_transform(**asdict(preprocessing), normalize=False)(image))
        ours = evaluation_transform(preprocessing)(v2.functional.pil_to_tensor(image))
        assert ours.shape == theirs.shape == (3, *size)
        assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize(
    "augment",
    [
        {},
        {"scale": [0.3, 1.0]},
        {"train_crop_mode": "rkrr"},
        {"train_crop_mode": "rkrc"},
        {"aa": "rand-m9-mstd0.5-inc1"},
        {"aa": "augmix-m5"},
        {"crop_padding": 4, "hflip": 0.5, "vflip": 0.5},
        {"gaussian_blur_prob": 1.0},
    ],
    ids=str,
)
def test_augmentation_returns_images_of_the_configured_height_and_width(augment: Any) -> None:
    transform = train_transform(AugmentConfig(**augment), (32, 48), resize=True)
    assert transform is not None
    for sides in SIZES:
        image = v2.functional.pil_to_tensor(picture(*sides))
        assert transform(image).shape == (3, 32, 48)


@pytest.mark.parametrize("mode", ["squash", "border"])
def test_crop_mode_keeps_whole_images_in_evaluation_and_in_training_without_a_random_crop(
    mode: str,
) -> None:
    model = timm.create_model("test_resnet", pretrained_cfg_overlay={"crop_pct": 0.8})
    images: Any = SimpleNamespace(image_size=None, in_chans=3, val=None, mean=None, std=None)
    config = DataConfig(name="folder", image_size=[32, 48], crop_mode=mode)
    preprocessing = preprocessing_for(model, config, images)
    assert (preprocessing.crop_mode, preprocessing.crop_pct) == (mode, 1.0)
    config.crop_pct = 0.9
    assert preprocessing_for(model, config, images).crop_pct == 0.9
    augment = AugmentConfig(interpolation=preprocessing.interpolation)
    training = train_transform(augment, (32, 48), True, preprocessing.mean, mode)
    assert training is not None
    for sides in SIZES:
        pixels = v2.functional.pil_to_tensor(picture(*sides))
        assert torch.equal(training(pixels), evaluation_transform(preprocessing)(pixels))


class LargestTensor(TorchFunctionMode):
    """Records the number of values of the largest tensor that a torch function returns."""

    values = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.values = max(self.values, result.numel())
        return result


@pytest.mark.parametrize("sides", [(1, 9_000), (9_000, 2)])
@pytest.mark.parametrize("mode", ["eval", None, "rkrc", "rkrr"])
def test_image_of_an_extreme_aspect_ratio_is_cropped_before_it_is_resized(
    sides: tuple[int, int], mode: str | None
) -> None:
    size = (16, 24)
    preprocessing = Preprocessing((3, *size), (0.5,) * 3, (0.5,) * 3, 0.875, "center", "bicubic")
    transform = evaluation_transform(preprocessing)
    if mode != "eval":
        augmentation = train_transform(AugmentConfig(train_crop_mode=mode), size, resize=True)
        assert augmentation is not None
        transform = augmentation
    image = torch.full((3, *sides), 9, dtype=torch.uint8)
    with LargestTensor() as largest:
        result = transform(image)
    assert torch.equal(result, torch.full((3, *size), 9, dtype=torch.uint8))
    assert largest.values <= 3 * 250 * 40**2


@pytest.mark.parametrize("sides", [(60, 40), (1, 900)])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_evaluation_transform_moves_targets_of_torchvision_with_the_image(
    sides: tuple[int, int], mode: str
) -> None:
    preprocessing = Preprocessing((3, 32, 32), (0.5,) * 3, (0.5,) * 3, 1.0, mode, "bilinear")
    image, mask = torch.zeros(3, *sides, dtype=torch.uint8), torch.ones(sides, dtype=torch.uint8)
    transform: Any = evaluation_transform(preprocessing)
    images, masks = transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
    assert (images.shape, masks.shape) == ((3, 32, 32), (32, 32))


WORDS = (
    *("data=folder", "data.image_size=[32,48]", "data.eval_image_size=[48,64]"),
    *("data.limit_train=null", "data.batch_size=8", "data.workers=0", "data.augment.hflip=0.5"),
    *(
        "data.augment.scale=[0.5,1]",
        "model.name=test_resnet",
        "model=resnet18",
        "parallel.accelerator=cpu",
    ),
)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write 24 images for training and 6 for validation, of three sizes and two classes."""
    root = tmp_path / "images"
    for split, count in (("train", 24), ("val", 6)):
        for number in range(count):
            folder = root / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            picture(*SIZES[number % 3]).save(folder / f"{number}.png")
    return root


@pytest.mark.processes
def test_run_on_non_square_images_can_be_evaluated_exported_and_used_to_predict(
    images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Images that are evaluated have another size and the crop mode of the run."""
    words = (*WORDS, f"data.root={images}", "parallel=single", "data.crop_mode=border")
    run = run_warm(tmp_path / "run", *words)
    result = read_result(run)
    assert result.image_size == [32, 48]
    loaded = load_trained(run, None, None, torch.device("cpu"))
    preprocessing = loaded.preprocessing
    assert preprocessing.input_size == (3, 48, 64)
    assert (preprocessing.crop_mode, preprocessing.crop_pct) == ("border", 1)
    losses = []
    for mode in ("", "data.crop_mode=squash", "data.crop_mode=center"):
        capfd.readouterr()
        assert entry.main([f"run={run}", "split=val", "checkpoint=last", *mode.split()]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(result.val["loss"], rel=1e-6)
    # Another crop mode shows the model other pixels.
    assert len(set(losses)) == 3
    predictions = predict(run, images / "val", cpu_strategy(), checkpoint="last", workers=0)
    right = [
        values["class_1"] == Path(path).parent.name
        for path, values in predictions.items()
        if values
    ]
    assert sum(right) / len(right) == pytest.approx(result.val["acc"])
    assert export_script.main([f"run={run}", f"output={run / 'export'}"]) == 0
    config = json.loads((run / "export" / "config.json").read_text())["pretrained_cfg"]
    assert (config["input_size"], config["crop_mode"]) == ([3, 48, 64], "border")
