"""Evaluate sharded networks on ranks that have different numbers of batches.

Each forward pass of a sharded network needs all ranks, so a rank without a batch must still take
part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from timm_parallel.faults.liveness import COUNTING, EVALUATING, liveness
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.networks import Networks


class LockstepNetworks(Networks):
    """Sharded networks that start each forward pass on all ranks at the same time.

    After its last batch, a rank must call `finish`.
    """

    def __init__(self, networks: Networks, group: ProcessGroup, device: torch.device) -> None:
        super().__init__({name: _Member(network) for name, network in networks.items()})
        self._group, self._device = group, device
        for name, member in self.items():
            assert isinstance(member, _Member)
            # Hide the reference from torch, which would take it for a child.
            member.run = lambda inputs, name=name: self._take_turns(name, inputs)

    def finish(self) -> None:
        """Take part in the forward passes of the other ranks until all of them have finished. Then
        free the gathered parameters. All ranks must call this function.
        """
        while self._run_requested(None, ()) is not None:
            pass
        for module in self.modules():
            getattr(module, "reshard", lambda: None)()

    def _take_turns(self, name: str, inputs: tuple[Any, ...]) -> Any:
        """Run a network on inputs, and meanwhile the networks that earlier ranks request."""
        while (result := self._run_requested(name, inputs)) is not None:
            is_own, outputs = result
            if is_own:
                return outputs
        raise AssertionError("this rank requests a network, so there is a request")

    def _run_requested(self, name: str | None, inputs: tuple[Any, ...]) -> tuple[bool, Any] | None:
        """Gather which network each rank requests, and run that of the first rank with a request:
        on the inputs of this rank if it requests the same network, else on zeros.

        Returns whether this rank requested it, and its outputs; None if no rank requests a network.
        """
        leaves, spec = tree_flatten(inputs)
        shapes = [
            (list(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        liveness.at(COUNTING)
        requests = [r for r in self._group.gather([name, shapes] if name else None) if r]
        liveness.at(EVALUATING)
        if not requests:
            return None
        chosen, of_first = requests[0]
        is_own = chosen == name
        if not is_own:
            leaves = [
                torch.zeros(leaf[0], dtype=getattr(torch, leaf[1]), device=self._device)
                if isinstance(leaf, list)
                else leaf
                for leaf in of_first
            ]
            spec = tree_flatten(tuple(leaves))[1]
        member = self[chosen]
        assert isinstance(member, _Member)
        # Do not use inference mode, because parameters that were gathered in it cannot be trained
        # later.
        with torch.inference_mode(False), torch.no_grad():
            return is_own, member.network(*tree_unflatten(leaves, spec))


class _Member(nn.Module):
    """A network whose forward pass waits for the other ranks."""

    run: Any

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        return self.run(inputs)
