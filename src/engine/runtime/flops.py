"""Count the floating-point operations of a step, and the memory of the tensors that its backward pass needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

Shape = tuple[int, ...]


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter, extended by a formula for fused attention on a CPU."""

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(_gradient: Shape, *shapes: Any, **__: Any) -> int:
        # Counted as without a fused kernel: scores that the kernel recomputes do not count.
        return 2 * forward(*shapes)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(display=False, custom_mapping={attention: forward, attention_backward: backward})


@contextmanager
def saved_for_backward(excluding: list[Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect, by identity, the storages that autograd saves for the backward pass of the `with` block.

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
