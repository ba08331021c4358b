"""Tests of training on a CUDA device. Every strategy runs there, and its losses equal those on a
CPU within a tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from src.schema import ResolvedConfig
from src.train.build import build_run
from src.train.loop import run_steps
from src.train.step import AUTOCAST, Autocast
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.build import build_strategy
from timm_parallel.record.result import read_result
from timm_parallel.runtime.evaluation import evaluate
from timm_parallel.state import checkpoint
from timm_parallel.testing.commands import Train
from timm_parallel.testing.configs import resolved
from timm_parallel.testing.gpu import EACH_ACCELERATOR, ON_CUDA, ONLY_CUDA
from timm_parallel.testing.ranks import run_warm

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
    "two gloo ranks on one device": ("parallel=ddp", "parallel.devices=2", "parallel.backend=gloo"),
}
RESNET = ("model=resnet18", "model.name=resnet10t")
TWO_GLOO_RANKS = ("two gloo ranks on one device", "fp32")
RUNS = [
    *(("single", precision) for precision in ("fp32", "bf16", "fp16")),
    *(("dp", "bf16"), ("ddp over NCCL", "fp32"), ("ddp over NCCL", "fp16"), TWO_GLOO_RANKS),
]


@pytest.fixture(scope="module")
def loss_on_cpu(train_shared: Train) -> float:
    done = train_shared("parallel=single", "parallel.accelerator=cpu")
    assert done.returncode == 0, done.output
    return float(done.result["train"]["loss"])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "way", "precision"),
    [
        ("cpu", *TWO_GLOO_RANKS),
        *(pytest.param("cuda", *run, marks=ON_CUDA) for run in RUNS),
    ],
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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("accelerator", EACH_ACCELERATOR)
def test_forked_jobs_of_a_sweep_train_on_the_gpu_and_record_the_gpu_count(
    train: Train, accelerator: str
) -> None:
    sweep = train.base / "sweep"
    words = ("parallel=single", "optim.lr=1e-3,1e-4", f"parallel.accelerator={accelerator}")
    done = train("-m", *words, "train.max_steps=3", f"hydra.sweep.dir={sweep}")
    assert done.returncode == 0, done.output
    for job in ("0", "1"):
        facts = json.loads((sweep / job / "environment.json").read_text(encoding="utf-8"))
        assert (read_result(sweep / job).accelerator, len(facts["devices"])) == (
            accelerator,
            torch.cuda.device_count(),
        )


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


def losses_and_evaluation(config: ResolvedConfig) -> tuple[list[float], float]:
    """Train one epoch, evaluate, and return (list of the losses of all steps, validation loss)."""
    torch.manual_seed(config.seed)
    strategy = build_strategy(config.parallel, Ranks(), None)
    run = build_run(config, strategy)
    assert strategy.measured_world_size() == config.parallel.devices
    steps = run_steps(run, run.train_loader.epoch(0))
    losses = [report.means["loss"] for report in steps]
    autocast = Autocast(run.state.model, strategy.device.type, AUTOCAST[config.train.precision])
    evaluation = evaluate(
        strategy.for_evaluation(autocast),
        run.eval_loaders["val"],
        run.task,
        strategy.group,
    )
    assert evaluation is not None and evaluation.numbers["loss"] is not None
    return losses, evaluation.numbers["loss"]


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("accelerator", EACH_ACCELERATOR)
@pytest.mark.parametrize("loss_in_replica", [None, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dp_training_with_two_replicas_on_one_device_matches_single(
    accelerator: str, loss_in_replica: bool | None, precision: str
) -> None:
    """DataParallel of torch accepts one device twice, although train.py refuses this. On a CPU,
    each replica is a thread.
    """
    overrides = (
        f"parallel.accelerator={accelerator}",
        f"train.precision={precision}",
        "train.log_every=1",
    )
    config = resolved("parallel=single", *overrides)
    alone = losses_and_evaluation(config)
    parallel = config.parallel
    parallel.strategy, parallel.devices, parallel.loss_in_replica = "dp", 2, loss_in_replica
    parallel.device_ids = [0, 0] if accelerator == "cuda" else None
    both = losses_and_evaluation(config)
    assert len(both[0]) == 6 and max(alone[0]) - min(alone[0]) > 0.1, (
        "expected the loss to change, because equal constant losses would prove nothing"
    )
    assert both[0] == pytest.approx(alone[0], abs=TOLERANCE[precision])
    assert both[1] == pytest.approx(alone[1], abs=TOLERANCE[precision])
