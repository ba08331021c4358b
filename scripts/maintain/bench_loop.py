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

    def __init__(self, size: int, cuda: bool, depth: int = 3) -> None:
        self.size, self.cuda, self.count = size, cuda, 0
        self.slots: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None] = [
            None
        ] * depth

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        indices: torch.Tensor,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.cuda:
            return images.index_select(0, indices), labels.index_select(0, indices)
        slot = self.count % len(self.slots)
        self.count += 1
        if self.slots[slot] is None:
            shape = (self.size, *images.shape[1:])
            pinned = (
                torch.empty(shape, dtype=torch.uint8, pin_memory=True),
                torch.empty(self.size, dtype=labels.dtype),
            )
            self.slots[slot] = (pinned[0], pinned[1].pin_memory(), torch.cuda.Event())
        buffers = self.slots[slot]
        assert buffers is not None
        pinned_images, pinned_labels, copied = buffers
        # Wait until the previous copy from this buffer, three batches ago, has ended.
        copied.synchronize()
        torch.index_select(images, 0, indices, out=pinned_images)
        torch.index_select(labels, 0, indices, out=pinned_labels)
        moved = (
            pinned_images.to(device, non_blocking=True),
            pinned_labels.to(device, non_blocking=True),
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
    gather = Gather(workload.batch, device.type == "cuda")
    while True:
        for indices in torch.randperm(workload.samples).split(workload.batch):
            batch, targets = gather(images, labels, indices, device)
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
