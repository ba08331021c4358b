"""A checkpoint's contents taken apart for sending, and put together again: a shape that JSON can say, and tensors in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def pack(state: Any, tensors: list[Tensor]) -> list[Any]:
    """The shape of nested dicts, lists and tuples; their tensors are appended to `tensors`. Keys keep their types."""
    if isinstance(state, Tensor):
        tensors.append(state)
        return ["tensor", str(state.dtype).removeprefix("torch."), list(state.shape)]
    if isinstance(state, dict):
        return ["dict", [[key, pack(value, tensors)] for key, value in state.items()]]
    if isinstance(state, list | tuple):
        return ["tuple" if isinstance(state, tuple) else "list", [pack(value, tensors) for value in state]]
    return ["value", state]


def unpack(shape: list[Any], receive: Callable[[torch.dtype, list[int]], Tensor]) -> Any:
    """The state again; `receive` is called for each tensor in the order in which `pack` met them."""
    kind, *rest = shape
    if kind == "tensor":
        return receive(getattr(torch, rest[0]), rest[1])
    if kind == "dict":
        return {key: unpack(value, receive) for key, value in rest[0]}
    if kind in ("list", "tuple"):
        items = [unpack(value, receive) for value in rest[0]]
        return tuple(items) if kind == "tuple" else items
    return rest[0]


def as_bytes(tensor: Tensor) -> Tensor:
    """A view [bytes] of a contiguous tensor: what every backend can send, whatever the dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
