"""Options with timm's names."""

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
from torch import nn

from src.data.transforms import Preprocessing, evaluation_transform
from src.models.preprocessing import preprocessing_for, train_image_size
from src.schema import DataConfig, ResolvedConfig
from tests.template.runs import parts_of, resolved, take_steps
from timm_parallel.data.build import build_dataset
from timm_parallel.machine.ranks import Ranks
from timm_parallel.runtime.replica_checks import parameters_hash
from timm_parallel.testing.ranks import in_ranks

# Dictionary from a name to overrides and the largest difference of losses from single. None: they
# may differ, because BatchNorm sees a chunk or each rank draws its own random numbers.
OPTIONS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "nothing": ((), 1e-5),
    "resnet": (("model.name=test_resnet", "+model.kwargs={}"), None),
    "vit": (("model.name=test_vit", "+model.kwargs={}"), 1e-5),
    "own": (
        (
            "model.name=src.models.cifar_resnet.CifarResNet18",
            "+model.kwargs={}",
            "data.image_size=8",
        ),
        None,
    ),
    "channels_last": (("model.channels_last=true",), 1e-5),
    "grad_checkpointing": (("model.grad_checkpointing=true",), 1e-5),
    "num_classes": (("model.num_classes=12",), 1e-5),
    "ema": (("model.ema.decay=0.9",), 1e-5),
    "ema_without_warmup": (("model.ema.decay=0.9", "model.ema.warmup=false"), 1e-5),
    "randaugment": (("data.augment.aa=rand-m9-mstd0.5-inc1",), 1e-5),
    "reprob": (("data.augment.reprob=0.5",), 1e-5),
    "reprob_rand_and_repeats": (
        (
            "data.augment.reprob=0.9",
            "data.augment.remode=rand",
            "data.augment.aug_repeats=2",
            "data.augment.vflip=0.5",
        ),
        1e-5,
    ),
    "crop": (
        (
            "data.augment.scale=[0.3,1]",
            "data.augment.ratio=[0.8,1.2]",
            "data.augment.interpolation=random",
        ),
        1e-5,
    ),
    "crop_padding": (("data.augment.crop_padding=4", "data.augment.hflip=0.5"), 1e-5),
    "aug_repeats": (("data.augment.aug_repeats=3", "data.augment.hflip=0.5"), 1e-5),
    "mixup_and_cutmix": (
        ("data.augment.mixup=0.2", "data.augment.cutmix=1.0", "train.smoothing=0.1"),
        None,
    ),
    "mixup_elem": (
        ("data.augment.mixup=0.8", "data.augment.mixup_mode=elem", "data.augment.mixup_prob=0.5"),
        None,
    ),
    "cutmix_minmax_pair": (
        ("data.augment.cutmix_minmax=[0.2,0.8]", "data.augment.mixup_mode=pair"),
        None,
    ),
    "mixup_larger_head": (("data.augment.mixup=0.8", "model.num_classes=20"), None),
    "bce": (("train.loss=bce",), 1e-5),
    "bce_mixed": (
        ("train.loss=bce", "train.bce_target_thresh=0.2", "data.augment.mixup=0.5"),
        None,
    ),
    "bf16": (("train.precision=bf16",), 2e-2),
    "fp16": (("train.precision=fp16",), 2e-2),
    "accumulate": (("train.accumulate=2",), 1e-5),
    "clip_grad": (("optim.clip_grad=0.5",), 1e-5),
    "clip_value": (("optim.clip_grad=0.01", "optim.clip_mode=value"), 1e-5),
    "clip_agc": (("optim.clip_grad=0.01", "optim.clip_mode=agc"), 1e-5),
    "fp16_accumulate_clip": (
        ("train.precision=fp16", "train.accumulate=2", "optim.clip_grad=1.0"),
        2e-2,
    ),
    "lamb": (("optim.opt=lamb",), 1e-4),
    "muon": (("optim.opt=muon", "optim.lr=0.01"), 1e-3),
    "layer_decay": (("optim.layer_decay=0.7",), 1e-5),
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
# Options that run at every commit: BatchNorm, averaged weights, mixed images, and a gradient scaler
# with accumulation and clipping.
QUICK = ("nothing", "resnet", "ema", "mixup_larger_head", "fp16_accumulate_clip")
# Entries: losses, parameters_equal, ema_equal, or error.
Outcome = dict[str, Any]


def overrides_of(option: str) -> tuple[str, ...]:
    given = OPTIONS[option][0]
    # These options need another model than the tiny ViT.
    if "+model.kwargs={}" in given:
        return tuple(word for word in ("model=resnet18", *given) if word != "+model.kwargs={}")
    return given


@cache
def config_of(option: str) -> ResolvedConfig:
    """Compose each config once, because this takes longer than the steps."""
    return resolved(*COMMON, *STRATEGIES["single"], *overrides_of(option))


def three_steps(ranks: Ranks, store: Any, option: str, config: ResolvedConfig) -> Outcome:
    own = None if store is None else torch.distributed.PrefixStore(option, store)
    config.train.log_every = 1
    parts = parts_of(config, ranks, own)
    state, spread = parts.state, parts.strategy
    try:
        return {
            "losses": [numbers["train/loss"] for numbers in take_steps(parts)],
            "parameters_equal": parameters_hash(state.model, spread)[1],
            "ema_equal": None if state.ema is None else parameters_hash(state.ema, spread)[1],
            "finite": all(bool(p.isfinite().all()) for p in state.model.parameters()),
        }
    finally:
        spread.close()


def try_options(ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    actual = {}
    for option, config in configs.items():
        try:
            actual[option] = three_steps(ranks, store, option, config)
        except Exception:
            actual[option] = {"error": traceback.format_exc()}
    return actual


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Outcome]]:
    """Return outcomes by strategy and option, all trained in the same ranks."""
    known: dict[str, dict[str, Outcome]] = {}
    given = [
        item.callspec.params.get("option")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    # Other tests have parameters of this name, which are no texts.
    chosen = {option for option in given if isinstance(option, str)}
    options = [option for option in OPTIONS if option in QUICK or option in chosen]

    def get(strategy: str) -> dict[str, Outcome]:
        if strategy not in known:
            world = 2 if strategy == "ddp2" else 1
            run = (
                in_ranks
                if world == 2
                else lambda function, _, *rest, **__: [function(Ranks(), None, *rest)]
            )
            parallel = resolved(*COMMON, *STRATEGIES[strategy]).parallel
            configs = {
                option: replace(copy.deepcopy(config_of(option)), parallel=parallel)
                for option in options
            }
            known[strategy] = run(try_options, world, configs)[0]
        return known[strategy]

    return get


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "option", [o if o in QUICK else pytest.param(o, marks=pytest.mark.nightly) for o in OPTIONS]
)
@pytest.mark.slow(seconds=1)
def test_losses_with_each_timm_option_are_finite_and_equal_under_single_dp_and_ddp(
    outcomes: Callable[[str], dict[str, Outcome]], option: str, strategy: str
) -> None:
    actual = outcomes(strategy)[option]
    assert "error" not in actual, actual["error"]
    assert len(actual["losses"]) == 3 and all(math.isfinite(loss) for loss in actual["losses"])
    assert actual["parameters_equal"] and actual["ema_equal"] is not False and actual["finite"]
    assert (actual["ema_equal"] is None) == ("ema" not in option)
    tolerance = OPTIONS[option][1]
    if tolerance is not None:
        assert actual["losses"] == pytest.approx(
            outcomes("single")[option]["losses"], abs=tolerance
        )


@pytest.mark.slow
@pytest.mark.nightly
def test_every_timm_option_except_four_listed_options_changes_the_training_losses(
    outcomes: Callable[[str], dict[str, Outcome]],
) -> None:
    """Only the options named here may leave the losses of three steps unchanged."""
    losses = {option: actual["losses"] for option, actual in outcomes("single").items()}
    same = {option for option in losses if losses[option] == losses["nothing"]} - {"nothing"}
    assert same <= {"channels_last", "grad_checkpointing", "ema", "ema_without_warmup"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (
                "parallel=ddp",
                "parallel.devices=2",
                "parallel.dist_bn=reduce",
                "parallel.broadcast_buffers=true",
            ),
            r"parallel\.broadcast_buffers=true: .*parallel\.dist_bn=reduce",
        ),
        (("optim.opt=adahessian",), r"^optim\.opt=adahessian: "),
        (("optim.sched=plateau",), r"optim\.sched=plateau: "),
        (
            ("optim.sched=multistep", "optim.decay_milestones=[1,9]"),
            r"optim\.decay_milestones=\[1.*, 9.*\]: .*train\.epochs=",
        ),
        (("optim.sched=step",), r"optim\.sched=step: set optim\.decay_epochs"),
        (("optim.sched=step", "optim.decay_epochs=5"), r"optim\.decay_epochs=5.*: must be below 2"),
        (
            ("optim.sched=wsd", "optim.decay_epochs=1.5", "optim.cooldown_epochs=0.5"),
            r"optim\.decay_epochs=1\.5: must be below 1\.5",
        ),
        (
            ("optim.decay_epochs=1",),
            r"optim\.decay_epochs=1.*: has no effect with optim\.sched=cosine",
        ),
        (
            ("optim.sched=step", "optim.decay_epochs=1", "+optim.sched_kwargs.cycle_limit=2"),
            r"cycle_limit: has no effect",
        ),
        (
            ("+optim.sched_kwargs.num_epochs=9",),
            r"optim\.sched_kwargs\.num_epochs: set optim\.num_epochs|follows",
        ),
        (
            ("checkpoint.metric=val/acc_ema",),
            r"checkpoint\.metric=val/acc_ema: .* set model\.ema\.decay",
        ),
        (("train.bce_target_thresh=0.2",), r"train\.bce_target_thresh=0\.2: .*train\.loss=bce"),
        (
            ("data=timm", "data.name=torch/cifar11", "data.root=."),
            r"data\.name=torch/cifar11: .* did you mean cifar10",
        ),
        (("data=timm", "data.name=tfds/mnist", "data.root=."), r"data\.name=tfds/mnist: .*hfds"),
    ],
)
def test_unsupported_combination_of_timm_options_is_refused_with_the_key_in_one_line(
    overrides: tuple[str, ...], message: str
) -> None:
    from timm_parallel.data.build import check_data

    with pytest.raises(ValueError, match=message) as refusal:
        check_data(resolved(*overrides))
    assert "\n" not in str(refusal.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("+optim.kwargs.nesterovv=true",), r"optim\.kwargs=.*nesterovv.*: adamw"),
        (("+optim.sched_kwargs.cycle=2",), r"optim\.sched_kwargs=.*: cosine"),
        (("data.image_size=4",), r"data\.image_size=4: .*4x4"),
        (("+model.kwargs.depht=3",), r"model\.kwargs=.*depht"),
        (("model.num_classes=3",), r"model\.num_classes=3: the task has 10 outputs"),
        (("model.in_chans=3",), r"model\.in_chans=3: the data's images have 1 channels"),
        (("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"), r"data\.mean=.*channels"),
        (
            ("model=resnet18", "model.name=vgg11", "model.grad_checkpointing=true"),
            r"model\.grad_checkpointing=true: vgg11",
        ),
    ],
)
def test_error_names_the_key_when_model_optimizer_or_schedule_rejects_its_value(
    overrides: tuple[str, ...], message: str
) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", *overrides)
    with pytest.raises(ValueError, match=message) as refusal:
        parts_of(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "fault"),
    [
        (
            "src.models.cifar_resnet.CifarResNet18.__init__",
            AttributeError("'NoneType' object has no attribute 'conv'"),
        ),
        (
            "src.data.datasets.Digits.__init__",
            TypeError("unsupported operand type(s) for +: 'int' and 'str'"),
        ),
        (
            "src.models.cifar_resnet.CifarResNet18.forward",
            torch.OutOfMemoryError("CUDA out of memory"),
        ),
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


def test_train_image_size_is_that_of_the_model_when_only_eval_image_size_is_set() -> None:
    model = timm.create_model("test_vit", pretrained_cfg_overlay={"crop_mode": "border"})
    config = DataConfig(name="folder", eval_image_size=96)
    images: Any = SimpleNamespace(image_size=None, in_chans=3, val=None, mean=None, std=None)
    assert train_image_size(model, config, images) == (160, 160)
    preprocessing = preprocessing_for(model, config, images)
    assert (preprocessing.input_size, preprocessing.crop_mode) == ((3, 96, 96), "border")
    images.image_size = 48
    assert train_image_size(model, config, images) == (48, 48)
    assert train_image_size(model, DataConfig(image_size=64), images) == (64, 64)


def test_eval_image_size_is_refused_when_a_custom_dataset_is_in_memory() -> None:
    """The check runs after a custom dataset is built, because only then is it known to be in
    memory.
    """
    images = build_dataset(DataConfig())
    with pytest.raises(
        ValueError, match=r"data\.eval_image_size=16: images of src\.data\.mine\.Mine have one size"
    ):
        preprocessing_for(
            nn.Identity(), DataConfig(name="src.data.mine.Mine", eval_image_size=16), images
        )


def test_crop_mode_border_keeps_all_pixels_of_an_image_that_is_one_pixel_wide() -> None:
    preprocessing = Preprocessing((3, 64, 64), (0.5,) * 3, (0.5,) * 3, 1.0, "border", "bilinear")
    actual = evaluation_transform(preprocessing)(torch.full((3, 500, 1), 255, dtype=torch.uint8))
    assert actual.shape == (3, 64, 64) and set(actual.unique().tolist()) == {128, 255}
