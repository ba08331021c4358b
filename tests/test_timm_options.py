"""timm's options under timm's names: each trains under single, dp and ddp, and means the same, or is refused by name."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from conftest import in_ranks, resolved
from torch import nn

from src.data.datasets import build_images
from src.engine.machine.ranks import Ranks
from src.models.build import preprocessing_for, train_image_size
from src.parallel import build_strategy
from src.run.build import Run
from src.schema import DataConfig, ResolvedConfig
from src.training.loop import train_epoch

SMALL_SWIN = (
    "model.name=swin_tiny_patch4_window7_224",
    "+model.kwargs={embed_dim: 16, depths: [1, 1], num_heads: [1, 2], patch_size: 4, window_size: 4, drop_path_rate: 0}",
)
# Name -> (overrides, how far losses may be from those of single). None: they differ legitimately, by BatchNorm's
# statistics of a chunk, or by draws that are each rank's own (mixing pairs images within a rank).
OPTIONS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "nothing": ((), 1e-5),
    "resnet": (("model.name=test_resnet", "+model.kwargs={}"), None),
    "efficientnet": (("model.name=test_efficientnet", "+model.kwargs={}"), None),
    "convnext": (("model.name=test_convnext", "+model.kwargs={}"), 1e-5),
    "vit": (("model.name=test_vit", "+model.kwargs={}"), 1e-5),
    "swin": (SMALL_SWIN, 1e-5),
    "own": (("model.name=src.models.cifar_resnet.CifarResNet18", "+model.kwargs={}", "data.image_size=8"), None),
    "channels_last": (("model.channels_last=true",), 1e-5),
    "grad_checkpointing": (("model.grad_checkpointing=true",), 1e-5),
    "num_classes": (("model.num_classes=12",), 1e-5),
    "ema": (("model.ema.decay=0.9",), 1e-5),
    "ema_without_warmup": (("model.ema.decay=0.9", "model.ema.warmup=false"), 1e-5),
    "randaugment": (("data.augment.aa=rand-m9-mstd0.5-inc1",), 1e-5),
    "augmix": (("data.augment.aa=augmix-m5-w4-d2",), 1e-5),
    "autoaugment": (("data.augment.aa=v0r-mstd0.5",), 1e-5),
    "color_jitter": (("data.augment.color_jitter=0.4",), 1e-5),
    "reprob": (("data.augment.reprob=0.5",), 1e-5),
    "crop": (("data.augment.scale=[0.3,1]", "data.augment.ratio=[0.8,1.2]", "data.augment.interpolation=random"), 1e-5),
    "bicubic": (("data.augment.scale=[0.3,1]", "data.augment.interpolation=bicubic"), 1e-5),
    "crop_padding": (("data.augment.crop_padding=4", "data.augment.hflip=0.5"), 1e-5),
    "aug_repeats": (("data.augment.aug_repeats=3", "data.augment.hflip=0.5"), 1e-5),
    "mixup": (("data.augment.mixup=0.8",), None),
    "cutmix": (("data.augment.cutmix=1.0",), None),
    "mixup_and_cutmix": (("data.augment.mixup=0.2", "data.augment.cutmix=1.0", "train.smoothing=0.1"), None),
    "mixup_larger_head": (("data.augment.mixup=0.8", "model.num_classes=20"), None),
    "smoothing": (("train.smoothing=0.1",), 1e-5),
    "bce": (("train.loss=bce",), 1e-5),
    "bce_mixed": (("train.loss=bce", "train.bce_target_thresh=0.2", "data.augment.mixup=0.5"), None),
    "bf16": (("train.precision=bf16",), 2e-2),
    "fp16": (("train.precision=fp16",), 2e-2),
    "accumulate": (("train.accumulate=2",), 1e-5),
    "clip_grad": (("optim.clip_grad=0.5",), 1e-5),
    "fp16_accumulate_clip": (("train.precision=fp16", "train.accumulate=2", "optim.clip_grad=1.0"), 2e-2),
    "on_nonfinite": (("train.on_nonfinite=skip",), 1e-5),
    "sgd": (("optim.opt=sgd", "optim.lr=0.01"), 1e-5),
    "momentum": (("optim.opt=momentum", "optim.lr=0.01"), 1e-5),
    "lamb": (("optim.opt=lamb",), 1e-4),
    "muon": (("optim.opt=muon", "optim.lr=0.01"), 1e-3),
    "betas": (("+optim.kwargs={betas: [0.9, 0.95], eps: 1e-7}",), 1e-5),
    "layer_decay": (("optim.layer_decay=0.7",), 1e-5),
    "lr_rule": (("optim.lr_rule=sqrt",), 1e-5),
    "no_schedule": (("optim.sched=none",), 1e-5),
    "constant": (("optim.sched=constant",), 1e-5),
    "tanh": (("optim.sched=tanh",), 1e-5),
    "step": (("optim.sched=step", "optim.decay_epochs=1"), 1e-5),
    "multistep": (("optim.sched=multistep", "optim.decay_milestones=[1]"), 1e-5),
    "poly": (("optim.sched=poly", "optim.decay_rate=0.9"), 1e-5),
    "wsd": (("optim.sched=wsd", "optim.decay_epochs=1"), 1e-5),
    "rsqrt": (("optim.sched=rsqrt", "optim.decay_epochs=0.5"), 1e-5),
    "cycles": (("+optim.sched_kwargs={cycle_limit: 2, cycle_decay: 0.5}",), 1e-5),
}
STRATEGIES = {
    "single": ("parallel=single",),
    "dp2": ("parallel=dp", "parallel.devices=2"),
    "ddp2": ("parallel=ddp", "parallel.devices=2"),
}
COMMON = (
    "parallel.accelerator=cpu",
    "data.batch_size=16",
    "data.limit_train=96",
    "train.max_steps=3",
    "optim.warmup_epochs=0.1",
)
# One of each kind: a model with BatchNorm, averaged weights, mixed images, a scaler with accumulation and clipping. The rest
# of the matrix is for `make test-all`.
QUICK = ("nothing", "resnet", "ema", "mixup_larger_head", "fp16_accumulate_clip")
Told = dict[str, Any]  # losses, parameters_equal, ema_equal; or error


def overrides_of(option: str) -> tuple[str, ...]:
    given = OPTIONS[option][0]
    if "+model.kwargs={}" in given or option == "swin":  # not the tiny ViT
        return tuple(word for word in ("model=resnet18", *given) if word != "+model.kwargs={}")
    return given


@cache
def config_of(option: str) -> ResolvedConfig:
    """Composed once: composing takes longer than the steps."""
    return resolved(*COMMON, *STRATEGIES["single"], *overrides_of(option))


def three_steps(ranks: Ranks, store: Any, option: str, config: ResolvedConfig) -> Told:
    torch.manual_seed(config.seed)
    own = None if store is None else torch.distributed.PrefixStore(option, store)
    spread = build_strategy(config.parallel, ranks, own)
    try:
        run = Run(config, spread)
        state, config.train.log_every = run.state, 1
        steps = train_epoch(state, run.train.epoch(0), config, spread, run.moments, run.steps_per_epoch, run.mixing)
        losses = [report.loss for report in steps]
        ema = state.ema
        return {
            "losses": losses,
            "parameters_equal": spread.parameters_hash(state.model)[1],
            "ema_equal": None if ema is None else spread.parameters_hash(ema.module)[1],
            "finite": all(bool(p.isfinite().all()) for p in state.model.parameters()),
        }
    finally:
        spread.close()


def try_options(ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]) -> dict[str, Told]:
    torch.set_num_threads(1)
    found = {}
    for option, config in configs.items():
        try:
            found[option] = three_steps(ranks, store, option, config)
        except Exception:
            found[option] = {"error": traceback.format_exc()}
    return found


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Told]]:
    """strategy -> option -> what it came to; under ddp, rank 0's words. All options that were asked for train in one go."""
    known: dict[str, dict[str, Told]] = {}
    chosen = {item.callspec.params.get("option") for item in request.session.items if hasattr(item, "callspec")}
    options = [option for option in OPTIONS if option in QUICK or option in chosen]

    def get(strategy: str) -> dict[str, Told]:
        if strategy not in known:
            world = 2 if strategy == "ddp2" else 1
            run = in_ranks if world == 2 else lambda function, _, *rest, **__: [function(Ranks(), None, *rest)]
            parallel = resolved(*COMMON, *STRATEGIES[strategy]).parallel
            configs = {option: replace(copy.deepcopy(config_of(option)), parallel=parallel) for option in options}
            known[strategy] = run(try_options, world, configs)[0]
        return known[strategy]

    return get


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "option", [o if o in QUICK else pytest.param(o, marks=pytest.mark.slow(seconds=0.5)) for o in OPTIONS]
)
def test_every_option_trains_under_every_strategy(
    told: Callable[[str], dict[str, Told]], option: str, strategy: str
) -> None:
    found = told(strategy)[option]
    assert "error" not in found, found["error"]
    assert len(found["losses"]) == 3 and all(math.isfinite(loss) for loss in found["losses"])
    assert found["parameters_equal"] and found["ema_equal"] is not False and found["finite"]
    assert (found["ema_equal"] is None) == ("ema" not in option)
    tolerance = OPTIONS[option][1]
    if tolerance is not None:
        assert found["losses"] == pytest.approx(told("single")[option]["losses"], abs=tolerance)


def shared_mean(ranks: Ranks, store: Any, dist_bn: str | None) -> float:
    """BatchNorm's average after an evaluation begins, of ranks that had seen 0 and 1."""
    words = () if dist_bn is None else (f"parallel.dist_bn={dist_bn}",)
    config = resolved(*COMMON, *STRATEGIES["ddp2"], *words)
    strategy = build_strategy(config.parallel, ranks, store)
    norm = nn.BatchNorm2d(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(float(ranks.rank))
    strategy.share_buffers(norm)
    strategy.close()
    return float(norm.running_mean[0])


@pytest.mark.processes
@pytest.mark.sample(2)
@pytest.mark.parametrize(("dist_bn", "expected"), [(None, 0.0), ("broadcast", 0.0), ("reduce", 0.5)])
def test_batchnorm_statistics_are_rank_0s_or_averaged(dist_bn: str | None, expected: float) -> None:
    assert in_ranks(shared_mean, 2, dist_bn) == [expected, expected]


@pytest.mark.slow
@pytest.mark.processes
def test_options_change_the_training(told: Callable[[str], dict[str, Told]]) -> None:
    """Else an option that does nothing would pass; those named here are to change nothing in three steps but the speed."""
    losses = {option: found["losses"] for option, found in told("single").items()}
    same = {option for option in losses if losses[option] == losses["nothing"]} - {"nothing"}
    assert same <= {"channels_last", "grad_checkpointing", "ema", "ema_without_warmup", "on_nonfinite"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallel=dp", "parallel.devices=2", "model.compile=true"), r"model\.compile=true: .* use ddp or single"),
        (("parallel=ddp", "parallel.devices=2", "model.sync_bn=true"), r"model\.sync_bn=true: .* CUDA only"),
        (("optim.opt=adahessian",), r"optim\.opt=adahessian: needs second derivatives"),
        (("optim.sched=plateau",), r"optim\.sched=plateau: .* use cosine or wsd"),
        (
            ("optim.sched=multistep", "optim.decay_milestones=[1,9]"),
            r"optim\.decay_milestones=\[1.*, 9.*\]: 9.* after train",
        ),
        (("optim.sched=step",), r"optim\.sched=step: set optim\.decay_epochs"),
        (("optim.sched=step", "optim.decay_epochs=5"), r"optim\.decay_epochs=5.*: longer than training"),
        (("optim.decay_epochs=1",), r"optim\.decay_epochs=1.*: has no effect with optim\.sched=cosine"),
        (
            ("optim.sched=step", "optim.decay_epochs=1", "+optim.sched_kwargs.cycle_limit=2"),
            r"cycle_limit: has no effect",
        ),
        (("+optim.sched_kwargs.num_epochs=9",), r"optim\.sched_kwargs\.num_epochs: set optim\.num_epochs|follows"),
        (("data.augment.mixup=0.5", "data.batch_size=15"), r"data\.batch_size=15: mixup and cutmix pair images"),
        (("checkpoint.metric=val/acc_ema",), r"checkpoint\.metric=val/acc_ema: .* set model\.ema\.decay"),
        (("train.bce_target_thresh=0.2",), r"train\.bce_target_thresh=0\.2: has an effect with train\.loss=bce only"),
        (("model.weights=nowhere.pt",), r"model\.weights=nowhere\.pt: no such file"),
        (("data.mean=[0.5]",), r"data\.mean and data\.std: set both or neither"),
        (("data=timm", "data.name=torch/cifar11", "data.root=."), r"data\.name=torch/cifar11: .* did you mean cifar10"),
        (("data=timm", "data.name=tfds/mnist", "data.root=."), r"data\.name=tfds/mnist: a stream.*hfds"),
        (("data=timm", "data.name=wds", "data.root=nowhere"), r"data\.root=nowhere: no such folder"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key_and_a_remedy(words: tuple[str, ...], said: str) -> None:
    from src.data.folders import check_data

    with pytest.raises(ValueError, match=said) as refusal:
        check_data(resolved(*words).data)
    assert "\n" not in str(refusal.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("+optim.kwargs.nesterovv=true",), r"optim\.kwargs=.*nesterovv.*: adamw does not take"),
        (("+optim.sched_kwargs.cycle=2",), r"optim\.sched_kwargs=.*: cosine does not take"),
        (("data.image_size=4",), r"data\.image_size=4: the model refuses images of 4x4"),
        (("+model.kwargs.depht=3",), r"model\.kwargs=.*depht.*does not take"),
        (("model.num_classes=3",), r"model\.num_classes=3: the data has 10 classes"),
        (("model.in_chans=3",), r"model\.in_chans=3: the data's images have 1 channels"),
        (("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"), r"data\.mean=.*one number per channel"),
        (("model=resnet18", "model.name=test_byobnet", "model.grad_checkpointing=true"), None),
        (
            ("model=resnet18", "model.name=vgg11", "model.grad_checkpointing=true"),
            r"model\.grad_checkpointing=true: vgg11",
        ),
    ],
)
def test_what_a_constructor_refuses_names_the_key(words: tuple[str, ...], said: str | None) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", *words)
    strategy = build_strategy(config.parallel, Ranks(), None)
    if said is None:
        Run(config, strategy)
        return
    with pytest.raises(ValueError, match=said) as refusal:
        Run(config, strategy)
    assert "\n" not in str(refusal.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("src.models.cifar_resnet.CifarResNet18.__init__", AttributeError("'NoneType' object has no attribute 'conv'")),
        ("src.models.cifar_resnet.CifarResNet18.__init__", TypeError("'NoneType' object is not callable")),
        ("src.data.datasets.Digits.__init__", TypeError("unsupported operand type(s) for +: 'int' and 'str'")),
        ("src.models.cifar_resnet.CifarResNet18.forward", torch.OutOfMemoryError("CUDA out of memory")),
    ],
    ids=["attribute", "call", "data", "memory"],
)
def test_a_fault_inside_a_class_of_your_own_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, where: str, fault: Exception
) -> None:
    """It is no matter of the config, so nothing of it is to be changed."""

    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(where, fails)
    model = ("model=resnet18", "model.name=src.models.cifar_resnet.CifarResNet18", "data.image_size=8")
    config = resolved("parallel=single", "parallel.accelerator=cpu", *model)
    strategy = build_strategy(config.parallel, Ranks(), None)
    with pytest.raises(type(fault)) as raised:
        Run(config, strategy)
    assert raised.value is fault


def test_training_images_have_the_models_size_where_only_that_of_evaluation_is_given() -> None:
    model, config = timm.create_model("test_vit"), DataConfig(name="folder", eval_image_size=96)
    images: Any = SimpleNamespace(image_size=None, in_chans=3, val=None, mean=None, std=None)
    assert train_image_size(model, config, images) == 160
    assert preprocessing_for(model, config, images).input_size == (3, 96, 96)
    images.image_size = 48
    assert train_image_size(model, config, images) == 48
    assert train_image_size(model, DataConfig(image_size=64), images) == 64


def test_images_in_memory_have_one_size() -> None:
    """Of a dataset of your own, whose kind is not known before it is built."""
    images = build_images(DataConfig())
    with pytest.raises(
        ValueError, match=r"data\.eval_image_size=16: the images of src\.data\.mine\.Mine have one size"
    ):
        preprocessing_for(nn.Identity(), DataConfig(name="src.data.mine.Mine", eval_image_size=16), images)
