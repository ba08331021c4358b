"""What only a CUDA device can show: every strategy trains there, and means what it means on a CPU."""

from __future__ import annotations

import pytest
import torch
from conftest import Train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WAYS = {
    "single": ("parallel=single",),
    "dp": ("parallel=dp", "parallel.devices=1"),
    "ddp over NCCL": ("parallel=ddp", "parallel.devices=1"),
    "two gloo ranks on one device": ("parallel=ddp", "parallel.devices=2", "parallel.backend=gloo"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_strategy_trains_on_the_device(train: Train, way: str, precision: str) -> None:
    if way.startswith("two") and torch.cuda.device_count() > 1:
        pytest.skip("there are several devices")
    done = train(*WAYS[way], "parallel.accelerator=cuda", f"train.precision={precision}", timeout=150)
    assert done.returncode == 0, done.output
    assert done.result["accelerator"] == "cuda" and done.result["proof"]["hashes_equal"]
    on_cpu = train("parallel=single", "parallel.accelerator=cpu", folder=train.base / "cpu", timeout=150)
    tolerance = 1e-3 if precision == "fp32" else 5e-2
    assert done.result["train"]["loss"] == pytest.approx(on_cpu.result["train"]["loss"], abs=tolerance)


def test_two_nccl_ranks_on_one_device_are_refused(train: Train) -> None:
    devices = torch.cuda.device_count() + 1
    done = train("parallel=ddp", f"parallel.devices={devices}", f"data.batch_size={16 * devices}")
    assert done.returncode == 2 and "two NCCL ranks cannot share one" in done.stderr
