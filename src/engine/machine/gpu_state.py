"""How hot GPUs get and what slows them down while they train, as NVML says; null where it does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SLOWED_BY = {  # bits of nvmlDeviceGetCurrentClocksThrottleReasons; a power cap is how large models run, so it is not here
    0x8: "hardware slowdown",
    0x20: "heat (by the driver)",
    0x40: "heat (by the hardware)",
    0x80: "power brake",
}


class GpuStates:
    """The hottest and the slowest that each device was whenever `sample` was called."""

    def __init__(self, uuids: list[str]) -> None:
        """`uuids` as NVML writes them, `GPU-…`. Without NVML, or for a device it does not know, nothing is known."""
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            handles = [self._ask(pynvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in uuids]
        except pynvml.NVMLError:
            handles = []
        self._handles = [handle for handle in handles if handle is not None]
        self._celsius: list[list[int]] = [[] for _ in self._handles]
        self._mhz: list[list[int]] = [[] for _ in self._handles]
        self._reasons = [0] * len(self._handles)

    def sample(self) -> None:
        nvml = self._nvml
        for place, handle in enumerate(self._handles):
            celsius = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
            mhz = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
            self._celsius[place] = [max([*self._celsius[place], celsius])] if celsius is not None else []
            self._mhz[place] = [min([*self._mhz[place], mhz])] if mhz is not None else []
            self._reasons[place] |= self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0

    def found(self) -> list[dict[str, Any]]:
        """Of each device: `celsius` (highest), `sm_mhz` (lowest), `sm_mhz_max`, `slowed_by` (words)."""
        nvml = self._nvml
        return [
            {
                "celsius": next(iter(self._celsius[place]), None),
                "sm_mhz": next(iter(self._mhz[place]), None),
                "sm_mhz_max": self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
                "slowed_by": [word for bit, word in SLOWED_BY.items() if self._reasons[place] & bit],
            }
            for place, handle in enumerate(self._handles)
        ]

    def _ask(self, query: Callable[..., Any], *arguments: Any) -> Any:
        """Each question for itself: MIG and vGPU answer some and not others."""
        try:
            return query(*arguments)
        except self._nvml.NVMLError:
            return None
