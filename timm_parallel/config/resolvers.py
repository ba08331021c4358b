"""OmegaConf resolvers for YAML files, whose values depend on the devices of this machine."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from timm_parallel.machine import hardware


def device_counts(_root_: Any) -> str:
    """Resolve `${device_counts:}` to a list of device counts to compare, e.g. `1,2,4,6`. The last
    count is the largest number of devices of this machine that divides the batch, at most 8 on a
    CPU. Before it come all smaller powers of two.
    """
    batch = OmegaConf.select(_root_, "data.batch_size")
    largest = max(
        2,
        count_that_divides(len(hardware.visible_cuda_devices()) or min(8, hardware.cores()), batch),
    )
    powers = {2**power for power in range(largest.bit_length())}
    return ",".join(str(count) for count in sorted(powers | {largest}))


def by_device(on_cpu: Any, on_gpu: Any) -> Any:
    """Resolve `${by_device:a,b}` to b on a machine with a CUDA device, otherwise to a."""
    return on_gpu if hardware.visible_cuda_devices() else on_cpu


def count_that_divides(present: int, batch: int | None, pairs: bool = False) -> int:
    """Return the largest number of devices that divides the batch. `present`: number of devices of
    this machine, which is the upper limit. Return `present` if no batch is given, or if no number
    fits.

    `pairs`: True if the batch of each device must also be even.
    """
    if batch is None:
        return present
    for count in range(present, 0, -1):
        share, rest = divmod(batch, count)
        if rest == 0 and not (pairs and share % 2):
            return count
    return present
