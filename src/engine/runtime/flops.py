"""Counter of floating-point operations, extended by fused attention on a CPU, for which torch has no formula."""

from __future__ import annotations

from typing import Any

import torch
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
