"""Images and labels in one NumPy file, with the names that MedMNIST (https://medmnist.com/) uses.

    cp examples/npz.py src/data/
    python train.py data.name=src.data.npz.Npz data.image_size=null data.root=/data/medmnist.npz

conf/data/npz.yaml with these keys turns this into `data=npz`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from src.schema import DataConfig
from timm_parallel import ImageDataset, InMemory


class Npz(ImageDataset):
    """`train_images` [N, H, W] or [N, H, W, C] in uint8 and `train_labels` [N]; the same for val
    and, if present, test.
    """

    def __init__(self, config: DataConfig) -> None:
        if config.root is None or not Path(config.root).is_file():
            raise ValueError(f"data.root={config.root}: expected a .npz file")
        with np.load(config.root) as arrays:
            names = [name for name in ("train", "val", "test") if f"{name}_images" in arrays]
            splits = {name: self._split(arrays, name) for name in names}
        self.train, self.val, self.test = splits["train"], splits["val"], splits.get("test")
        _, self.in_chans, self.image_size, _ = self.train.images.shape
        if config.image_size not in (None, self.image_size):
            raise ValueError(
                f"data.image_size={config.image_size}: the images have {self.image_size} pixels; "
                "use null"
            )
        self.target_names = [str(label) for label in range(int(self.train.labels.max()) + 1)]

    def _split(self, arrays: Any, name: str) -> InMemory:
        images, labels = (
            torch.from_numpy(arrays[f"{name}_{kind}"]) for kind in ("images", "labels")
        )
        # A gray image has no axis for its channel.
        images = images[..., None] if images.ndim == 3 else images
        return InMemory(images.permute(0, 3, 1, 2).contiguous(), labels.flatten().long())
