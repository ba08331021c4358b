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

import timm
import timm.optim
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--kwargs", type=json.loads, default={})
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="images per step over all processes"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--optimizer", choices=["fused", "default"], default="fused")
    parser.add_argument("--precision", choices=list(AUTOCAST), default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    return parser.parse_args()


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


def report(given: argparse.Namespace, first: float, seconds: float) -> None:
    cuda = given.accelerator == "cuda"
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    rate = given.batch_size * (given.steps - given.warm_up) / seconds
    print(json.dumps({"first_step_at": first, "images_per_sec": rate, "peak_mib": peak / 2**20}))


def main() -> None:
    given = options()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = given.accelerator == "cuda"
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if cuda
        else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    images, labels = data(given)
    mean = torch.full((1, 3, 1, 1), 127.5, device=device)
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    model, optimizer = model_and_optimizer(given, device)
    wrapped = torch.compile(model) if given.compile else model
    if world > 1:
        wrapped = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    writer = SummaryWriter(given.tensorboard) if given.tensorboard and rank == 0 else None

    gather = Gather(given.batch_size // world, cuda)
    step, began, first = 0, 0.0, 0.0
    whole = given.samples - given.samples % given.batch_size
    while step < given.steps:
        for indices in torch.randperm(given.samples)[:whole][rank::world].split(
            given.batch_size // world
        ):
            batch, targets = gather(images, labels, indices, device)
            inputs = batch.sub(mean).div_(127.5).contiguous(memory_format=layout)
            with torch.autocast(
                device.type, AUTOCAST[given.precision], enabled=given.precision != "fp32"
            ):
                loss = cross_entropy(wrapped(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if cuda and step in (1, given.warm_up, given.steps):
                torch.cuda.synchronize()
            if step == 1:
                first = time.time()
            if step == given.warm_up:
                began = time.perf_counter()
            if step % given.log_every == 0 and writer is not None:
                writer.add_scalar("train/loss", loss.item(), step)
            if step == given.steps:
                break
    if rank == 0:
        report(given, first, time.perf_counter() - began)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
