"""Count the floating-point operations of a step, and the memory of the tensors that its backward
pass needs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

Shape = tuple[int, ...]
log = logging.getLogger(__name__)


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter, extended by a formula for fused attention on a CPU."""

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(_gradient: Shape, *shapes: Any, **__: Any) -> int:
        # Counted as without a fused kernel: scores that the kernel recomputes do not count.
        return 2 * forward(*shapes)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(
        display=False, custom_mapping={attention: forward, attention_backward: backward}
    )


def count_flops(model: nn.Module, images: Shape) -> int | None:
    """Count the FLOPs of a forward and a backward pass over a batch of shape `images`; None if they
    cannot be counted.

    `model`: not wrapped, not sharded and not compiled. It stays as it is: a copy without storage
    runs on the meta device, which computes shapes only. So neither the size of the batch nor the
    device matters, and nothing is drawn.
    """
    tensors = [*model.parameters(), *model.buffers()]
    # Tensors in the memo are not copied.
    memo = {
        id(tensor): tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for tensor in tensors
    }
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), flop_counter() as counter:
            outputs = copy.deepcopy(model, memo)(torch.empty(images))
            outputs.sum().backward()
        return int(counter.get_total_flops())
    # A model of your own may do what the meta device cannot, such as reading a value of a tensor.
    except Exception as error:
        log.debug("FLOPs were not counted: %s: %s", type(error).__name__, error)
        return None


def step_costs(compute_loss: Callable[[], Tensor], excluding: list[Tensor]) -> tuple[int, int]:
    """Run a forward and a backward pass, on real or fake tensors. Return its FLOPs, and the bytes
    of the tensors that autograd saves for the backward pass, without those of `excluding`.
    """
    with flop_counter() as counter, saved_for_backward(excluding) as saved:
        compute_loss().backward()
    return int(counter.get_total_flops()), sum(storage.nbytes() for storage in saved.values())


@contextmanager
def saved_for_backward(excluding: list[Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect, by identity, the storages that autograd saves for the backward pass of the `with`
    block.

    Storages of the tensors `excluding`, such as weights, are left out.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in excluding}
    # Holds the storages, because the id of a freed one may be used again.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
