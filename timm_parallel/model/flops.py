"""Count the floating-point operations of a training step, and the memory that its backward pass
needs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

if TYPE_CHECKING:
    from timm_parallel.batch import Batch
    from timm_parallel.task import Task


Shape = tuple[int, ...]
log = logging.getLogger(__name__)


def flop_counter() -> FlopCounterMode:
    """Build torch's FLOP counter, extended by a formula for fused attention on a CPU."""

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(_gradient: Shape, *shapes: Any, **__: Any) -> int:
        # In the backward pass, a fused attention kernel computes the scores again. Do not count
        # this second computation.
        return 2 * forward(*shapes)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(
        display=False, custom_mapping={attention: forward, attention_backward: backward}
    )


def count_flops(task: Task[Any], networks: nn.Module, batch: Batch) -> int | None:
    """Count the FLOPs of the forward and backward passes of all phases of a task over a batch.

    `batch`: on the meta device (`Batch.stretched`). `networks`: must not be wrapped, sharded or
    compiled; they are not changed. A copy of them without storage runs on the meta device, which
    computes only shapes. So the count needs no memory for the batch, and draws no random numbers.
    Returns None if torch cannot count the FLOPs.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), flop_counter() as counter:
            copies = without_storage(networks)
            for phase in task.phases:
                losses, _ = task.losses(copies, batch, phase)
                losses.sum().backward()
        return int(counter.get_total_flops())
    # Catch every exception. A model may need what the meta device lacks, such as the values of a
    # tensor.
    except Exception as error:
        log.debug("FLOPs were not counted: %s: %s", type(error).__name__, error)
        return None


def without_storage(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, where tensors have shapes and no values."""
    # deepcopy takes these tensors without storage from its memo, instead of copying the real ones.
    memo = {
        id(tensor): tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for tensor in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, memo)


def step_costs(compute_loss: Callable[[], Tensor], excluding: list[Tensor]) -> tuple[int, int]:
    """Run a forward and a backward pass, and return their FLOPs and the memory of saved tensors in
    bytes.

    Saved tensors are those that autograd keeps for the backward pass, apart from the tensors in
    `excluding`. The tensors may be real or fake.
    """
    with flop_counter() as counter, saved_for_backward(excluding) as saved:
        compute_loss().backward()
    return int(counter.get_total_flops()), sum(storage.nbytes() for storage in saved.values())


@contextmanager
def saved_for_backward(excluding: list[Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect the storages of all tensors that autograd saves for a backward pass in the `with`
    block.

    The result is a dictionary from the identity of a storage to the storage. Storages of the
    tensors in `excluding`, such as weights, are left out.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in excluding}
    # Keep the storages alive, because the identity of a freed storage may be used again.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
