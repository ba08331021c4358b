"""DataParallel over CPU threads, for machines without GPUs.

Without GPUs, torch's own DataParallel would silently run the model on one device.
"""

# The backward pass runs in one thread, so speed and memory say nothing about dp on GPUs. The
# replicas share one random generator, so dropout is not reproducible.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class ThreadedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel over `replicas` CPU threads. Each of them computes with `threads` cores."""

    def __init__(self, module: nn.Module, replicas: int, threads: int, dim: int) -> None:
        # Skip the constructor of nn.DataParallel, which would find no GPU and set up only one
        # device.
        nn.Module.__init__(self)
        self.module, self.dim = module, dim
        self.device_ids, self.output_device, self.src_device_obj = (
            list(range(replicas)),
            0,
            torch.device("cpu"),
        )
        self._pool = ThreadPoolExecutor(replicas, "replica", torch.set_num_threads, (threads,))

    def scatter(self, inputs: Sequence[Tensor], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split every input into one chunk per replica.

        Returns a list with a tuple of inputs per replica, and a list of empty keyword arguments.
        """
        chunks = list(
            zip(*(tensor.chunk(len(device_ids), self.dim) for tensor in inputs), strict=True)
        )
        return chunks, [{} for _ in chunks]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Copy the module once per replica.

        The backward pass adds the gradients of all copies to the original parameters. The first
        copy shares the buffers of the original module.
        """
        # The first replica shares its buffers with the original, as on GPUs, so that its BatchNorm
        # statistics persist.
        return [_replica(module, first=index == 0) for index in range(len(device_ids))]

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        # Pass on whether gradients are enabled, because PyTorch stores this per thread. Autocast is
        # also per thread, but the module enters it by itself.
        grad = torch.is_grad_enabled()

        def apply(replica: nn.Module, chunk: tuple[Tensor, ...]) -> Any:
            with torch.set_grad_enabled(grad):
                return replica(*chunk)

        return list(self._pool.map(apply, replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate the outputs of the replicas, tensor by tensor. Scalars become a vector with
        one entry per replica.
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
            # Store a clone of the parameter, through which gradients flow to the original. The
            # clone is not a leaf tensor, so it cannot be a Parameter.
            setattr(
                replica, name, parameter.clone() if torch.is_grad_enabled() else parameter.detach()
            )
    for name, buffer in module._buffers.items():
        if buffer is not None:
            replica._buffers[name] = buffer if first else buffer.clone()
    return replica
