"""Images with masks: `<root>/{train,val,test}/{images,masks}`, or `<root>/{images,masks}` with
data.val_fraction. An image and its mask have the same stem.

Imports no torch, because train.py checks the data first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.data.dataset import ImageDataset, Sample, image_files
from timm_parallel.data.folder import split_of_file
from timm_parallel.data.fractions import check_splits
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, plural

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "val", "test")
# Files of a split: images, and their masks below data.root.
MaskListing = dict[str, list[tuple[Path, str]]]


class MaskDataset(ImageDataset):
    """Images and PNG masks, whose pixels are class numbers, or indices of a palette."""

    targets = ("mask",)

    def __init__(self, config: DataConfig, classes: list[str] | None = None) -> None:
        """`classes`: names of the numbers 0, 1, … in the masks."""
        self.target_names = _class_names(config)
        root, listing = Path(str(config.root)), _list_masks(config)
        splits = {name: MaskFiles(root, files) for name, files in listing.items()}
        self.train: Any = splits.get("train")
        self.val: Any = splits.get("val")
        self.test = splits.get("test")

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "mask") -> None:
        """Raise ValueError for missing folders, and images without a mask."""
        if config.root is None:
            raise ValueError("data.root=null: set it to a folder with images/ and masks/")
        _class_names(config)
        listing = _list_masks(config)
        needed = ("train", "val") if evaluated is None else ()
        for split in needed:
            if not listing.get(split):
                raise ValueError(
                    f"data.root={config.root}: no image for {split}; expected "
                    f"{split}/images/ and {split}/masks/, or images/ and masks/ with "
                    "data.val_fraction=0.2"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images."""
        return len(_list_masks(config)["train"])


class MaskFiles:
    """A split of image files with masks, decoded when they are read."""

    def __init__(self, root: Path, files: list[tuple[Path, str]]) -> None:
        self.root, self.files = root, files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        from timm_parallel.data.decode import decode

        path, name = self.files[index]
        image, mask = decode(path), read_mask(self.root / name)
        if image.shape[1:] != mask.shape:
            raise UnreadableImageError(
                f"{path}: {image.shape[2]}x{image.shape[1]} pixels, but its mask {name} has "
                f"{mask.shape[1]}x{mask.shape[0]}; make them equal"
            )
        return image, mask


def read_mask(path: Path) -> Tensor:
    """Read a mask of one channel, or with a palette: uint8 [H, W]."""
    import numpy as np
    import torch
    from PIL import Image

    try:
        with Image.open(path) as mask:
            if mask.mode not in ("L", "P", "1"):
                raise UnreadableImageError(
                    f"{path}: a mask of mode {mask.mode}; expected class numbers: a PNG of 8 bits "
                    "per pixel, gray or with a palette"
                )
            return torch.from_numpy(np.array(mask, dtype=np.uint8))
    except (OSError, SyntaxError) as error:
        raise UnreadableImageError(f"{path}: not a readable mask ({error}); replace it") from None


def _class_names(config: DataConfig) -> list[str]:
    names = config.kwargs.get("classes")
    if not isinstance(names, list) or len(names) < 2:
        raise ValueError(
            f"data.kwargs.classes={names}: expected the names of the numbers in the masks, e.g. "
            "+data.kwargs.classes=[background,road]"
        )
    return [str(name) for name in names]


def _list_masks(config: DataConfig) -> MaskListing:
    root = Path(str(config.root))
    listing: MaskListing = {}
    if config.val_fraction is None:
        for split in SPLITS:
            if (root / split).is_dir():
                listing[split] = _pairs(root, root / split)
        return listing
    listing = {split: [] for split in SPLITS if split != "test" or config.test_fraction}
    for path, mask in _pairs(root, root):
        listing[split_of_file(path, root, config)].append((path, mask))
    check_splits(listing, config)
    return listing


def _pairs(root: Path, folder: Path) -> list[tuple[Path, str]]:
    """Pair the images of `folder`/images with `folder`/masks by their stems."""
    images, masks = folder / "images", folder / "masks"
    for needed in (images, masks):
        if not needed.is_dir():
            raise ValueError(f"data.root={root}: no folder {needed}")
    mask_of = {
        path.relative_to(masks).with_suffix(""): path.relative_to(root)
        for path in image_files(masks)
    }
    paths = list(image_files(images))
    stems = [path.relative_to(images).with_suffix("") for path in paths]
    if missing := [str(stem) for stem in stems if stem not in mask_of]:
        raise ValueError(
            f"data.root={root}: {plural(len(missing), 'image')} of {images} without a mask of the "
            f"same name in {masks}: {first(missing)}"
        )
    return [(path, str(mask_of[stem])) for path, stem in zip(paths, stems, strict=True)]
