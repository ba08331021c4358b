"""The networks of a task, the step that computes their losses, and moving averages of networks, as
code for a single device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from timm_parallel.batch import Batch

# Value of train.precision -> type in which autocast computes; None: float32.
AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Name of the network that computes the loss. It gets outputs instead of images, and computes in
# float32 on the device of the outputs.
LOSS = "loss"


class Networks(nn.ModuleDict):
    """Networks by name. The names are attributes too: `networks.model(images)`."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        for name in networks:
            if hasattr(nn.ModuleDict, name):
                raise ValueError(
                    f"train.task: {name} cannot be the name of a network, because torch uses this "
                    "name; choose another one"
                )
        super().__init__(networks)

    def forward(self) -> None:
        """Do nothing. Under fsdp, a call makes this module the root of all networks."""


class Autocast(nn.Module):
    """Runs a network under autocast. This is a module, because DataParallel runs replicas in
    threads, and each thread has its own autocast dtype.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.device_type, self.dtype = device_type, dtype

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.dtype is None:
            return self.model(*inputs, **keywords)
        with torch.autocast(self.device_type, self.dtype):
            # A network may return several tensors in training, for example of an auxiliary head.
            return tree_map_only(Tensor, _to_float, self.model(*inputs, **keywords))


def _to_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def autocast(
    networks: Networks | Mapping[str, nn.Module], device: torch.device, precision: str
) -> Networks:
    """Wrap networks so that they compute in the type of train.precision. The network `loss`
    computes in float32.
    """
    dtype = AUTOCAST[precision]
    return Networks(
        {
            name: network if name == LOSS else Autocast(network, device.type, dtype)
            for name, network in networks.items()
        }
    )


class HasLosses(Protocol):
    """Interface of a task, as far as a training step needs it."""

    def losses(
        self, networks: Any, batch: Batch, phase: str
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class PhaseStep(nn.Module):
    """Computes the losses of one phase for a batch. A strategy wraps this module from outside."""

    def __init__(
        self, task: HasLosses, networks: Networks, phase: str, frozen: Sequence[nn.Module] = ()
    ) -> None:
        """`frozen`: modules that stay in evaluation mode, so that their BatchNorm statistics and
        dropout stay fixed.
        """
        super().__init__()
        self.networks, self.task, self.phase, self.frozen = networks, task, phase, list(frozen)

    def train(self, mode: bool = True) -> PhaseStep:
        """Switch to training mode, but keep frozen modules in evaluation mode."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses of the samples [B], or their mean, and numbers for the log, [B] or
        means.
        """
        return self.task.losses(self.networks, batch, self.phase)


def build_ema(model: nn.Module, decay: float, warmup: bool, foreach: bool = True) -> ModelEmaV3:
    """Build a copy of the model that holds the exponential moving average of its weights.

    `decay` and `warmup` have the meaning that timm gives to them. `foreach`: update all tensors of
    one type in one call, which is faster.
    """
    ema_class = Average if foreach else ModelEmaV3
    return ema_class(model, decay=decay, use_warmup=warmup, foreach=foreach)


class Average(ModelEmaV3):
    """timm's ModelEmaV3 with a faster update. The lists of tensors to average are built once
    instead of in every step.
    """

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if not hasattr(self, "_counts"):
            pairs = list(
                zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
            )
            self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]
            self._averages = [average for average, _ in pairs if average.is_floating_point()]
            self._weights = [weight for average, weight in pairs if average.is_floating_point()]
        for copied, count in self._counts:
            copied.copy_(count)
        self._foreach_lerp_(self._averages, self._weights, weight=1 - decay)
