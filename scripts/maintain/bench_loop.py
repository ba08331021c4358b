"""Training loop that an expert would write by hand for one device. bench_rounds.py compares
train.py with this loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import timm
import timm.optim
import torch
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from scripts.maintain.bench_speed import Workload

# Images and labels.
Batch = tuple[torch.Tensor, torch.Tensor]


def model_and_optimizer(
    workload: Workload, device: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = timm.create_model(workload.model, num_classes=10, **workload.kwargs)
    model = model.to(device).to(memory_format=layout(workload)).train()
    # Norms and biases get no weight decay, as in train.py.
    groups = timm.optim.param_groups_weight_decay(model, 0.05)
    return model, torch.optim.AdamW(groups, lr=1e-3, fused=True)


class Gather:
    """Copies the rows of a batch to a device through pinned memory. The pinned memory is used again
    for later batches, because allocating it for every copy would take time.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        size: int,
        device: torch.device,
        depth: int = 3,
    ) -> None:
        self.images, self.labels, self.device, self.count = images, labels, device, 0
        # Memory for a batch, and the event that its last copy has ended.
        self.slots = [
            (
                torch.empty((size, *images.shape[1:]), dtype=images.dtype, pin_memory=True),
                torch.empty(size, dtype=labels.dtype, pin_memory=True),
                torch.cuda.Event(),
            )
            for _ in range(depth if device.type == "cuda" else 0)
        ]

    def __call__(self, indices: torch.Tensor) -> Batch:
        if not self.slots:
            return self.images.index_select(0, indices), self.labels.index_select(0, indices)
        images, labels, copied = self.slots[self.count % len(self.slots)]
        self.count += 1
        # Wait until the previous copy from this buffer, three batches ago, has ended.
        copied.synchronize()
        torch.index_select(self.images, 0, indices, out=images)
        torch.index_select(self.labels, 0, indices, out=labels)
        moved = (
            images.to(self.device, non_blocking=True),
            labels.to(self.device, non_blocking=True),
        )
        copied.record()
        return moved


def prepare(accelerator: str) -> torch.device:
    """Set up the device of this process."""
    torch.manual_seed(0)
    if accelerator == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    return torch.device(accelerator)


def layout(workload: Workload) -> torch.memory_format:
    return torch.channels_last if workload.channels_last else torch.contiguous_format


def batches(workload: Workload, device: torch.device) -> Iterator[Batch]:
    """Yield normalized batches of random images, epoch after epoch."""
    shape = (workload.samples, 3, workload.pixels, workload.pixels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    labels = torch.randint(0, 10, (workload.samples,))
    mean = torch.full((1, 3, 1, 1), 127.5, device=device)
    gather = Gather(images, labels, workload.batch, device)
    while True:
        for indices in torch.randperm(workload.samples).split(workload.batch):
            batch, targets = gather(indices)
            yield batch.sub(mean).div_(127.5).contiguous(memory_format=layout(workload)), targets


def train(
    workload: Workload,
    device: torch.device,
    batches: Iterator[Batch],
    folder: Path,
    compiled: bool = False,
) -> Iterator[int]:
    """Train, and yield the number of each step after which the device is idle: the first step, and
    each step that is logged to TensorBoard in the folder.
    """
    model, optimizer = model_and_optimizer(workload, device)
    wrapped = torch.compile(model) if compiled else model
    writer = SummaryWriter(str(folder))
    for step, (inputs, targets) in enumerate(batches, 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=workload.precision == "bf16"):
            loss = cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % workload.steps == 0:
            # Reading the loss waits for the device.
            writer.add_scalar("train/loss", loss.item(), step)
            yield step
