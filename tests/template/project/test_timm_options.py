"""Options with timm's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from timm_parallel.run.replica_checks import parameters_hash
from timm_parallel.testing.ranks import in_ranks

# Dictionary from a name to overrides and the largest difference of losses from single. None: they
# may differ, because BatchNorm sees a chunk or each rank draws its own random numbers.
OPTIONS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "nothing": ((), 1e-5),
    "resnet": (("model=resnet18", "model.name=test_resnet"), None),
    "grad_checkpointing": (("model.grad_checkpointing=true",), 1e-5),
    "ema": (("model.ema.decay=0.9",), 1e-5),
    "randaugment": (("data.augment.aa=rand-m9-mstd0.5-inc1",), 1e-5),
    "reprob_rand_and_repeats": (
        (
            "data.augment.reprob=0.9",
            "data.augment.remode=rand",
            "data.augment.aug_repeats=2",
            "data.augment.vflip=0.5",
        ),
        1e-5,
    ),
    "mixup_elem": (
        ("data.augment.mixup=0.8", "data.augment.mixup_mode=elem", "data.augment.mixup_prob=0.5"),
        None,
    ),
    "mixup_larger_head": (("data.augment.mixup=0.8", "model.num_classes=20"), None),
    "bce_mixed": (
        ("train.loss=bce", "train.bce_target_thresh=0.2", "data.augment.mixup=0.5"),
        None,
    ),
    "bf16": (("train.precision=bf16",), 2e-2),
    "clip_agc": (("optim.clip_grad=0.01", "optim.clip_mode=agc"), 1e-5),
    "fp16_accumulate_clip": (
        ("train.precision=fp16", "train.accumulate=2", "optim.clip_grad=1.0"),
        2e-2,
    ),
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
# Options that do not change the losses of three steps.
WITHOUT_EFFECT = ("nothing", "ema", "grad_checkpointing")


def three_steps(ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]) -> dict[str, Any]:
    """Train three steps with each config. Return the losses, and the weights of the model and its
    average if they are equal on all ranks. All ranks must call this function.
    """
    torch.set_num_threads(1)
    outcomes = {}
    for option, config in configs.items():
        own = None if store is None else torch.distributed.PrefixStore(option, store)
        config.train.log_every = 1
        parts = parts_of(config, ranks, own)
        losses = [numbers["train/loss"] for numbers in take_steps(parts)]
        for network in (parts.state.model, parts.state.ema):
            if network is not None:
                assert parameters_hash(network, parts.strategy)[1], option
                assert all(bool(weight.isfinite().all()) for weight in network.parameters())
        assert (parts.state.ema is None) == (option != "ema")
        outcomes[option] = losses
        parts.strategy.close()
    return outcomes


@pytest.mark.parametrize("options", [QUICK, pytest.param([*OPTIONS], marks=pytest.mark.nightly)])
@pytest.mark.slow(seconds=8)
def test_losses_with_timm_options_are_finite_and_equal_under_single_dp_and_ddp(
    options: Sequence[str],
) -> None:
    losses = {}
    for name, strategy in STRATEGIES.items():
        configs = {option: resolved(*COMMON, *strategy, *OPTIONS[option][0]) for option in options}
        is_spread = name == "ddp2"
        [losses[name], *_] = (
            in_ranks(three_steps, 2, configs)
            if is_spread
            else [three_steps(Ranks(), None, configs)]
        )
    single = losses["single"]
    for option in options:
        for of_strategy in losses.values():
            actual, tolerance = of_strategy[option], OPTIONS[option][1]
            assert len(actual) == 3 and all(math.isfinite(loss) for loss in actual), option
            assert tolerance is None or actual == pytest.approx(single[option], abs=tolerance)
    # An option without effect would be equal under all strategies, too.
    same = {option for option in options if single[option] == single["nothing"]}
    assert same <= {*WITHOUT_EFFECT}


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
