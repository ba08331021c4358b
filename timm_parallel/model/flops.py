"""Count the floating-point operations of a training step, and the memory that its backward pass
needs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

if TYPE_CHECKING:
    from timm_parallel.batch import Batch
    from timm_parallel.keys import ResolvedParallel
    from timm_parallel.parallel.networks import Networks
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

    `batch`: on the meta device (`stretched`). `networks`: must not be wrapped, sharded or
    compiled; they are not changed. A copy of them without storage runs on the meta device, which
    computes only shapes. So the count needs no memory for the batch, and draws no random numbers.
    Returns None if torch cannot count the FLOPs.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), flop_counter() as counter:
            # Copy the task too, because it may count samples in its attributes.
            copies, task = without_storage(networks), copy.copy(task)
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


def _phase_costs(
    task: Task[Any], networks: Networks, batch: Batch, phase: str, excluding: list[Tensor]
) -> tuple[int, int]:
    """Run a forward and a backward pass of a phase, and return their FLOPs and the memory of saved
    tensors in bytes.

    Saved tensors are those that autograd keeps for the backward pass, apart from the tensors in
    `excluding`, such as weights. The tensors may be real or fake.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in excluding}
    # Keep the storages alive, because the identity of a freed storage may be used again.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with flop_counter() as counter, hooks:
        task.losses(networks, batch, phase)[0].sum().backward()
    return int(counter.get_total_flops()), sum(storage.nbytes() for storage in saved.values())


def measure_step(
    parallel: ResolvedParallel,
    task: Task[Any],
    networks: Networks,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    averaged: Sequence[nn.Module],
) -> tuple[int, int]:
    """Measure the FLOPs and the memory of one training step of one device, on fake tensors. Return
    (FLOPs of the forward and backward passes, bytes of the tensors at the end of the forward pass
    of the largest phase).

    Memory is highest there. Under dp, the bytes are those of device 0, which needs the most. Whole
    blocks that fsdp gathers, and copies of gradients for ddp, are not counted.

    `optimizers`: one for each phase of the task. `batch`: that of one device. `averaged`: networks
    of which the run keeps an average besides those of the task.
    """
    networks.train()
    weights = [*networks.parameters(), *networks.buffers()]
    averages = [t for module in averaged for t in (*module.parameters(), *module.buffers())]
    fields = [field for field in tree_leaves(batch.fields) if isinstance(field, Tensor)]
    flops = activations = gradients = 0
    for phase, optimizer in zip(task.phases, optimizers, strict=True):
        of_phase = _phase_costs(task, networks, batch, phase, excluding=[*weights, *fields])
        flops, activations = flops + of_phase[0], max(activations, of_phase[1])
        optimizer.step()
        own = (p for group in optimizer.param_groups for p in group["params"])
        gradients = max(gradients, _size(p.grad for p in own if p.grad is not None))
    states = (
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    parts = parallel.devices if parallel.traits.shards else 1
    kept = _size(weights) + gradients + _size(states) + _size(averages)
    return flops, kept // parts + activations + _size(fields)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
