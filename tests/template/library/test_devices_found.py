"""Choice of devices, and reports of GPUs that are unusable."""

from __future__ import annotations

import copy
import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.template.runs import resolved
from timm_parallel.config.compose import compose_command, device_counts
from timm_parallel.config.resolve import notice, resolve
from timm_parallel.keys import Config
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice, Driver, Gpu
from timm_parallel.patches import hydra_parser


def machine_of(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    gpus = tuple(CudaDevice(index, "H", 80 * 2**30, f"GPU-{index}") for index in range(count))
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: gpus)


@cache
def composed(*words: str) -> Config:
    return compose_command(hydra_parser().parse_args(list(words))).config


@pytest.mark.parametrize(
    ("words", "batch", "count", "used"),
    [
        ((), 64, 0, 1),
        (("parallel=ddp",), 64, 0, min(2, hardware.cores())),
        (("parallel=dp",), 64, 1, 1),
        ((), 64, 6, 4),
        (("parallel=dp",), 64, 6, 4),
        (("parallel=ddp",), 64, 8, 8),
        ((), 96, 6, 6),
        ((), 61, 4, 1),
        ((), 6, 8, 6),
    ],
)
def test_auto_devices_is_the_largest_gpu_count_that_divides_the_batch(
    words: tuple[str, ...],
    batch: int,
    count: int,
    used: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_of(monkeypatch, count)
    config = copy.deepcopy(composed(*words))
    config.data.batch_size = batch
    parallel = resolve(config).parallel
    chosen = "ddp" if used > 1 else "single"
    assert parallel.strategy == (words[0].partition("=")[2] if words else chosen)
    assert (parallel.devices, parallel.accelerator) == (used, "cuda" if count else "cpu")


def test_explicit_device_settings_are_not_adjusted_to_batch_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_of(monkeypatch, 6)
    assert (
        resolved(
            "parallel=ddp", "data.batch_size=null", "data.batch_size_per_device=10"
        ).parallel.devices
        == 6
    )
    with pytest.raises(ValueError, match=r"batch_size=32: .* 3 devices"):
        resolved("parallel=ddp", "parallel.device_ids=[0,2,4]")
    with pytest.raises(ValueError, match=r"batch_size=32: .* 5 devices"):
        resolved("parallel=ddp", "parallel.devices=5")
    with pytest.raises(ValueError, match="6 CUDA devices here, and dp "):
        resolved("parallel=dp", "parallel.devices=8", "data.batch_size=64")


@pytest.mark.parametrize(
    ("batch", "count", "counts"),
    [
        (64, 0, None),
        (64, 1, "1,2"),
        (64, 6, "1,2,4"),
        (None, 6, "1,2,4,6"),
    ],
)
def test_scaling_sweep_has_the_device_count_of_auto_as_its_largest_device_count(
    batch: int | None, count: int, counts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, count)
    resolved_counts = device_counts(OmegaConf.create({"data": {"batch_size": batch}}))
    assert resolved_counts == (
        counts or device_counts(OmegaConf.create({"data": {"batch_size": None}}))
    )


def test_dp_replica_count_is_not_changed_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under dp, one process runs all replicas. torchrun with one rank must therefore not reduce the
    number of replicas to one.
    """
    machine_of(monkeypatch, 0)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    config = composed("parallel=dp", "parallel.devices=2")
    assert (
        resolve(config, 1, 1).parallel.threads_per_device
        == resolve(config).parallel.threads_per_device
        == 4
    )
    machine_of(monkeypatch, 1)
    for ranks in ((), (1, 1)):
        with pytest.raises(ValueError, match="1 CUDA device here, and dp "):
            resolve(config, *ranks)


class FakeDriver:
    def __init__(self, devices: int = 0, init: int = 0, version: int = 13000) -> None:
        self.devices, self.init, self.version = devices, init, version

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0 if self.devices else 100

    def cuGetErrorString(self, number: int, text: Any) -> int:
        texts = {3: b"initialization error", 100: b"no CUDA-capable device is detected"}
        text._obj.value = texts[number]
        return 0


def ask(
    monkeypatch: pytest.MonkeyPatch,
    driver: FakeDriver | None,
    shown: bool = True,
    visible: str | None = None,
) -> Driver:
    """Query a fake CUDA driver, as a torch that was built for CUDA 13 would do. If `driver` is
    None, the driver library cannot be loaded.
    """

    def load() -> Any:
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    monkeypatch.setattr(hardware, "_open_driver", load)
    monkeypatch.setattr(hardware, "nvidia_device_files", lambda: ["/dev/nvidia0"] if shown else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return Driver.ask("13.0")


@pytest.mark.parametrize(
    ("fake", "visible", "reason"),
    [
        (None, None, "libcuda.so.1 cannot be loaded"),
        (FakeDriver(init=100), None, "no CUDA-capable device is detected (100)"),
        (FakeDriver(init=3), None, "initialization error (3): this process was forked"),
        (
            FakeDriver(),
            "0,0",
            "no CUDA-capable device is detected (100) (CUDA_VISIBLE_DEVICES=0,0)",
        ),
        (
            FakeDriver(2, version=12040),
            None,
            "CUDA 12.4, but torch is built for 13.0; update",
        ),
    ],
)
def test_notice_explains_why_gpus_are_unusable_when_auto_falls_back_to_cpu(
    fake: FakeDriver | None, visible: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ask(monkeypatch, fake, visible=visible)
    assert driver.devices == () and driver.problem is not None and reason in driver.problem
    monkeypatch.setattr(hardware, "cuda", lambda: driver)
    line = notice(composed(), resolve(composed()))
    assert reason in line and "\n" not in line
    on_cpu = composed("parallel.accelerator=cpu")
    assert notice(on_cpu, resolve(on_cpu)) == ""
    with pytest.raises(ValueError, match="accelerator=cuda") as refusal:
        resolve(composed("parallel.accelerator=cuda"))
    assert reason in str(refusal.value)
    # Absent or hidden GPUs are no problem.
    assert ask(monkeypatch, None, shown=False) == Driver()
    for hidden in ("", "-1"):
        assert ask(monkeypatch, FakeDriver(), visible=hidden) == Driver()


def test_nvidia_device_files_are_found_in_dev_and_proc(tmp_path: Path) -> None:
    assert hardware.nvidia_device_files(tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia3"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert [Path(sign).name for sign in hardware.nvidia_device_files(tmp_path)] == [
        "nvidia3",
        "0000:01:00.0",
    ]


LIBCUDA = r"""
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 40; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 41 ? "MIG 1g.5gb" : "first", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t) device << 32; return device == 41 ? 801 : 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
"""  # noqa: E501


@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler"
)
def test_cuda_driver_calls_work_with_a_library_that_has_the_signatures_of_cuda_h(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ctypes does not check the signatures, so the test calls a C library that has them."""
    (tmp_path / "driver.c").write_text(LIBCUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True, timeout=300
    )
    monkeypatch.setattr(hardware, "_open_driver", lambda: ctypes.CDLL(str(library)))
    assert Driver.ask("13.0").devices == (
        CudaDevice(0, "first", 40 << 32, "GPU-28282828-2828-2828-2828-282828282828"),
        # The driver does not tell the memory of a slice.
        CudaDevice(1, "MIG 1g.5gb", None, "MIG-29292929-2929-2929-2929-292929292929"),
    )


def test_values_of_a_gpu_are_read_by_uuid_and_unknown_when_nvml_does_not_report_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPUs have another order than in CUDA, and the temperature falls."""
    import pynvml

    answers: dict[str, dict[str, Any]] = {
        "nvmlDeviceGetUtilizationRates": {
            "GPU-b": SimpleNamespace(gpu=80),
            "GPU-a": SimpleNamespace(gpu=20),
        },
        "nvmlDeviceGetTotalEnergyConsumption": {"GPU-b": 7_500},
        "nvmlDeviceGetTemperature": {"GPU-b": iter((75, 70))},
        "nvmlDeviceGetClockInfo": {"GPU-b": iter((1500, 1980))},
        "nvmlDeviceGetMaxClockInfo": {"GPU-b": 1980},
        "nvmlDeviceGetCurrentClocksThrottleReasons": {"GPU-b": 0x44},
    }

    def query(name: str, handle: str, *_: Any) -> Any:
        if handle not in answers[name]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        answer = answers[name][handle]
        return next(answer) if isinstance(answer, Iterator) else answer

    for name in answers:
        monkeypatch.setattr(pynvml, name, partial(query, name))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    gpus = [Gpu(uuid) for uuid in ("GPU-b", "MIG-1", "GPU-a", None)]
    assert [gpu.utilisation() for gpu in gpus] == [None] * 4
    for gpu in gpus * 2:
        gpu.sample()
    assert [gpu.utilisation() for gpu in gpus] == [0.8, None, 0.2, None]
    assert gpus[0].joules() == 7.5 and all(math.isnan(gpu.joules()) for gpu in gpus[1:])
    names = ("celsius", "sm_mhz", "sm_mhz_max", "slowed_by")
    known = dict(zip(names, (75, 1500, 1980, ["heat (by the hardware)"]), strict=True))
    unknown: dict[str, Any] = dict(zip(names, (None, None, None, []), strict=True))
    assert [gpu.state() for gpu in gpus] == [known, unknown, unknown, None]
