"""Training loop that an expert would write by hand. scripts/maintain/bench.py compares train.py
with this loop.

    python scripts/maintain/bench_loop.py --steps 100
    torchrun --nproc-per-node 2 scripts/maintain/bench_loop.py --steps 100

The script prints one line of JSON: time of the first step, images per second after the warm-up, and
peak memory.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator

import timm
import timm.optim
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Images and labels.
Batch = tuple[torch.Tensor, torch.Tensor]
AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--kwargs", type=json.loads, default={})
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="images per step over all processes"
    )
    parser.add_argument("--steps", type=int, default=100, help="a multiple of --log-every")
    parser.add_argument("--log-every", type=int, default=50, help="the first so many are not timed")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--optimizer", choices=["fused", "default"], default="fused")
    parser.add_argument("--precision", choices=list(AUTOCAST), default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    return parser.parse_args(arguments)


def data(given: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (given.samples, 3, given.image_size, given.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8), torch.randint(0, 10, (given.samples,))


def model_and_optimizer(
    given: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = timm.create_model(given.model, num_classes=10, **given.kwargs).to(device).train()
    if given.channels_last:
        model = model.to(memory_format=torch.channels_last)
    # Norms and biases get no weight decay, as in train.py.
    groups = timm.optim.param_groups_weight_decay(model, 0.05)
    return model, torch.optim.AdamW(groups, lr=1e-3, fused=given.optimizer == "fused" or None)


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


def prepare(given: argparse.Namespace) -> torch.device:
    """Set up the device of this process, and the process group if torchrun started it."""
    torch.manual_seed(0)
    if given.accelerator == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def layout(given: argparse.Namespace) -> torch.memory_format:
    return torch.channels_last if given.channels_last else torch.contiguous_format


def batches(given: argparse.Namespace, device: torch.device) -> Iterator[Batch]:
    """Yield the normalized batches of this process, epoch after epoch."""
    images, labels = data(given)
    mean = torch.full((1, 3, 1, 1), 127.5, device=device)
    size = given.batch_size // WORLD
    gather = Gather(size, device.type == "cuda")
    whole = given.samples - given.samples % given.batch_size
    while True:
        order = torch.randperm(given.samples)[:whole][RANK::WORLD]
        for indices in order.split(size):
            batch, targets = gather(images, labels, indices, device)
            yield batch.sub(mean).div_(127.5).contiguous(memory_format=layout(given)), targets


def train(
    given: argparse.Namespace, device: torch.device, batches: Iterator[Batch]
) -> Iterator[int]:
    """Train, and yield the number of each step after which the device is idle: the first step, and
    each step that is logged.
    """
    model, optimizer = model_and_optimizer(given, device)
    wrapped = torch.compile(model) if given.compile else model
    if WORLD > 1:
        wrapped = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    writer = SummaryWriter(given.tensorboard) if given.tensorboard and RANK == 0 else None
    for step, (inputs, targets) in enumerate(batches, 1):
        with torch.autocast(
            device.type, AUTOCAST[given.precision], enabled=given.precision != "fp32"
        ):
            loss = cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1 or step % given.log_every == 0:
            # Reading the loss waits for the device.
            value = loss.item()
            if writer is not None:
                writer.add_scalar("train/loss", value, step)
            yield step


def main() -> None:
    given = options()
    device = prepare(given)
    began = first = 0.0
    for step in train(given, device, batches(given, device)):
        if step == 1:
            first = time.time()
        if step == given.log_every:
            began = time.perf_counter()
        if step == given.steps:
            break
    rate = given.batch_size * (given.steps - given.log_every) / (time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    if RANK == 0:
        print(json.dumps({"first_step_at": first, "images_per_sec": rate, "peak_mib": peak}))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
