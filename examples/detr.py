"""A small DETR (Carion et al. 2020, arXiv:2005.12872): boxes of any number per image, divided by
the number of boxes of the whole step.

    cp examples/detr.py src/tasks/ && cp examples/detr.yaml conf/experiment/
    python train.py experiment=detr

The dataset draws zero to four bright rectangles on noise.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.ops import box_iou

from src.schema import DataConfig
from src.tasks.images import ImageTask
from timm_parallel import Batch, ImageDataset, Metric, to_double

SIDE, QUERIES, MOST = 32, 8, 4


def draw_sample(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw an image, and its boxes [K, 4]: left, top, right, bottom in shares of the image."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 80, (1, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    number = int(torch.randint(0, MOST + 1, (), generator=draw))
    starts = torch.randint(0, SIDE - 8, (number, 2), generator=draw)
    ends = starts + torch.randint(4, 9, (number, 2), generator=draw)
    for (left, top), (right, bottom) in zip(starts.tolist(), ends.tolist(), strict=True):
        image[:, top:bottom, left:right] = 200
    return image, {"boxes": torch.cat([starts, ends], 1) / SIDE}


class Rectangles(ImageDataset):
    targets = ("boxes",)
    target_names = ["rectangle"]
    in_chans, image_size = 1, SIDE

    def __init__(self, config: DataConfig, num_samples: int = 2048) -> None:
        self.train = [draw_sample(seed) for seed in range(num_samples)]
        self.val = [draw_sample(10**6 + seed) for seed in range(256)]


class SmallDetr(nn.Module):
    """Maps images to QUERIES rows each, [B, QUERIES, 5]: a score, then center and size."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 64) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(in_chans, 32, 4, 4), nn.GELU(), nn.Conv2d(32, width, 3, 1, 1), nn.Flatten(2)
        )
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // 4) ** 2, width))
        self.queries = nn.Parameter(torch.randn(QUERIES, width))
        layer = nn.TransformerDecoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        memory = self.backbone(images).transpose(1, 2) + self.positions
        rows: Tensor = self.head(self.decoder(self.queries.expand(len(images), -1, -1), memory))
        return rows


def corners(rows: Tensor) -> Tensor:
    """Return the boxes of rows, [Q, 4]: left, top, right, bottom."""
    center, half = rows[:, 1:3].sigmoid(), rows[:, 3:].sigmoid() / 2
    return torch.cat([center - half, center + half], 1)


def match(rows: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Assign each box [K, 4] to one row; return the numbers of rows and boxes, [K] each."""
    cost = torch.cdist(corners(rows), boxes, p=1) - rows[:, :1].sigmoid()
    of_rows, of_boxes = linear_sum_assignment(cost.detach().double().cpu().numpy())
    device = rows.device
    return torch.as_tensor(of_rows, device=device), torch.as_tensor(of_boxes, device=device)


def loss_of(rows: Tensor, boxes: Tensor) -> Tensor:
    """Compute the loss of an image, summed over its boxes."""
    of_rows, of_boxes = match(rows, boxes)
    is_box = torch.zeros(QUERIES, device=rows.device).index_fill(0, of_rows, 1.0)
    scores = binary_cross_entropy_with_logits(rows[:, 0], is_box, reduction="sum")
    return 5 * (corners(rows)[of_rows] - boxes[of_boxes]).abs().sum() + scores


def overlaps(task: Any, outputs: Tensor, batch: Batch) -> Tensor:
    """Sum the overlaps of boxes and their rows, and count the boxes: [2]."""
    total = torch.zeros(2, device=outputs.device)
    for rows, boxes in zip(outputs, batch.boxes, strict=True):
        of_rows, of_boxes = match(rows, boxes)
        pairs = box_iou(corners(rows)[of_rows], boxes[of_boxes])
        total += torch.stack([pairs.diag().sum(), pairs.new_tensor(len(boxes))])
    return to_double(total)


class Detr(ImageTask):
    """Finds rectangles."""

    target = "boxes"
    metrics = {"iou": Metric(overlaps, lambda sums, samples: float(sums[0] / sums[1]))}
    headline = "iou"

    def collate(self, targets: Any) -> dict[str, Any]:
        return {"boxes": [target["boxes"] for target in targets]}

    def weight(self, batch: Batch) -> int:
        return sum(map(len, batch.boxes))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = zip(networks.model(batch.image), batch.boxes, strict=True)
        return torch.stack([loss_of(rows, boxes) for rows, boxes in pairs]), {}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        outputs: Tensor = networks.model(batch.image)
        return outputs
