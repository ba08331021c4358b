"""Classification with some images solarized, after the augmentations that the keys ask for.

    cp examples/solarized.py src/tasks/
    python train.py train.task=src.tasks.solarized.Solarized data.augment.scale=[0.5,1.0]

The generators of torch, random and numpy are seeded for each image before a transform is called.
"""

from typing import Any

from torchvision.transforms import v2

from src.data.transforms import OnImage, train_transform
from src.tasks.classification import Classification


class Solarized(Classification):
    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        data = self.config.data
        usual = train_transform(data.augment, size, resize, mean, data.crop_mode)
        return OnImage(v2.Compose([usual or v2.Identity(), v2.RandomSolarize(128, p=0.2)]))
