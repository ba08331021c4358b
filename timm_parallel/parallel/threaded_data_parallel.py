"""DataParallel over CPU threads, because without GPUs torch's class silently becomes the bare
module.
"""

# The backward pass runs in one thread, so speed and memory say nothing about GPUs. Replicas share
# the process's random generator, so dropout is not reproducible.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class ThreadedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel over `replicas` CPU threads, each of which computes with `threads` cores."""

    def __init__(self, module: nn.Module, replicas: int, threads: int, dim: int) -> None:
        # nn.DataParallel's constructor would find no GPU and skip the rest.
        nn.Module.__init__(self)
        self.module, self.dim = module, dim
        self.device_ids, self.output_device, self.src_device_obj = (
            list(range(replicas)),
            0,
            torch.device("cpu"),
        )
        self._pool = ThreadPoolExecutor(replicas, "replica", torch.set_num_threads, (threads,))

    def scatter(self, inputs: Sequence[Tensor], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split every input into one chunk per replica: (a tuple of inputs for each, no keyword
        arguments).
        """
        chunks = list(
            zip(*(tensor.chunk(len(device_ids), self.dim) for tensor in inputs), strict=True)
        )
        return chunks, [{} for _ in chunks]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Copy the module. Copied parameters pass gradients back; the first copy shares the
        module's buffers.
        """
        # As torch.nn.parallel.replicate does on GPUs, so the first replica's BatchNorm statistics
        # persist.
        return [_replica(module, first=index == 0) for index in range(len(device_ids))]

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        # The mode is per thread, like autocast, which the module enters itself.
        grad = torch.is_grad_enabled()

        def apply(replica: nn.Module, chunk: tuple[Tensor, ...]) -> Any:
            with torch.set_grad_enabled(grad):
                return replica(*chunk)

        return list(self._pool.map(apply, replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate the outputs of the replicas, tensor by tensor. Scalars become a vector over
        the replicas.
        """

        def concatenate(*parts: Tensor) -> Tensor:
            return torch.cat(
                [part.view(1) if part.dim() == 0 else part for part in parts], self.dim
            )

        return tree_map(concatenate, *outputs)


def _replica(module: nn.Module, first: bool) -> nn.Module:
    replica = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, first)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            # Not a leaf, so no longer a Parameter: gradients flow through the clone to the
            # original.
            setattr(
                replica, name, parameter.clone() if torch.is_grad_enabled() else parameter.detach()
            )
    for name, buffer in module._buffers.items():
        if buffer is not None:
            replica._buffers[name] = buffer if first else buffer.clone()
    return replica
