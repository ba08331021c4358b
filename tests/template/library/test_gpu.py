"""Tests of training on a CUDA device."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

from tests.template.runs import run_warm
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.testing.commands import Finished, Train
from timm_parallel.testing.gpu import ON_CUDA, ONLY_CUDA, on_gpus

# Disable TF32, which convolutions of cuDNN use by default, to compare losses with those on a CPU.
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# Largest allowed difference of a loss near 2.3, for each precision. On a CPU, the loss in bf16
# differs by 4e-4 from that in fp32.
TOLERANCE = {
    "fp32": 2e-3,
    "bf16": 1e-2,
    "fp16": 1e-2,
}
WAYS = {
    "single": ("parallel=single",),
    "dp": ("parallel=dp", "parallel.devices=1"),
    "ddp over NCCL": ("parallel=ddp", "parallel.devices=1"),
    "fsdp over NCCL": ("parallel=fsdp", "parallel.devices=1"),
    "two gloo ranks on one device": ("parallel=ddp", "parallel.devices=2", "parallel.backend=gloo"),
}
RESNET = ("model=resnet18", "model.name=resnet10t")
RUNS = [
    *(("single", precision) for precision in ("fp32", "bf16", "fp16")),
    *(("dp", "bf16"), ("ddp over NCCL", "fp32"), ("ddp over NCCL", "fp16")),
    *(("fsdp over NCCL", "fp32"), ("two gloo ranks on one device", "fp32")),
]
# On a CPU, other tests of each commit hold the same.
CPU_AT_NIGHT = (pytest.param("cpu", marks=pytest.mark.nightly), *ONLY_CUDA)


@pytest.fixture(scope="module")
def loss_on_cpu(train_shared: Train) -> float:
    done = train_shared("parallel=single", "parallel.accelerator=cpu")
    assert done.returncode == 0, done.output
    return float(done.result["train"]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "way", "precision"),
    [pytest.param("cuda", *run, marks=ON_CUDA) for run in RUNS],
)
def test_gpu_training_loss_matches_cpu_for_each_strategy_and_precision(
    train: Train, loss_on_cpu: float, accelerator: str, way: str, precision: str
) -> None:
    if way.startswith("two") and torch.cuda.device_count() > 1:
        pytest.skip("there are several devices")
    overrides = (
        *(*WAYS[way], f"parallel.accelerator={accelerator}"),
        *(f"train.precision={precision}", "model.channels_last=false"),
    )
    done = train(*overrides, environment=WITHOUT_TF32)
    assert done.returncode == 0, done.output
    assert done.result["accelerator"] == accelerator and done.result["proof"]["hashes_equal"]
    contents = torch.load(done.folder / "checkpoints" / "last.pt", weights_only=True)
    assert {
        leaf.device.type for leaf in tree_leaves(contents) if isinstance(leaf, torch.Tensor)
    } == {"cpu"}
    assert done.result["train"]["loss"] == pytest.approx(loss_on_cpu, abs=TOLERANCE[precision])


TWO = ("parallel.devices=2",)
# Ways to train on several GPUs, with the number of GPUs that each needs.
ON_SEVERAL = [
    *((2, (f"parallel={name}", *TWO)) for name in ("dp", "ddp", "fsdp")),
    *((2, (f"parallel={name}", *TWO, "parallel.device_ids=[1,0]")) for name in ("dp", "ddp")),
]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [pytest.param(way, marks=on_gpus(count)) for count, way in ON_SEVERAL], ids=str
)
def test_loss_on_several_gpus_matches_that_on_a_cpu(
    train: Train, loss_on_cpu: float, overrides: tuple[str, ...]
) -> None:
    words = ("parallel.accelerator=cuda", "train.precision=fp32", "model.channels_last=false")
    done = train(*overrides, *words, environment=WITHOUT_TF32)
    assert done.returncode == 0, done.output
    assert done.result["proof"]["hashes_equal"]
    assert done.result["train"]["loss"] == pytest.approx(loss_on_cpu, abs=TOLERANCE["fp32"])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("output_device", [pytest.param(1, marks=on_gpus(2))])
def test_dp_trains_with_class_weights_when_the_loss_is_on_another_gpu_than_the_first(
    train: Train, output_device: int
) -> None:
    words = ("parallel=dp", *TWO, f"parallel.output_device={output_device}")
    done = train(*words, "parallel.accelerator=cuda", "train.class_weights=auto")
    assert done.returncode == 0, done.output


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("jobs", [pytest.param(2, marks=on_gpus(2))])
def test_concurrent_jobs_of_a_sweep_use_different_gpus(train: Train, jobs: int) -> None:
    sweep = train.base / "sweep"
    words = ("-m", "parallel=single", "parallel.accelerator=cuda", "optim.lr=1e-3,1e-4")
    done = train(*words, f"sweep.jobs={jobs}", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.output
    facts = [json.loads(path.read_text()) for path in sweep.glob("*/environment.json")]
    assert len({entry["devices"][0]["uuid"] for entry in facts}) == 2


JOBS = {"sweep": ("optim.lr=1e-3,1e-4",), "search": ("search=optuna", "search.n_trials=2")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "kind"),
    [("cpu", "search"), *(pytest.param("cuda", kind, marks=ON_CUDA) for kind in JOBS)],
)
def test_forked_jobs_train_on_the_gpu_and_record_its_count(
    train: Train, accelerator: str, kind: str
) -> None:
    sweep = train.base / "sweep"
    words = ("parallel=single", *JOBS[kind], f"parallel.accelerator={accelerator}")
    done = train("-m", *words, "train.max_steps=3", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.output
    for job in ("0", "1"):
        facts = json.loads((sweep / job / "environment.json").read_text(encoding="utf-8"))
        assert (read_result(sweep / job).accelerator, len(facts["devices"])) == (
            accelerator,
            torch.cuda.device_count(),
        )


MODELS = {
    "cpu": ("test_resnet", "test_vit"),
    "cuda": (
        *("resnet50", "convnext_tiny", "swin_tiny_patch4_window7_224", "efficientnet_b0"),
        "vit_small_patch16_224",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", CPU_AT_NIGHT)
def test_two_deterministic_trainings_end_with_equal_weights(train: Train, accelerator: str) -> None:
    names, ends = MODELS[accelerator], []
    words = (
        *("-m", "parallel=single", f"parallel.accelerator={accelerator}"),
        *("model=resnet18", f"model.name={','.join(names)}", "train.deterministic=true"),
        *("data=synthetic", "data.image_size=224", "data.batch_size=8", "train.max_steps=2"),
        *("data.kwargs.num_samples=16", "train.precision=bf16", "model.channels_last=false"),
    )
    for turn in ("first", "second"):
        done = train(*words, f"hydra.sweep.dir={train.base / turn}")
        assert done.returncode == 0, done.output
        jobs = [read_result(train.base / turn / str(job)) for job in range(len(names))]
        ends.append([job.parameters_hash for job in jobs])
    assert len(set(ends[0])) == len(names) and ends[0] == ends[1]


def run_python(train: Train, *words: str, environment: dict[str, str] | None = None) -> Finished:
    command = [sys.executable, *words]
    done = train.start_command(command, train.base / "run", environment).finish()
    assert done.returncode == 0, done.output
    return done


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("accelerator", CPU_AT_NIGHT)
def test_gpu_run_is_evaluated_exported_and_resumed_without_a_gpu(
    train: Train, tmp_path: Path, accelerator: str
) -> None:
    on_device = f"parallel.accelerator={accelerator}"
    explicit = ("train.precision=fp32", "model.channels_last=false", "train.max_steps=6")
    done = train("parallel=single", on_device, *explicit)
    assert done.returncode == 0, done.output
    run, without_gpu = f"run={done.folder}", {"CUDA_VISIBLE_DEVICES": ""}
    load = "import torch, sys; torch.load(sys.argv[1], weights_only=True)"
    best = str(done.folder / "checkpoints" / "best.pt")
    run_python(train, "-c", load, best, environment=without_gpu)
    evaluated = run_python(train, "evaluate.py", run).stdout.splitlines()
    # evaluate.py evaluates the best weights.
    expected = done.result["val"]["acc_best"]
    assert next(json.loads(line)["acc"] for line in evaluated if line.startswith("{")) == expected
    (tmp_path / "photos").mkdir()
    for shade in (20, 200):
        Image.new("L", (32, 32), shade).save(tmp_path / "photos" / f"{shade}.png")
    output = tmp_path / "predictions.csv"
    run_python(
        train, "scripts/predict.py", run, f"images={tmp_path / 'photos'}", f"output={output}"
    )
    assert len(output.read_text(encoding="utf-8").splitlines()) == 1 + 2
    run_python(train, "scripts/export.py", run)
    resume = f"resume={done.folder}"
    on_cpu = ("parallel.accelerator=cpu", "train.max_steps=8")
    run_python(train, "train.py", resume, *on_cpu, environment=without_gpu)
    assert (done.result["accelerator"], done.result["steps"]) == ("cpu", 8)
    run_python(train, "train.py", resume, on_device, "train.max_steps=10")
    assert (done.result["accelerator"], done.result["steps"]) == (accelerator, 10)
    if accelerator == "cuda":
        memory, guard = done.result["memory"][0], done.result["guard"]
        assert memory["utilisation"] is not None and guard["clocks"]


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize("accelerator", CPU_AT_NIGHT)
def test_compiled_run_trains_and_resumes(train: Train, accelerator: str) -> None:
    if accelerator == "cpu" and shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    explicit = (
        *("train.precision=fp32", "model.channels_last=false", "model.compile=true"),
        "model.kwargs.depth=1",
    )
    done = train(
        *("parallel=single", f"parallel.accelerator={accelerator}", *explicit), "train.max_steps=2"
    )
    assert done.returncode == 0, done.output
    run_python(train, "train.py", f"resume={done.folder}", "train.max_steps=4")
    assert done.result["steps"] == 4


@pytest.mark.processes
@pytest.mark.parametrize("accelerator", ONLY_CUDA)
def test_train_refuses_two_nccl_ranks_on_one_device(train: Train, accelerator: str) -> None:
    """Only a GPU can show this, because NCCL does not run on a CPU."""
    devices = torch.cuda.device_count() + 1
    done = train("parallel=ddp", f"parallel.devices={devices}", f"data.batch_size={16 * devices}")
    assert done.returncode == 2 and "parallel.backend=gloo" in done.stderr, done.output


@pytest.mark.processes
@pytest.mark.parametrize("accelerator", ONLY_CUDA)
def test_sync_bn_step_on_gpus_uses_statistics_of_the_whole_batch(
    tmp_path: Path, accelerator: str
) -> None:
    """With SyncBatchNorm, two ranks with 8 images each get the statistics of one process with 16
    images. Without it, their statistics differ. SyncBatchNorm of torch requires CUDA.
    """
    weights = {}
    common = (
        *(*RESNET, f"parallel.accelerator={accelerator}", "train.precision=fp32"),
        *("data.batch_size=16", "train.max_steps=1"),
    )
    ranks: tuple[str, ...] = ("parallel=ddp", "parallel.devices=2")
    if torch.cuda.device_count() < 2:
        ranks += ("parallel.backend=gloo",)
    for name, overrides in {
        "one": ("parallel=single",),
        "synchronized": (*ranks, "model.sync_bn=true"),
        "apart": ranks,
    }.items():
        folder = run_warm(tmp_path / name, *common, *overrides)
        weights[name] = checkpoint.load(folder / "checkpoints" / "last.pt")["model"]
    statistics = [name for name in weights["one"] if name.endswith("running_var")]
    assert statistics

    def distance(name: str) -> float:
        return max(
            ((weights[name][key] - weights["one"][key]).norm() / weights["one"][key].norm()).item()
            for key in statistics
        )

    assert distance("synchronized") < 1e-3
    assert distance("apart") > 1e-3
