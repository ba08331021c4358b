"""A machine's GPUs are counted as torch counts them, `auto` suits their number, and what cannot be used or told is said."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import resolved
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

import train
from src.engine.config.compose import compose_command, device_counts
from src.engine.config.resolve import remarks, resolve
from src.engine.machine import hardware, nvidia
from src.engine.machine.nvidia import CudaDevice, Driver, Gpu
from src.schema import Config


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("parallel=ddp", "model.compile=true", "parallel.bucket_cap_mb=0.5"),
            ("parallel.bucket_cap_mb=0.5", "compile"),
        ),
        (("parallel=ddp", "parallel.backend=mpi"), ("parallel.backend=mpi", "without MPI")),
    ],
)
def test_what_torch_would_only_assert_is_refused_before_a_folder_exists(
    words: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"mpi|bucket_cap") as refusal:
        resolved(*words, f"hydra.run.dir={tmp_path / 'run'}")
    assert all(name in str(refusal.value) for name in named), refusal.value
    assert not (tmp_path / "run").exists()


def test_compile_takes_the_buckets_that_torch_takes() -> None:
    assert resolved("parallel=ddp", "model.compile=true", "parallel.bucket_cap_mb=1").parallel.bucket_cap_mb == 1


def machine_of(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    gpus = tuple(CudaDevice(index, "H", 80 * 2**30, f"GPU-{index}") for index in range(count))
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: gpus)


@cache
def composed(*words: str) -> Config:
    """The main job, with these words on its command line."""
    return compose_command(get_args_parser().parse_args(list(words))).config


USED = {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8}  # of so many GPUs, by a batch of 64


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("words", [(), ("parallel=dp",), ("parallel=ddp",)], ids=["auto", "dp", "ddp"])
def test_the_main_job_fits_any_number_of_gpus(
    count: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, count)
    asked = composed(*words)
    found = resolve(asked)
    used = USED[count] if count else min(2, hardware.cores()) if words else 1
    assert found.parallel.devices == used
    assert found.parallel.accelerator == ("cuda" if count else "cpu")
    assert found.parallel.strategy == (words[0].partition("=")[2] if words else "ddp" if used > 1 else "single")
    said = f"parallel.devices=auto: {used} of {count} CUDA devices, because data.batch_size=64 does not divide by more"
    assert [line.startswith(said) for line in remarks(asked, found)] == ([True] if count and used < count else [])


@pytest.mark.parametrize("count", [0, 1, 6])
def test_make_train_starts_and_says_what_it_leaves_out(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    machine_of(monkeypatch, count)
    monkeypatch.setattr("src.engine.launch.job.run_job", lambda config, folder: started.append(config) or 0)
    monkeypatch.setattr(sys, "argv", ["train.py", f"hydra.run.dir={tmp_path / 'run'}"])
    assert train.main() == 0
    assert started[0].parallel.devices == {0: 1, 1: 1, 6: 4}[count]
    assert ("4 of 6 CUDA devices" in capsys.readouterr().out) == (count == 6)


def test_a_sweep_says_it_too_once_for_all_of_its_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_of(monkeypatch, 6)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "parallel=ddp", "optim.lr=0.1,0.2,0.3", "sweep.dry_run=true"])
    assert train.main() == 0
    assert capsys.readouterr().out.count("4 of 6 CUDA devices") == 1


@pytest.mark.parametrize(
    ("batch", "count", "used", "nearest"),
    [(96, 6, 6, None), (61, 4, 1, "60, 64"), (6, 8, 6, "8"), (64, 7, 4, "63, 70"), (66, 4, 3, "64, 68")],
)
def test_auto_takes_the_largest_count_that_divides_the_batch(
    batch: int, count: int, used: int, nearest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, count)
    asked = copy.deepcopy(composed())
    asked.data.batch_size = batch
    found = resolve(asked)
    assert (found.parallel.devices, found.parallel.strategy) == (used, "ddp" if used > 1 else "single")
    said = remarks(asked, found)
    assert [line.endswith(f"nearest for all of them: {nearest}") for line in said] == ([True] if nearest else [])


def test_a_batch_per_device_and_counted_devices_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, 6)
    assert resolved("parallel=ddp", "data.batch_size=null", "data.batch_size_per_device=10").parallel.devices == 6
    with pytest.raises(ValueError, match="batch_size=32: does not divide by 3 devices"):
        resolved("parallel=ddp", "parallel.device_ids=[0,2,4]")
    with pytest.raises(ValueError, match="does not divide by 5 devices"):
        resolved("parallel=ddp", "parallel.devices=5")
    with pytest.raises(ValueError, match=r"6 CUDA device.s. here, and dp takes one for each replica"):
        resolved("parallel=dp", "parallel.devices=8", "data.batch_size=64")


@pytest.mark.parametrize(
    ("batch", "count", "counts"),
    [
        (64, 0, None),
        (64, 1, "1,2"),
        (64, 3, "1,2"),
        (64, 6, "1,2,4"),
        (96, 6, "1,2,4,6"),
        (64, 8, "1,2,4,8"),
        (None, 6, "1,2,4,6"),
    ],
)
def test_a_sweep_over_the_machines_devices_ends_with_what_auto_takes(
    batch: int | None, count: int, counts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, count)
    found = device_counts(OmegaConf.create({"data": {"batch_size": batch}}))
    assert found == (counts or device_counts(OmegaConf.create({"data": {"batch_size": None}})))


def test_replicas_of_dp_are_counted_alike_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has started one rank for them all."""
    machine_of(monkeypatch, 0)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    asked = composed("parallel=dp", "parallel.devices=2")
    assert resolve(asked, 1, 1).parallel.threads_per_device == resolve(asked).parallel.threads_per_device == 4
    machine_of(monkeypatch, 1)
    for ranks in ((), (1, 1)):
        with pytest.raises(ValueError, match=r"1 CUDA device.s. here, and dp takes one for each replica"):
            resolve(asked, *ranks)


class FakeDriver:
    """libcuda as ctypes calls it, for devices given as (name, bytes of memory, 16 bytes of UUID)."""

    def __init__(self, devices: Any = (), init: int = 0, version: int = 13000) -> None:
        self.devices, self.init, self.version = devices, init, version

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0 if self.devices else 100

    def cuGetErrorString(self, number: int, text: Any) -> int:
        text._obj.value = {100: b"no CUDA-capable device is detected", 804: b"forward compatibility was attempted"}[
            number
        ]
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = self.devices[device.value][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = self.devices[device.value][1] or 0
        return 0 if self.devices[device.value][1] else 801

    def cuDeviceGetUuid_v2(self, number: Any, device: Any) -> int:
        number._obj[:] = self.devices[device.value][2]
        return 0


MIXED = (("NVIDIA H100", 80 * 2**30, bytes(range(16))), ("NVIDIA A100 MIG 1g.5gb", None, bytes(range(16, 32))))


def ask(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None, shown: bool = True, visible: str | None = None
) -> Driver:
    """What a machine with this driver (None: no library) has, asked by a torch for CUDA 13."""

    def load() -> Any:
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    monkeypatch.setattr(nvidia, "_open_driver", load)
    monkeypatch.setattr(nvidia, "devices_shown", lambda: ["/dev/nvidia0"] if shown else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return Driver.ask("13.0")


def test_devices_are_counted_numbered_and_named_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, FakeDriver(MIXED))
    assert found.problem is None
    assert found.devices == (
        CudaDevice(0, "NVIDIA H100", 80 * 2**30, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
        CudaDevice(1, "NVIDIA A100 MIG 1g.5gb", None, "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f"),
    )


@pytest.mark.parametrize(
    ("driver", "visible", "said"),
    [
        (None, None, "libcuda.so.1 cannot be loaded"),
        (FakeDriver(init=100), None, "cuInit says no CUDA-capable device is detected (100)"),
        (FakeDriver(init=804), None, "forward compatibility was attempted (804)"),
        (FakeDriver(), "0,0", "no CUDA-capable device is detected (100) (CUDA_VISIBLE_DEVICES=0,0)"),
        (
            FakeDriver(MIXED, version=12040),
            None,
            "the driver knows CUDA 12.4, but this torch is built for 13.0; update",
        ),
    ],
)
def test_devices_that_are_shown_but_cannot_be_used_are_told_before_the_cpu_takes_over(
    driver: FakeDriver | None, visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ask(monkeypatch, driver, visible=visible)
    assert found.devices == () and found.problem is not None and said in found.problem
    monkeypatch.setattr(hardware, "cuda", lambda: found)
    lines = remarks(composed(), resolve(composed()))
    assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0]
    with pytest.raises(ValueError, match="accelerator=cuda") as refusal:
        resolve(composed("parallel.accelerator=cuda"))
    assert said in str(refusal.value)


def test_a_machine_without_devices_or_that_hides_them_on_purpose_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ask(monkeypatch, None, shown=False) == Driver()
    for hidden in ("", "-1"):
        assert ask(monkeypatch, FakeDriver(), visible=hidden) == Driver()


def test_signs_of_devices_are_read_without_any_library(tmp_path: Path) -> None:
    assert nvidia.devices_shown(tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia3"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert [Path(sign).name for sign in nvidia.devices_shown(tmp_path)] == ["nvidia3", "0000:01:00.0"]


LIBCUDA = r"""
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 40; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 41 ? "second" : "first", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t) device << 32; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
def test_a_driver_in_c_is_called_as_it_wants_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the signatures of cuda.h, which ctypes cannot check."""
    (tmp_path / "driver.c").write_text(LIBCUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True, timeout=300)
    monkeypatch.setattr(nvidia, "_open_driver", lambda: ctypes.CDLL(str(library)))
    assert Driver.ask("13.0").devices == (
        CudaDevice(0, "first", 40 << 32, "GPU-28282828-2828-2828-2828-282828282828"),
        CudaDevice(1, "second", 41 << 32, "GPU-29292929-2929-2929-2929-292929292929"),
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML of a machine with two devices, in another order than CUDA's, of which one is a slice without utilisation."""
    import pynvml

    def utilisation(handle: str) -> Any:
        if handle.startswith("MIG"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu={"GPU-b": 80, "GPU-a": 20}[handle])

    def refuse(*given: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        monkeypatch.setattr(pynvml, name, refuse)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", utilisation)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65")
    return pynvml


@pytest.mark.usefixtures("nvml")
def test_utilisation_is_of_the_device_that_torch_means_and_null_where_it_has_none() -> None:
    watched = [Gpu(uuid) for uuid in ("GPU-b", "MIG-1", "GPU-a", None)]
    assert [gpu.utilisation() for gpu in watched] == [None] * 4
    for gpu in watched * 2:
        gpu.sample()
    assert [gpu.utilisation() for gpu in watched] == [0.8, None, 0.2, None]


def test_one_failing_query_leaves_the_others_and_the_run_alone(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(nvml, "nvmlSystemGetDriverVersion", refuse)
    assert nvidia.driver_version() is None
    gpu = Gpu("GPU-a")
    gpu.sample()
    assert gpu.utilisation() == 0.2
    monkeypatch.setattr(nvml, "nvmlInit", refuse)  # as where the library is missing
    gpu = Gpu("GPU-a")
    gpu.sample()
    assert gpu.utilisation() is None
