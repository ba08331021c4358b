"""Dataset of images with segmentation masks: `<root>/{train,val,test}/{images,masks}`.

With data.val_fraction, the layout is `<root>/{images,masks}`. An image and its mask have the same
name, apart from the suffix. This module does not import torch, because train.py checks the data
before it imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.data.dataset import ImageDataset, Sample, image_files
from timm_parallel.data.folder import divided
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, plural

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "val", "test")
IGNORED = ImageDataset.ignored
# The files of each split, by the name of the split: the path of each image, and the path of its
# mask relative to data.root.
MaskListing = dict[str, list[tuple[Path, str]]]


class MaskDataset(ImageDataset):
    """Dataset of images with PNG masks. A mask pixel holds a class number or an index of
    a palette.
    """

    targets = ("mask",)

    def __init__(
        self,
        config: DataConfig,
        classes: list[str] | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        """List the images and masks of each split.

        `classes`: names of the class numbers 0, 1, … in the masks. `ignore_index`: value of mask
        pixels that belong to no class.
        """
        self.target_names = _class_names(config)
        root, listing = Path(str(config.root)), _list_masks(config)
        splits = {
            name: MaskFiles(root, files, len(self.target_names), ignore_index)
            for name, files in listing.items()
        }
        self.train: Any = splits.get("train")
        self.val: Any = splits.get("val")
        self.test = splits.get("test")

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "mask") -> None:
        """Raise ValueError if a folder of images or masks is missing, or an image has no mask."""
        if config.root is None:
            raise ValueError("data.root=null: set it to a folder with images/ and masks/")
        _class_names(config)
        listing = _list_masks(config)
        needed = {None: ["train", "val"], "all": ["val"]}.get(evaluated, [str(evaluated)])
        for split in needed:
            # With evaluated=all, a dataset with test images alone is enough.
            if not listing.get(split) and not (evaluated == "all" and listing.get("test")):
                raise ValueError(
                    f"data.root={config.root}: no image for {split}; expected "
                    f"{split}/images/ and {split}/masks/, or images/ and masks/ with "
                    "data.val_fraction=0.2"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images by listing the files of all splits."""
        return len(_list_masks(config)["train"])


class MaskFiles:
    """A split of image files with masks. The image and its mask are decoded when their index is
    read.
    """

    def __init__(
        self, root: Path, files: list[tuple[Path, str]], classes: int, ignore_index: int = IGNORED
    ) -> None:
        self.root, self.files = root, files
        self.classes, self.ignore_index = classes, ignore_index

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        from timm_parallel.data.decode import decode

        path, name = self.files[index]
        image, mask = decode(path), read_mask(self.root / name, self.ignore_index)
        if image.shape[1:] != mask.shape:
            raise UnreadableImageError(
                f"{path}: the image has {image.shape[2]}x{image.shape[1]} pixels, but its mask "
                f"{name} has {mask.shape[1]}x{mask.shape[0]}; make them equal"
            )
        largest = int(mask.masked_fill(mask == IGNORED, 0).max())
        if largest >= self.classes:
            raise UnreadableImageError(
                f"{self.root / name}: has a pixel of class {largest}, but data.kwargs.classes only "
                f"names the classes 0 to {self.classes - 1}; add a name, or set "
                f"data.kwargs.ignore_index={largest}"
            )
        return image, mask


def read_mask(path: Path, ignore_index: int = IGNORED) -> Tensor:
    """Read a mask file to a uint8 tensor [H, W] of class numbers.

    The mask is a gray image or has a palette. Pixels with the value `ignore_index` get the value
    255, which stands for no class.
    """
    import numpy as np
    import torch

    from timm_parallel.data.decode import open_image

    try:
        with open_image(path.read_bytes()) as mask:
            mode, numbers = mask.mode, torch.from_numpy(np.array(mask))
    except MemoryError:
        raise
    # Catch every exception, because Pillow raises many types of them for a damaged file.
    except Exception as error:
        raise UnreadableImageError(f"{path}: not a readable mask ({error}); replace it") from None
    if mode not in ("L", "P", "1"):
        raise UnreadableImageError(
            f"{path}: the mask has the mode {mode}; expected a PNG of class numbers, with 8 bits "
            "per pixel, gray or with a palette"
        )
    numbers = numbers.byte()
    return numbers.masked_fill(numbers == ignore_index, IGNORED)


def _class_names(config: DataConfig) -> list[str]:
    names = config.kwargs.get("classes")
    if not isinstance(names, list) or len(names) < 2:
        raise ValueError(
            f"data.kwargs.classes={names}: expected a list with one name per class number, e.g. "
            "+data.kwargs.classes=[background,road]"
        )
    return [str(name) for name in names]


def _list_masks(config: DataConfig) -> MaskListing:
    root = Path(str(config.root))
    if config.val_fraction is not None:
        return divided(_pairs(root, root), root, config)
    return {split: _pairs(root, root / split) for split in SPLITS if (root / split).is_dir()}


def _pairs(root: Path, folder: Path) -> list[tuple[Path, str]]:
    """Pair each file in `folder`/images with the file in `folder`/masks that has the same name.

    The suffix may differ. Raises ValueError if a file has no partner.
    """
    images, masks = folder / "images", folder / "masks"
    for needed in (images, masks):
        if not needed.is_dir():
            raise ValueError(
                f"data.root={root}: no folder {needed}; expected the folders images and masks"
            )
    image_of, mask_of = _by_stem(images), _by_stem(masks)
    for of_one, of_other, other in ((image_of, mask_of, masks), (mask_of, image_of, images)):
        if missing := [str(path) for stem, path in of_one.items() if stem not in of_other]:
            raise ValueError(
                f"data.root={root}: for {plural(len(missing), 'file')} ({first(missing)}), the "
                f"folder {other} has no file of the same name; add the missing files"
            )
    return [(path, str(mask_of[stem].relative_to(root))) for stem, path in image_of.items()]


def _by_stem(folder: Path) -> dict[Path, Path]:
    files: dict[Path, Path] = {}
    for path in image_files(folder):
        other = files.setdefault(path.relative_to(folder).with_suffix(""), path)
        if other is not path:
            raise ValueError(
                f"{other} and {path}: two images have the same name apart from the suffix; rename "
                "one of them"
            )
    return files
