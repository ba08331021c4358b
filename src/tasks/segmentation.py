"""Segmentation: the model predicts a class for each pixel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision import tv_tensors

from src.data.transforms import Preprocessing, evaluation_transform, train_transform
from src.schema import ResolvedConfig
from src.tasks.images import LOSS, Criterion, Loss, LossTask
from timm_parallel import (
    Batch,
    Evaluation,
    Files,
    ImageDataset,
    Metric,
    as_size,
    draw_confusion,
    key,
)

# evaluation=whole pads the sides of images to multiples of this number, which the strides of most
# backbones divide.
MULTIPLE = 32

IGNORED = ImageDataset.ignored


class WithMask:
    """Applies transforms of torchvision to an image and to its mask, uint8 [H, W], with the same
    random numbers.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        image, mask = self.transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
        return image.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor)


# Losses. The cross entropy of a batch is divided by its labeled pixels, weighted by class, as torch
# does; the library divides by those of the whole optimizer step, so the result does not depend on
# the number of ranks. A loss with Dice is averaged over images.


def pixel_losses(
    scores: Tensor, masks: Tensor, class_weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Compute the cross entropy of each image, summed over its labeled pixels. Return a tensor
    [B].
    """
    labels, is_labeled = masks.long(), masks != IGNORED
    rows, row_labels = scores, labels
    if torch.are_deterministic_algorithms_enabled():
        # Flatten the pixels to rows, because torch has no deterministic CUDA kernel of cross
        # entropy for images.
        rows, row_labels = scores.movedim(1, -1).flatten(0, 2), labels.flatten()
    losses = functional.cross_entropy(
        rows,
        row_labels,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    ).view(masks.shape)
    if class_weight is not None:
        losses = losses * class_weight[labels.masked_fill(~is_labeled, 0)]
    return (losses * is_labeled).sum((1, 2))


def image_losses(
    scores: Tensor, masks: Tensor, class_weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Compute the cross entropy of each image, averaged over its labeled pixels. Return a tensor
    [B].
    """
    sums = pixel_losses(scores, masks, class_weight, smoothing)
    return sums / (masks != IGNORED).sum((1, 2)).clamp(min=1)


def dice_losses(scores: Tensor, masks: Tensor) -> Tensor:
    """Compute 1 - the soft Dice coefficient of each image, averaged over classes (Milletari et al.
    2016, arXiv:1606.04797). Return a tensor [B]. 1 is added to numerator and denominator, so that a
    class without a pixel does not divide by 0.
    """
    is_labeled = (masks != IGNORED)[:, None]
    shares = scores.softmax(1) * is_labeled
    labels = masks.long().masked_fill(masks == IGNORED, 0)[:, None]
    truth = torch.zeros_like(scores).scatter_(1, labels, 1.0) * is_labeled
    common, total = (shares * truth).sum((2, 3)), (shares + truth).sum((2, 3))
    return 1 - ((2 * common + 1) / (total + 1)).mean(1)


class LossOfMasks(nn.Module):
    """A loss of each image [B] with class weights. This is a module, so that a strategy can move
    the weights to a device.
    """

    class_weight: Tensor | None

    def __init__(self, losses: Callable[..., Tensor], class_weight: Tensor | None) -> None:
        super().__init__()
        self.losses = losses
        # Keep class weights out of checkpoints, because a resumed run may change
        # train.class_weights.
        self.register_buffer("class_weight", class_weight, persistent=False)

    def forward(self, scores: Tensor, masks: Tensor) -> Tensor:
        return self.losses(scores, masks, self.class_weight)


def cross_entropy(config: ResolvedConfig, class_weight: Tensor | None = None) -> Criterion:
    """Build the cross entropy of pixels, with label smoothing (`train.smoothing`) and class
    weights.
    """
    return LossOfMasks(partial(pixel_losses, smoothing=config.train.smoothing), class_weight)


def dice(config: ResolvedConfig) -> Criterion:
    """Build the soft Dice loss of segmentation."""
    return dice_losses


def cross_entropy_and_dice(config: ResolvedConfig, class_weight: Tensor | None = None) -> Criterion:
    """Build the sum of the cross entropy of pixels and the soft Dice loss."""

    def losses(scores: Tensor, masks: Tensor, class_weight: Tensor | None) -> Tensor:
        pixels = image_losses(scores, masks, class_weight, config.train.smoothing)
        return pixels + dice_losses(scores, masks)

    return LossOfMasks(losses, class_weight)


def confusion(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count labeled pixels by true class (row) and predicted class (column). Return int64 [classes,
    classes].
    """
    return count_pixels(scores, batch.target).sum(0)


def count_pixels(scores: Tensor, masks: Tensor) -> Tensor:
    """Count the labeled pixels of each image as `confusion` does, from scores [B, classes, H, W]
    and masks [B, H, W]. Return int64 [B, classes, classes].
    """
    classes, is_labeled = scores.shape[1], masks != IGNORED
    images = torch.arange(len(masks), device=scores.device)[:, None, None]
    cells = (images * classes + masks.long()) * classes + scores.argmax(1)
    counts = torch.zeros(len(masks) * classes**2, dtype=torch.int64, device=scores.device)
    counts.index_add_(0, (cells * is_labeled).flatten(), is_labeled.long().flatten())
    return counts.view(-1, classes, classes)


def ious(counts: Tensor) -> list[float | None]:
    """Compute the intersection over union of each class. It is None for a class that occurs neither
    in masks nor in predictions.
    """
    union = counts.sum(0) + counts.sum(1) - counts.diag()
    pairs = zip(counts.diag().tolist(), union.tolist(), strict=True)
    return [hits / total if total else None for hits, total in pairs]


def mean_iou(counts: Tensor, samples: int) -> float | None:
    """Compute the mean intersection over union of the classes that occur in masks or
    predictions.
    """
    values = [value for value in ious(counts) if value is not None]
    return sum(values) / len(values) if values else None


def pixel_accuracy(counts: Tensor, samples: int) -> float | None:
    """Compute the share of labeled pixels whose class is predicted correctly."""
    total = int(counts.sum())
    return int(counts.diag().sum()) / total if total else None


@dataclass
class SegmentationOptions:
    evaluation: str = key(
        "resize",
        choices=("resize", "whole", "slide"),
        help="Resize images to data.image_size; or whole images; or windows of data.image_size.",
    )
    stride: int | None = key(
        None, ge=1, help="slide: pixels between two windows; null: half a window."
    )


# Side of the predicted masks that a page of images shows, in pixels.
THUMBNAIL = 96


@lru_cache(maxsize=1)
def class_weights_on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """Copy the weights of the classes to a device once, instead of for each batch."""
    return torch.tensor(weights, device=device)


class Segmentation(LossTask):
    """Task in which the model predicts a class for each pixel. Targets are masks, uint8 [B, H, W]:
    class numbers, or 255 for a pixel without a class.
    """

    target = "mask"
    headline = "miou"
    endings = (".png", "_overlay.png")
    Options: ClassVar[type[Any]] = SegmentationOptions
    # erasing is not in the list, because erased pixels would keep their classes in the mask.
    applies = ("smoothing", "class_weights")
    known_losses: ClassVar[Mapping[str, Loss]] = {
        "ce": Loss(cross_entropy, image_losses, ("smoothing", "class_weights")),
        "dice": Loss(dice, image_losses),
        "ce_dice": Loss(cross_entropy_and_dice, image_losses, ("smoothing", "class_weights")),
    }
    metrics: Mapping[str, Metric] = {
        "loss": LOSS,
        "miou": Metric(confusion, mean_iou, is_proportion=True),
        "pixel_acc": Metric(confusion, pixel_accuracy, is_proportion=True),
    }

    def __init__(self, config: ResolvedConfig, names: Sequence[str]) -> None:
        super().__init__(config, names)
        data, mode, stride = config.data, self.options.evaluation, self.options.stride
        if data.crop_pct not in (None, 1):
            raise ValueError(
                f"data.crop_pct={data.crop_pct}: segmentation evaluates all pixels of an image; "
                "leave it at null"
            )
        if data.crop_mode not in (None, "squash"):
            raise ValueError(
                f"data.crop_mode={data.crop_mode}: segmentation resizes whole images and masks to "
                "data.image_size; leave it at null"
            )
        if mode == "slide" and data.image_size is None:
            raise ValueError(
                "data.image_size=null: train.task_kwargs.evaluation=slide needs the size of its "
                "sliding windows; set data.image_size to a number of pixels"
            )
        if stride is not None and (mode != "slide" or stride > min(self.window)):
            raise ValueError(
                f"train.task_kwargs.stride={stride}: a stride needs train.task_kwargs.evaluation="
                "slide, and may not exceed the shorter side of data.image_size; lower the stride, "
                "or leave it out"
            )

    def check_targets(self, targets: Tensor) -> None:
        largest = int(targets.masked_fill(targets == IGNORED, 0).max()) if len(targets) else 0
        if largest >= len(self.names):
            raise ValueError(
                f"the data has masks with the class {largest}, expected 0 to {len(self.names) - 1} "
                f"for {len(self.names)} classes; name all classes, and set pixels without a class "
                f"to {IGNORED}"
            )

    def check_outputs(self, outputs: Any, batch: Batch) -> None:
        shape = list(getattr(outputs, "shape", ()))
        if len(shape) != 4 or shape[1] < self.num_outputs:
            raise ValueError(
                f"model.name: expected a model that returns scores of each pixel, [1, "
                f"{self.num_outputs}, height, width], got {shape or type(outputs).__name__}; use "
                "model=segmenter"
            )

    def class_weights(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Build the keyword arguments that pass train.class_weights to the loss. The weights are
        scaled to mean 1.
        """
        given = self.config.train.class_weights
        if given is None:
            return {}
        if given == "auto" or len(given) != self.num_outputs or not any(given):
            raise ValueError(
                f"train.class_weights={given}: expected a number for each of the "
                f"{self.num_outputs} classes, at least one above 0"
            )
        weights = torch.tensor(given, dtype=torch.float32)
        return {"class_weight": weights / weights.mean()}

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        augment = self.config.data.augment
        if augment.train_crop_mode in ("rkrc", "rkrr"):
            raise ValueError(
                f"data.augment.train_crop_mode={augment.train_crop_mode}: cannot crop masks; use "
                "rrc"
            )
        # Like the evaluation, resize whole images and masks.
        steps = train_transform(augment, size, resize, mean, "squash", mask_fill=IGNORED)
        return None if steps is None else WithMask(steps)

    def preprocessing(self, given: Any) -> Any:
        """Return preprocessing that resizes a whole image without a crop, and ignores its aspect
        ratio. A crop would lose pixels of the mask.
        """
        return replace(given, crop_pct=1.0, crop_mode="squash")

    def evaluation_transform(self, preprocessing: Preprocessing) -> Any:
        if self.options.evaluation != "resize":
            return None
        return WithMask(evaluation_transform(preprocessing))

    def weight(self, batch: Batch) -> Tensor | int:
        """Return the number of labeled pixels, weighted by class. A loss with Dice divides by the
        number of images.
        """
        if self.config.train.loss != "ce":
            return len(batch)
        masks = batch.target
        is_labeled = masks != IGNORED
        if "class_weight" not in self.weights:
            return is_labeled.sum()
        of_class = class_weights_on(masks.device, tuple(self.weights["class_weight"]))
        return (of_class[masks.long().masked_fill(~is_labeled, 0)] * is_labeled).sum()

    def train_numbers(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        is_labeled = targets != IGNORED
        hits = ((scores.argmax(1) == targets) & is_labeled).sum((1, 2))
        return {"pixel_acc": hits / is_labeled.sum((1, 2)).clamp(min=1)}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        """Compute the scores of images in the way that train.task_kwargs.evaluation sets: resize,
        whole or slide.
        """
        images, model = batch.image, networks.model
        height, width = images.shape[2:]
        if self.options.evaluation == "resize":
            return self.scores(model, images)
        if self.options.evaluation == "slide":
            return self.slide(model, padded(images, self.window))[..., :height, :width]
        sides = (math.ceil(height / MULTIPLE) * MULTIPLE, math.ceil(width / MULTIPLE) * MULTIPLE)
        return self.scores(model, padded(images, sides))[..., :height, :width]

    def scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """Compute the scores of the classes for images that the model accepts."""
        scores: Tensor = model(images)
        return scores.float()[:, : self.num_outputs]

    @property
    def window(self) -> tuple[int, int]:
        """Height and width in pixels of the sliding windows of
        train.task_kwargs.evaluation=slide.
        """
        return as_size(self.config.data.image_size)

    def slide(self, model: nn.Module, images: Tensor) -> Tensor:
        """Compute scores in sliding windows, and average them where windows overlap. One row of
        windows is computed at a time, so memory depends on the width of an image, not on its
        height.
        """
        stride = self.options.stride
        tops, lefts = (
            [*range(0, side - length, stride or max(1, length // 2)), side - length]
            for side, length in zip(images.shape[2:], self.window, strict=True)
        )
        total = images.new_zeros(len(images), self.num_outputs, *images.shape[2:])
        count = torch.zeros_like(total[:1, :1])
        for top in tops:
            rows = slice(top, top + self.window[0])
            columns = [slice(left, left + self.window[1]) for left in lefts]
            windows = torch.cat([images[..., rows, column] for column in columns])
            scores = self.scores(model, windows).chunk(len(columns))
            for column, part in zip(columns, scores, strict=True):
                total[..., rows, column] += part
                count[..., rows, column] += 1
        return total / count

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return the number of images, and the intersection over union of each class."""
        values = ious(evaluation.sums[confusion])
        return {
            "samples": evaluation.samples,
            "iou_per_class": dict(zip(self.names, values, strict=True)),
        }

    def draw(self, evaluation: Evaluation) -> dict[str, Any]:
        counts = evaluation.sums[confusion].cpu().numpy()
        return {"confusion": draw_confusion(counts, self.names)}

    def rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return for each image the confusion matrix of its pixels, and its number of labeled
        pixels. The scores of all images would not fit in memory.
        """
        counts = count_pixels(outputs, batch.target)
        return counts, counts.sum((1, 2))

    def losses_and_pictures(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return the loss of each image, and its predicted mask in the size of a thumbnail."""
        masks = outputs.argmax(1, keepdim=True).byte()
        small = functional.interpolate(masks, size=(THUMBNAIL, THUMBNAIL), mode="nearest")
        return *super().losses_and_pictures(outputs, batch), small[:, 0]

    def picture(
        self, image: Image.Image, target: Tensor, outputs: tuple[Tensor, ...]
    ) -> Image.Image:
        """Draw the image, the image under its mask, and the image under the predicted mask, from
        left to right.
        """
        drawn = Image.new("RGB", (3 * image.width, image.height))
        drawn.paste(image, (0, 0))
        for place, mask in enumerate((target, outputs[0]), 1):
            drawn.paste(overlay(image, mask), (place * image.width, 0))
        return drawn

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return columns for a table with a row per image: its mean intersection over union, and
        that of each class.
        """
        assert evaluation.rows is not None
        of_images = evaluation.rows[1]
        columns: dict[str, list[Any]] = {"miou": [mean_iou(counts, 1) for counts in of_images]}
        values = [ious(counts) for counts in of_images]
        for place, name in enumerate(self.names):
            columns[f"iou_{name}"] = [of_image[place] for of_image in values]
        return columns

    def predictions(self, outputs: Tensor, topk: int) -> dict[str, list[Any]]:
        """Return a column for each class: the share of an image's pixels that it has."""
        winners = outputs.argmax(1).flatten(1)
        return {
            name: (winners == number).float().mean(1).tolist()
            for number, name in enumerate(self.names)
        }

    def write(self, scores: Tensor, image: Path, folder: Path, name: str) -> None:
        """Write the predicted mask and an overlay, both in the size of the image. The mask is a PNG
        of class numbers with a palette.
        """
        # Read the image as its prediction does, which also accepts broken EXIF data.
        pixels, _ = Files([(image, 0)], max_value=self.config.data.max_value)[0]
        photo = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        size = (photo.height, photo.width)
        whole = functional.interpolate(scores[None].float(), size=size, mode="bilinear")
        mask = whole[0].argmax(0)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with_palette(mask).save(folder / f"{name}.png")
        overlay(photo, mask).save(folder / f"{name}_overlay.png")


def with_palette(mask: Tensor) -> Image.Image:
    """Return a mask of class numbers [H, W] as an image whose palette has a color per class."""
    image = Image.fromarray(mask.byte().cpu().numpy(), "P")
    image.putpalette([part for color in PALETTE for part in color])
    return image


def overlay(photo: Image.Image, mask: Tensor) -> Image.Image:
    """Blend a photo with a mask of class numbers [H, W], which is scaled to its size."""
    colors = with_palette(mask).resize(photo.size, Image.Resampling.NEAREST)
    return Image.blend(photo, colors.convert("RGB"), 0.5)


def padded(images: Tensor, sides: tuple[int, int]) -> Tensor:
    """Pad images on the right and at the bottom to a height and width. Normalized images are padded
    with 0, which is the mean of the data.
    """
    down, right = (max(0, side - had) for side, had in zip(sides, images.shape[2:], strict=True))
    return functional.pad(images, [0, right, 0, down])


def _color(number: int) -> tuple[int, int, int]:
    """Return the color of a class number as in Pascal VOC, whose colors spread the bits of the
    number over red, green and blue.
    """
    color = [0, 0, 0]
    for bit in range(8):
        for channel in range(3):
            color[channel] |= (number >> channel & 1) << (7 - bit)
        number >>= 3
    return color[0], color[1], color[2]


PALETTE = [_color(number) for number in range(256)]
