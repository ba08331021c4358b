"""Losses and numbers of a training step, and autocast. Parameters of a loss are trained and saved,
but not exported; test_examples.py trains one under several strategies.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from src.commands.export import export_safetensors
from src.commands.load import load_trained
from src.schema import ResolvedConfig, TrainConfig
from tests.template.runs import parts_of, resolved, task_of, train_run
from timm_parallel.batch import Batch
from timm_parallel.errors import NotFiniteError
from timm_parallel.keys import ResolvedParallel
from timm_parallel.launch.job import prepare
from timm_parallel.machine.ranks import Ranks
from timm_parallel.model.checks import check_is_complete
from timm_parallel.parallel.data_parallel import DataParallelStrategy
from timm_parallel.parallel.distributed import has_only_batch_norm_buffers
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep, autocast
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint, restoring
from timm_parallel.run.parts import RunParts
from timm_parallel.run.step import MetricWindow, Step

# Total number of steps in two epochs.
STEPS = 8
SETTINGS = (
    "model.num_classes=18",
    "data.batch_size=12",
    "data.limit_train=96",
    "train.accumulate=2",
    "train.log_every=1",
    "optim.warmup_epochs=0.5",
    "optim.clip_grad=1",
    "parallel.accelerator=cpu",
    "model.ema.decay=0.9",
)
# Module name under which configs find this file, because they may name only classes of src/.
HERE = "src.losses_of_test"
sys.modules[HERE] = sys.modules[__name__]
NAMES = ["centers", "temperature", "batches"]


class ArcFace(nn.Module):
    """ArcFace (arXiv:1801.07698) with a learned scale, a count of batches and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(10, 8))
        self.temperature = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(2), persistent=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.batches: Tensor = self.batches + 1
        scores, embeddings = outputs[:, :10], outputs[:, 10:]
        cosines = functional.normalize(embeddings) @ functional.normalize(self.centers).T
        # Keep away from 1, where the derivative of acos is infinite.
        angles = cosines.clamp(-0.9999, 0.9999).acos()
        margins = 0.3 * functional.one_hot(targets, 10)
        arcface = functional.cross_entropy(16 * (angles + margins).cos(), targets)
        plain = functional.cross_entropy(scores, targets)
        return arcface + plain + functional.cross_entropy(scores * self.temperature, targets)


def config_of(*overrides: str) -> ResolvedConfig:
    config = resolved(*SETTINGS, *overrides)
    config.train.loss = f"{HERE}.ArcFace"
    return config


def contents(folder: Path, name: str = "last") -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints" / f"{name}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("loss_parameters"), config_of("parallel=single")
    prepare(config, folder)
    train_run(config, folder)
    return folder


def built(*overrides: str) -> RunParts:
    return parts_of(config_of("parallel=single", *overrides))


def saved(run: RunParts) -> dict[str, Any]:
    return restoring.snapshot(run.state, run.strategy)


@pytest.mark.slow(seconds=2)
def test_parameters_of_a_loss_are_trained_and_hashed_with_weight_decay_for_matrices_only(
    trained: Path,
) -> None:
    last, initial = contents(trained), built().state.own_tensors("loss")
    own, digest = last["networks"]["loss"], hashlib.sha256()
    for name in ("centers", "temperature"):
        assert (own[name] - initial[name]).abs().max() > 1e-4, name
    for tensor in (*last["model"].values(), own["centers"], own["temperature"]):
        digest.update(tensor.numpy().tobytes())
    assert read_result(trained).parameters_hash == digest.hexdigest()[:16]
    assert own["batches"] == 2 * STEPS
    groups = {
        tuple(group["params"]): group["weight_decay"]
        for group in last["phases"]["train"]["optimizer"]["param_groups"][-2:]
    }
    assert groups == {("loss.temperature",): 0.0, ("loss.centers",): 0.05}


def test_loss_is_trained_like_the_head_and_never_frozen() -> None:
    words = ("optim.head_lr_scale=10", "optim.layer_decay=0.5", "model.freeze=backbone")
    state = built(*words).state
    groups = state.phases[0].optimizer.param_groups
    scale_of = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    trained = {name for name, parameter in state.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias", "loss.centers", "loss.temperature"}
    own = state.networks["loss"].parameters()
    assert [scale_of[id(parameter)] for parameter in own] == [10.0, 10.0]


# Adaptive clipping (agc) does not change the head.
@pytest.mark.parametrize(("mode", "expected"), [("norm", 5.0), ("value", 5.0), ("agc", 10.0)])
def test_gradient_norm_and_clipping_include_the_parameters_of_a_loss(
    mode: str, expected: float
) -> None:
    run = built("optim.clip_grad=5", f"optim.clip_mode={mode}")
    step = Step(run, iter(()), MetricWindow(run.strategy.device, run.progress))
    step.is_logged = True
    for parameter in run.state.parameters():
        parameter.grad = torch.zeros_like(parameter)
    temperature = dict(run.state.named_parameters())["loss.temperature"]
    assert temperature.grad is not None
    temperature.grad.fill_(10)
    step._clip(run.state.phases[0])
    assert step._norms["train"] == 10
    assert temperature.grad.item() == pytest.approx(expected)


def test_optimizer_without_a_trainable_parameter_and_weights_that_are_nan_are_refused() -> None:
    run = built()
    dict(run.state.named_parameters())["loss.temperature"].data.fill_(math.nan)
    with pytest.raises(NotFiniteError):
        restoring.checkpoint_of(run, [])
    (phase,) = run.state.phases
    phase.optimizer.param_groups.pop()
    with pytest.raises(ValueError, match=r"loss\.centers"):
        check_is_complete(phase.optimizer, phase.parameters)


@pytest.mark.slow(seconds=2)
def test_checkpoint_without_the_parameters_of_the_loss_is_refused_in_one_line() -> None:
    run = built()
    old = {**saved(run), "networks": {}}
    other = {**saved(run), "networks": {"loss": {name: torch.zeros(3) for name in NAMES}}}
    for contents_of_run in (old, other):
        with pytest.raises(ValueError, match=r"^train\.loss: .*centers") as refusal:
            restoring.restore(built().state, run.strategy, contents_of_run)
        assert "\n" not in str(refusal.value)


def test_built_in_losses_store_no_class_weights_in_checkpoints() -> None:
    tasks = {"ce": "classification", "bce": "classification", "asl": "multilabel"}
    for loss, name in tasks.items():
        train = TrainConfig(task=name, loss=loss, class_weights=torch.rand(10).tolist())
        task = task_of(10, train)
        task.prepare(None)
        criterion = task.networks(nn.Identity())["loss"]
        assert list(criterion.buffers())
        assert not criterion.state_dict()
        assert has_only_batch_norm_buffers(criterion), "ddp would send class weights in every step"


def test_exported_model_contains_no_parameters_of_the_loss(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    # Replace the loss in the config, because loading checks that the class is in src/.
    text = (run / "config.yaml").read_text().replace(f"{HERE}.ArcFace", "ce")
    (run / "config.yaml").write_text(text)
    export_safetensors(load_trained(run, None, None, torch.device("cpu")), tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == contents(trained)["model"].keys()
    fresh = built(f"model.weights={trained}/checkpoints/best.pt").state
    own = contents(trained)["networks"]["loss"]
    assert not torch.equal(fresh.own_tensors("loss")["centers"], own["centers"])


def test_dp_moves_the_loss_to_the_device_of_the_outputs() -> None:
    config = ResolvedParallel(strategy="dp", devices=2, accelerator="cpu", threads_per_device=1)
    strategy, criterion = DataParallelStrategy(config, Ranks()), ArcFace()
    # The device meta exists on every machine.
    strategy.output_device = torch.device("meta")
    model = nn.Linear(4, 18)
    strategy.wrap(PhaseStep(task_of(10), Networks({"model": model, "loss": criterion}), "train"))
    assert {tensor.device.type for tensor in (*criterion.parameters(), *criterion.buffers())} == {
        "meta"
    }
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


class Reader(nn.Module):
    reads = ("smoothing", "mixup")

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing


@pytest.mark.parametrize(("mixup", "expected"), [(0.0, 0.1), (0.2, 0.0)])
def test_custom_loss_receives_label_smoothing_unless_mixup_smooths_the_targets(
    mixup: float, expected: float
) -> None:
    train = TrainConfig(loss=f"{HERE}.Reader", smoothing=0.1)
    criterion = task_of(3, train, mixup=mixup).networks(nn.Identity())["loss"]
    assert criterion.smoothing == expected


def test_train_accuracy_ignores_outputs_beyond_the_classes_of_the_data() -> None:
    task = task_of(2)
    step = PhaseStep(task, Networks(task.networks(nn.Identity())), "train")
    scores = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0]])
    _, numbers = step(Batch({"image": scores, "target": torch.tensor([1, 1])}))
    assert numbers["acc"].tolist() == [1.0, 0.0]


def test_autocast_wraps_every_network_but_the_loss() -> None:
    networks = {"model": nn.Linear(3, 2), "teacher": nn.Linear(3, 2), "loss": nn.Linear(2, 2)}
    wrapped = autocast(networks, torch.device("cpu"), "bf16")
    assert {name: type(network) for name, network in wrapped.items()} == {
        "model": Autocast,
        "teacher": Autocast,
        "loss": nn.Linear,
    }


def test_autocast_converts_every_output_of_a_model_to_float32() -> None:
    class TwoHeads(nn.Linear):
        def forward(self, images: torch.Tensor) -> Any:
            scores = super().forward(images)
            return scores, {"auxiliary": 2 * scores}

    scores, others = Autocast(TwoHeads(3, 2), "cpu", torch.bfloat16)(torch.ones(4, 3))
    assert scores.dtype == others["auxiliary"].dtype == torch.float32
    assert torch.equal(2 * scores, others["auxiliary"])
    # bfloat16 has 8 bits of mantissa.
    assert torch.equal(scores.bfloat16().float(), scores)


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (("model=resnet18", "data.batch_size=1"), True),
        (("model=resnet18", "data.batch_size=2", "parallel=dp", "parallel.devices=2"), True),
        (("model=resnet18", "data.batch_size=7", "parallel=dp", "parallel.devices=3"), True),
        (("model=resnet18", "data.batch_size=2"), False),
        # The deepest BatchNorm gets 2x2 pixels of an image.
        (("model=resnet18", "data.batch_size=1", "data.image_size=64"), False),
        (("model=resnet18", "data.batch_size=1", "model.freeze=backbone"), False),
        (("model=tiny", "data.batch_size=1"), False),
    ],
)
def test_run_is_refused_when_batch_norm_gets_one_value_per_channel(
    words: tuple[str, ...], is_refused: bool
) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", *words)
    with (
        pytest.raises(ValueError, match=r"^data\.batch_size=\d: .*BatchNorm")
        if is_refused
        else nullcontext()
    ):
        parts_of(config)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("src.models.cifar_resnet.CifarResNet18.__init__", AttributeError("no attribute 'conv'")),
        ("src.data.datasets.Digits.__init__", TypeError("unsupported operand type(s)")),
        ("src.models.cifar_resnet.CifarResNet18.forward", torch.OutOfMemoryError("CUDA")),
    ],
    ids=["attribute", "data", "memory"],
)
def test_exception_inside_custom_model_or_dataset_is_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch, where: str, fault: Exception
) -> None:
    """The config is valid, so the exception must not be reported as a config error."""

    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(where, fails)
    model = (
        "model=resnet18",
        "model.name=src.models.cifar_resnet.CifarResNet18",
        "data.image_size=8",
    )
    config = resolved("parallel=single", "parallel.accelerator=cpu", *model)
    with pytest.raises(type(fault)) as raised:
        parts_of(config)
    assert raised.value is fault


@pytest.mark.parametrize(
    ("name", "loss", "targets"),
    [
        ("classification", "ce", torch.tensor([10])),
        ("classification", "ce", torch.tensor([-1])),
        ("classification", "ce", torch.tensor([0.5])),
        ("multilabel", "bce", torch.zeros(2, 9)),
        ("regression", "mse", torch.zeros(2, 9)),
        ("segmentation", "ce", torch.full((1, 4, 4), 10)),
    ],
)
def test_targets_and_outputs_that_do_not_fit_the_task_are_refused(
    name: str, loss: str, targets: Tensor
) -> None:
    task = task_of(10, TrainConfig(task=name, loss=loss))
    with pytest.raises(ValueError, match=r"^the data has "):
        task.check_targets(targets)
    task.check_targets(targets[:0])
    few = torch.zeros(1, 9, 4, 4) if name == "segmentation" else torch.zeros(1, 9)
    for outputs in (few, None, few[0]):
        with pytest.raises(ValueError, match=r"^model\.name: expected "):
            task.check_outputs(outputs, Batch({"image": torch.zeros(1)}))
