"""Strategy fsdp: FSDP2, in which every rank holds a part of every parameter.

During a step, the parameters are gathered for one block of the model, such as a transformer layer,
after the other. Gradients, optimizer state and averaged weights are sharded too. Checkpoints hold
whole tensors, as under every strategy. Each forward pass needs all ranks, so a rank without a batch
to evaluate still takes part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from timm_parallel.faults.liveness import COUNTING, EVALUATING, FORWARD, GATHERING, liveness
from timm_parallel.parallel.distributed import Distributed
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.networks import LOSS, Networks, PhaseStep

# Modules that only contain other modules. A forward pass may call these inner modules directly, so
# fsdp must not treat the container as a block.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of a model, whose parameters fsdp gathers one block after the other.

    A method `shard_blocks()` of the model overrides the search. In a timm model, a block is a
    module in one of timm's layer groups whose class occurs at least twice. In other models it is a
    module with children that is no container such as nn.Sequential. Layers outside of all blocks,
    such as the head, are gathered for the whole step.
    """
    if hasattr(model, "shard_blocks"):
        return list(model.shard_blocks())
    group_of = groups_of(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    blocks = [
        block for block in _blocks_in(model, "", group_of) if not _shares_parameters(block, uses)
    ]
    if not group_of:
        return blocks
    # Leave out stems, whose class occurs once. A stem may return a view to which the model adds a
    # position embedding in place, and FSDP2 does not allow this.
    classes = Counter(type(block) for block in blocks)
    return [block for block in blocks if classes[type(block)] > 1]


def _blocks_in(module: nn.Module, prefix: str, group_of: dict[str, int]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        groups = {group_of.get(path + inner, 0) for inner, _ in child.named_parameters()}
        # Skip a single layer, because gathering such a small layer alone costs more than it saves.
        if not groups or next(child.children(), None) is None:
            continue
        if groups_of(child):
            yield from blocks_of(child)
        elif len(groups) > 1 or isinstance(child, CONTAINERS):
            yield from _blocks_in(child, path, group_of)
        else:
            yield child


def _shares_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    """Return True if a module outside of `block` uses one of its parameters.

    fsdp cannot shard such a block by itself, because this would separate the tied weights.
    """
    inside = Counter(
        id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False)
    )
    return any(uses[number] > count for number, count in inside.items())


def groups_of(model: Any, coarse: bool = False) -> dict[str, int]:
    """Return a dictionary from the name of each parameter to the number of its layer group in timm.

    Group 0 is the stem. The dictionary is empty if the model is not of timm.
    """
    if not hasattr(model, "group_matcher"):
        return {}
    matcher = model.group_matcher(coarse=coarse)
    return cast(dict[str, int], group_parameters(model, matcher, reverse=True))


def vector_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters are all vectors, such as norms and layer scales.

    Under autocast these layers compute in float32.
    """
    own = ((module, list(module.parameters(recurse=False))) for module in model.modules())
    return [
        module for module, parameters in own if parameters and all(p.ndim == 1 for p in parameters)
    ]


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


class FullySharded(Distributed):
    """Strategy fsdp, in which each rank drives one device, and all ranks together hold one copy of
    the model.
    """

    shards = True
    compiles = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Build the device mesh of the ranks. All ranks must call this function."""
        return init_device_mesh(self.device.type, (self.group.world_size,))

    def shard(self, networks: Networks, dtype: torch.dtype | None) -> None:
        # Broadcast the initial weights of rank 0, as DDP does. Otherwise the networks would consist
        # of parts with different initial weights.
        for tensor in (*networks.parameters(), *networks.buffers()):
            self.group.broadcast(tensor.detach())
        # A network that another one contains is sharded first, so that both can be called.
        by_size = sorted(networks.items(), key=lambda pair: len(list(pair[1].parameters())))
        sharded = []
        for name, network in by_size:
            _refuse_scalars(network, name)
            if any(p.ndim and not isinstance(p, DTensor) for p in network.parameters()):
                # The loss is computed in float32.
                self._lay_out(network, None if name == LOSS else dtype)
                sharded.append(network)
        # The outermost sharded module. It gathers parameters and reduces gradients for all modules
        # inside.
        self.root: Any = sharded[0]
        if len(sharded) > 1:
            self.root = fully_shard(networks, mesh=self.mesh)
            # Run an empty forward pass now. FSDP2 takes the first module that runs as its root.
            with torch.no_grad():
                self.root()

    def wrap(self, step: PhaseStep) -> nn.Module:
        return step

    def start_update(self) -> None:
        # A forward pass without a backward pass, as of a teacher, leaves whole parameters behind,
        # which the update would make old.
        if isinstance(self.root, Networks):
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _lay_out(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        """Shard a network in units: its blocks, and the rest."""
        # A frozen scalar cannot be sharded, and stays whole.
        own = {p for p in network.parameters() if not isinstance(p, DTensor) and p.ndim}
        # FSDP2 shards rows of contiguous tensors, so parameters cannot have the layout
        # channels_last. With model.channels_last, only the images have this layout.
        for parameter in own:
            parameter.data = parameter.data.contiguous()
        blocks = [
            block
            for block in dict.fromkeys(blocks_of(network))
            if own.issuperset(block.parameters())
        ]
        of_root = set(own)
        for block in blocks:
            of_root -= set(block.parameters())
        # Under autocast, layers of vectors such as norms compute in float32. FSDP2 gathers a unit
        # in one type, so they join the unit of the root, which is gathered once per step. A unit
        # for each norm would cost more time than the blocks.
        if dtype is not None:
            for layer in vector_layers(network):
                of_root |= own.intersection(layer.parameters(recurse=False))
        # Shard the root first: a block would otherwise take all parameters inside of it. Its
        # parameters stay gathered from the forward to the backward pass, as FSDP2 does by default
        # with its outermost module.
        whole_step = self.config.reshard_after_forward
        self._shard(network, of_root, None, False if whole_step is None else whole_step)
        for block in blocks:
            left = {p for p in block.parameters() if not isinstance(p, DTensor)}
            self._shard(block, left, dtype, self.config.reshard_after_forward)

    def _shard(
        self,
        module: nn.Module,
        parameters: set[nn.Parameter],
        dtype: torch.dtype | None,
        reshard_after_forward: bool | int | None,
    ) -> None:
        """Make a unit of `parameters` of a module, which are gathered together. `dtype`: type in
        which they are gathered; None: their own type.
        """
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            # Do not convert inputs, because autocast chooses the type for each operation.
            mp_policy=MixedPrecisionPolicy(
                dtype, None if dtype is None else torch.float32, cast_forward_inputs=False
            ),
            ignored_params=set(module.parameters()) - parameters,
        )
        _announce_waiting(module)

    def for_evaluation(self, networks: Networks) -> Networks:
        # The networks are not sharded if evaluate.py evaluates them.
        is_sharded = any(isinstance(module, FSDPModule) for module in networks.modules())
        return LockstepNetworks(networks, self.group, self.device) if is_sharded else networks

    @contextmanager
    def skip_sync(self, wrapped: nn.Module) -> Iterator[None]:
        # Each rank adds up the gradients of whole parameters until they are reduced.
        self.root.set_requires_gradient_sync(False)
        self.root.set_is_last_backward(False)
        yield
        self.root.set_requires_gradient_sync(True)
        self.root.set_is_last_backward(True)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
            return tensor
        # Every rank already has the whole tensor, so no rank needs to send it.
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )


def _refuse_scalars(network: nn.Module, name: str) -> None:
    """Raise ValueError if a trained parameter of a network is a scalar, which fsdp cannot shard."""
    for parameter_name, parameter in network.named_parameters():
        if parameter.ndim == 0 and parameter.requires_grad:
            key = {"model": "model.name: ", "loss": "train.loss: "}.get(name, f"{name}.")
            raise ValueError(
                f"{key}{parameter_name} is a parameter without dimensions, which parallel=fsdp "
                "cannot shard; create it with torch.ones(1), which has one, or use parallel=ddp"
            )


def _announce_waiting(module: nn.Module) -> None:
    """Tell the watchdog when a forward pass waits for the weights of a module.

    Without this, the watchdog may report the waiting rank as the one that failed.
    """

    def wait(*_: Any) -> None:
        if liveness.phase == FORWARD:
            liveness.at(GATHERING)

    def compute(*_: Any) -> None:
        if liveness.phase == GATHERING:
            liveness.at(FORWARD)

    # Register two hooks: `wait` runs before FSDP2 gathers the weights, and `compute` runs
    # afterwards.
    module.register_forward_pre_hook(wait, prepend=True)
    module.register_forward_pre_hook(compute)
