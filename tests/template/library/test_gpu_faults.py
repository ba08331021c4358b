"""Faults while a GPU is used. Some tests run on a CPU too, because CI has no GPU."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.template.runs import fault_environment
from timm_parallel.testing.commands import Train
from timm_parallel.testing.gpu import EACH_ACCELERATOR, ON_CUDA, ONLY_CUDA, on_gpus

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def overrides(accelerator: str) -> list[str]:
    """Return the overrides of a run with two ranks on one device. With `nccl`, each rank has a GPU
    of its own.
    """
    backend = "nccl" if accelerator == "nccl" else "gloo"
    return [
        "parallel=ddp",
        "parallel.devices=2",
        f"parallel.backend={backend}",
        f"parallel.accelerator={'cpu' if accelerator == 'cpu' else 'cuda'}",
        "data=synthetic",
        "data.kwargs.num_samples=192",
        "train.epochs=2",
        "parallel.timeout=4",
    ]


@pytest.mark.parametrize(
    ("accelerator", "kind", "message"),
    [
        pytest.param("cuda", "stop", "rank 1 does not answer", marks=ON_CUDA),
        pytest.param("cuda", "kill", "rank 1 was killed by SIGKILL", marks=ON_CUDA),
        pytest.param("nccl", "kill", "rank 1 was killed by SIGKILL", marks=on_gpus(2)),
    ],
    ids=["stopped-cuda", "killed-cuda", "killed-nccl"],
)
def test_error_of_a_gpu_run_names_the_killed_or_stopped_rank(
    train: Train, accelerator: str, kind: str, message: str
) -> None:
    environment = fault_environment(f"{kind}:1:7:the forward pass", train.base / "mark")
    done = train(*overrides(accelerator), environment=environment)
    assert done.returncode == 1 and message in done.stderr, done.output


@pytest.mark.parametrize("accelerator", [*EACH_ACCELERATOR, pytest.param("nccl", marks=on_gpus(2))])
def test_sweep_continues_with_the_next_job_when_a_rank_runs_out_of_memory(
    train: Train, accelerator: str
) -> None:
    sweep = train.base / "sweep"
    environment = fault_environment("no_memory:1:7:the forward pass", train.base / "mark")
    done = train(
        "-m",
        *overrides(accelerator),
        "parallel.devices=2,1",
        f"hydra.sweep.dir={sweep}",
        environment=environment,
    )
    assert done.returncode == 1, done.output
    assert sorted(statuses(sweep)) == ["done", "out_of_memory"], done.output


def statuses(sweep: Path) -> list[str]:
    jobs = json.loads((sweep / "jobs.json").read_text(encoding="utf-8"))["jobs"]
    return [job["status"] for job in jobs]


@pytest.mark.parametrize("accelerator", ONLY_CUDA)
def test_sweep_continues_after_a_batch_that_exceeds_the_memory_of_the_gpu(
    train: Train, accelerator: str
) -> None:
    sweep = train.base / "sweep"
    done = train(
        *("-m", "parallel=single", f"parallel.accelerator={accelerator}", "data=synthetic"),
        *("data.kwargs.num_samples=8192", "data.limit_train=null", "data.image_size=224"),
        *("data.batch_size=8192,32", "model=resnet18", "model.name=resnet50"),
        *("train.max_steps=2", "train.evaluate_every=0", "train.precision=fp32"),
        *("model.channels_last=false", f"hydra.sweep.dir={sweep}"),
    )
    assert statuses(sweep) == ["out_of_memory", "done"], done.output


@pytest.mark.parametrize("accelerator", ONLY_CUDA)
def test_device_side_assert_ends_the_run(train: Train, accelerator: str) -> None:
    mark = train.base / "mark"
    words = ("parallel=single", f"parallel.accelerator={accelerator}", "train.max_steps=8")
    environment = fault_environment("device_assert:0:7:the forward pass", mark)
    done = train(*words, environment=environment)
    assert time.time() - float(mark.read_text(encoding="utf-8").split()[0]) < 15
    assert (done.returncode, done.result["failure"]["rank"]) == (1, 0), done.output


@pytest.mark.parametrize("accelerator", EACH_ACCELERATOR)
def test_sigterm_to_a_gpu_run_saves_a_checkpoint_and_exits_143(
    train: Train, accelerator: str
) -> None:
    running = train.start(*overrides(accelerator), "train.epochs=500", "train.log_every=1")
    running.wait_for_steps()
    done = running.signal(signal.SIGTERM)
    assert done.returncode == 143 and done.seconds < 15, done.output
    assert (done.folder / "checkpoints" / "last.pt").exists()
