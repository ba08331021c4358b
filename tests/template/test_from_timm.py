"""scripts/from_timm.py converts every argument of train.py of timm to a config with the same
training values.

timm_train_args.json contains name and default of the 172 arguments of train.py at commit aa4b585,
and of --config. Newer ones are in `NEWER`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler_factory import scheduler_kwargs
from torch import nn

from scripts import from_timm
from scripts.from_timm import TABLE, TimmArguments, changes, convert
from src.schema import Config, OptimConfig, TrainConfig
from src.train.optim import build_schedule
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command
from timm_parallel.keys import leaves

OF_COMMIT = json.loads(
    (Path(__file__).with_name("timm_train_args.json")).read_text(encoding="utf-8")
)
# Arguments of timm 1.0.31 that are newer than the pinned train.py. Their defaults are those of the
# timm functions that take them.
NEWER = {
    **dict.fromkeys(
        ("target_format", "class_stats", "loss_class_weight", "loss_pos_weight", "loss_weight_max")
    ),
    **dict.fromkeys(("loss", "lr_decay_fn", "lr_stable_timescale", "stop_epoch", "save_epochs")),
    **dict.fromkeys(("sweep_locks", "sweep_attempt")),
    **{
        "task": "classification",
        "multilabel_threshold": 0.5,
        "loss_weight_power": 1.0,
        "loss_weight_beta": 0.999,
    },
    **{"poly_epsilon": 2.0, "poly_gamma": 0.0},
}
TIMM = OF_COMMIT | NEWER
KEYS = {key for key, _, _ in leaves(Config())}


def converted(**given: Any) -> dict[str, Any]:
    return convert(TimmArguments({"data_dir": "/data", **given}))


def test_from_timm_yaml_lists_every_argument_of_timm_train_py_once_with_the_default() -> None:
    defaults = {
        name: row[0] for part in from_timm.PARTS for name, row in TABLE[part].items()
    } | TABLE["converted"]
    assert len(OF_COMMIT) == 173 and not NEWER.keys() & OF_COMMIT.keys() and defaults == TIMM
    assert sum(len(TABLE[part]) for part in (*from_timm.PARTS, "converted")) == len(TIMM)
    assert set(TABLE["no_aug"]) <= set(TIMM)
    assert all(reason for _, reason in TABLE["without_meaning"].values())


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (
            {
                "bn_tf": False,
                "crop_mode": None,
                "class_stats": "",
                "save_epochs": [],
            },
            0,
        ),
        ({"bn_tf": True, "of_a_later_version": 3}, 1),
        ({"loss": "ce"}, 0),
        ({"loss": "asl"}, 1),
    ],
)
def test_from_timm_script_reports_only_timm_arguments_that_have_an_effect(
    given: dict[str, Any], reported: int
) -> None:
    lines = TimmArguments(given).differences
    assert len(lines) == reported
    assert all(f"{name}={value}" in lines[0] for name, value in given.items() if reported)


@pytest.mark.parametrize("name", TABLE["same"])
def test_timm_argument_keeps_its_value_in_the_equivalent_config_key(name: str) -> None:
    default, key, *needed = TABLE["same"][name]
    assert key in KEYS or key.rpartition(".")[0] in KEYS
    of_text = {
        "model": "resnet18",
        "aa": "v0",
        "opt": "adamw",
        "remode": "const",
        "mixup_mode": "elem",
        "clip_mode": "agc",
    }
    value = not default if isinstance(default, bool) else of_text.get(name, 3)
    # The key has an effect only together with the first of the needed arguments.
    first, _, sched = (needed[0][0] if needed else "").partition("=")
    given = {first: sched or 1.0} if first else {}
    assert converted(**{**given, name: value})[key] == value
    if needed:
        assert key not in converted(**{"sched": "constant"} if sched else {}, **{name: value})


@pytest.mark.parametrize("name", TABLE["missing"])
def test_timm_argument_without_equivalent_config_key_is_reported_when_given(name: str) -> None:
    assert not any(f" {name}=" in line for line in TimmArguments({}).differences)
    assert any(f" {name}=7;" in line for line in TimmArguments({name: 7}).differences)


@pytest.mark.parametrize("dataset", ["tfds/mnist", "hfids/mnist", "wds/mnist"])
def test_timm_dataset_that_is_a_stream_is_reported(dataset: str) -> None:
    arguments = TimmArguments({"dataset": dataset})
    assert "data.name" not in convert(arguments)
    assert any(f" dataset={dataset};" in line for line in arguments.differences)


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "cosine_prefix": {"warmup_prefix": True, "cooldown_epochs": 2},
    "cosine_cycles": {
        "lr_cycle_limit": 3,
        "lr_cycle_decay": 0.5,
        "warmup_epochs": 0,
        "lr_k_decay": 0.7,
    },
    "tanh": {"sched": "tanh", "warmup_epochs": 1},
    "poly": {"sched": "poly", "decay_rate": 0.9, "cooldown_epochs": 1},
    "step": {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.97, "cooldown_epochs": 5},
    "multistep": {"sched": "multistep", "decay_milestones": [4, 6]},
    "multistep_prefix": {"sched": "multistep", "decay_milestones": [4, 6], "warmup_prefix": True},
    "noise": {
        "sched": "step",
        "decay_epochs": 2,
        "lr_noise": [0.3, 0.9],
        "lr_noise_std": 0.5,
        "seed": 3,
    },
    "wsd": {"sched": "wsd", "decay_epochs": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_converted_schedule_matches_timm_learning_rates_and_epochs(name: str) -> None:
    """timm runs with --sched-on-updates. Without it, timm keeps the learning rate constant within
    an epoch.
    """
    given: dict[str, Any] = {
        "epochs": 8,
        "warmup_epochs": 2,
        "min_lr": 1e-4,
        "lr": 0.1,
        "sched_on_updates": True,
        **SCHEDULES[name],
    }
    settings = converted(**given)
    config = OptimConfig()
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        if section == "optim" and "kwargs" not in key:
            setattr(config, rest, value)
    prefix = "optim.sched_kwargs."
    config.sched_kwargs = {
        key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)
    }
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    schedule = build_schedule(config, TrainConfig(epochs=settings["train.epochs"]), ours, 5)
    arguments = scheduler_kwargs(Namespace(**{**TIMM, **given}))
    expected, epochs = create_scheduler_v2(theirs, **arguments, updates_per_epoch=5)
    assert expected is not None and epochs == settings["train.epochs"]
    for step in range(5 * epochs):
        schedule.step_update(step)
        expected.step_update(step)
        assert ours.param_groups[0]["lr"] == pytest.approx(
            theirs.param_groups[0]["lr"], rel=1e-9
        ), step


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"aa": "v0"}, {"data.augment.color_jitter": None}),
        ({"aa": "3a"}, {"data.augment.color_jitter": 0.4}),
        ({"color_jitter": None, "color_jitter_prob": 0.2}, {"data.augment.color_jitter_prob": None}),
        ({"no_aug": True, "reprob": 0.5}, {"data.augment.scale": None, "data.augment.reprob": 0.0}),
        ({"cutmix": 1.0, "cutmix_minmax": [0.2, 0.8]}, {"data.augment.cutmix": 0.0}),
        ({"mixup": 0.2, "mixup_off_epoch": 300}, {"data.augment.mixup_off_epoch": 0}),
        ({"aug_repeats": 3.0}, {"data.augment.aug_repeats": 3}),
        ({"bce_loss": True, "smoothing": 0.0}, {"train.loss": "ce"}),
        ({"bce_loss": True, "bce_sum": True}, {"train.loss": "bce", "train.loss_kwargs.sum_classes": True}),
        ({"amp": True, "amp_dtype": "bfloat16"}, {"train.precision": "bf16"}),
        ({"lr": "5e-4"}, {"optim.lr": 5e-4, "optim.lr_rule": "none"}),
        ({"lr": "5E-5"}, {"optim.lr": 5e-5}),
        ({"loss": "bce", "smoothing": 0.0}, {"train.loss": "bce"}),
        ({"sched": "wsd", "lr_decay_fn": "linear"}, {"optim.sched_kwargs.decay_fn": "linear"}),
        ({"opt": "lamb", "lr_base": 0.01}, {"optim.lr": 0.01, "optim.lr_rule": "sqrt", "optim.lr_base_batch": 256}),
        ({"model_ema": True, "eval_metric": "top5"}, {"model.ema.warmup": False, "checkpoint.metric": "val/acc5_ema"}),
        ({"input_size": [1, 96, 96]}, {"model.in_chans": 1, "data.image_size": 96}),
        ({"input_size": [3, 96, 128]}, {"data.image_size": [96, 128]}),
        ({"mean": [0.5], "std": [0.2]}, {"data.mean": [0.5, 0.5, 0.5], "data.std": [0.2, 0.2, 0.2]}),
        (
            {"sched": "multistep", "decay_milestones": [3, 9], "warmup_prefix": True},
            {"optim.decay_milestones": [8, 14], "train.epochs": 305},
        ),
        ({"dataset": "torch/cifar10", "dataset_download": True}, {"data.name": "torch/cifar10", "data.kwargs.download": True}),
        ({"pretrained": True, "pretrained_path": "w.pt"}, {"model.weights": "w.pt", "model.pretrained": False}),
        ({"torchcompile": "inductor"}, {"model.compile": True}),
        ({"torchcompile": "inductor", "torchcompile_mode": "max-autotune"}, {"model.compile": "max-autotune"}),
        ({"torchcompile_mode": "max-autotune"}, {"model.compile": False}),
        ({"sync_bn": True}, {"parallel.dist_bn": None, "model.sync_bn": True}),
    ],
)  # fmt: skip
def test_timm_arguments_that_depend_on_each_other_are_converted_as_timm_combines_them(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = converted(**given)
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.slow(seconds=1)
def test_from_timm_script_writes_experiment_that_composes_to_the_shipped_a2_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timm command for A2 of "ResNet strikes back" gives the shipped recipe, except for
    defaults of timm.
    """
    given = {
        "data_dir": "/data", "amp": True, "amp_dtype": "bfloat16", "batch_size": 256, "epochs": 300, "drop_path": 0.05,
        "opt": "lamb", "weight_decay": 0.02, "lr": 5e-3, "min_lr": 1e-6, "warmup_lr": 1e-4, "model": "resnet50",
        "aa": "rand-m7-mstd0.5-inc1", "mixup": 0.1, "cutmix": 1.0, "aug_repeats": 3, "bce_loss": True, "smoothing": 0.0,
        "bce_target_thresh": 0.2, "train_interpolation": "bicubic", "interpolation": "bicubic", "crop_pct": 0.95,
        "channels_last": True, "img_size": 224, "log_interval": 100, "dist_bn": "", "jsd": False, "kd_model_name": "vit_base",
    }  # fmt: skip
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(given))
    words = [str(tmp_path / "args.yaml"), f"output={tmp_path / 'mine.yaml'}"]
    assert from_timm.main(words) == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert "kd_model_name=vit_base" in text and "kd_model_name=vit_base" in capsys.readouterr().out
    assert "# Expected: " in text and "--nproc-per-node N train.py experiment=mine" in text
    assert from_timm.main(words) == 2 and "output=" in capsys.readouterr().err
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "mine.yaml").rename(tmp_path / "conf" / "experiment" / "mine.yaml")
    ours, theirs = (
        compose_command(
            parse_command_line(
                [f"experiment={name}", "data.root=/data", f"--config-dir={tmp_path / 'conf'}"]
            )
        ).config
        for name in ("imagenet_resnet50_a2", "mine")
    )
    differences = {
        key: (value, other)
        for (key, value, _), (_, other, _) in zip(leaves(ours), leaves(theirs), strict=True)
        if value != other
    }
    assert differences.pop("data.augment.ratio") == (None, [0.75, 1.3333333333333333])
    assert differences.pop("data.batch_size_per_device") == (None, 256)
    assert differences.pop("checkpoint.metric") == ("auto", "val/acc")
    assert set(differences) == {"task_name", "data.batch_size"}


def test_from_timm_error_names_invalid_config_value_or_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "args.yaml").write_text("model: resnet5o\n")
    assert from_timm.main([str(tmp_path / "args.yaml"), f"output={tmp_path / 'mine.yaml'}"]) == 2
    assert "model.name=resnet5o" in capsys.readouterr().err
    (tmp_path / "args.yaml").write_text("- 1\n")
    assert from_timm.main([str(tmp_path / "args.yaml")]) == 2
    assert "args.yaml" in capsys.readouterr().err


def test_from_timm_script_omits_default_values_unless_a_config_group_option_changes_the_value() -> (
    None
):
    options, settings = changes(converted())
    assert options == ["data=folder", "parallel=ddp"]
    assert "data.augment.vflip" not in settings and settings["data.augment.color_jitter"] == 0.4
    assert settings["data.augment.hflip"] == 0.5, (
        "expected the value although data=folder has the same: the user may choose a different "
        "data group"
    )
    options, settings = changes(converted(dataset="torch/cifar10", model="resnet18"))
    assert options[0] == "data=timm"
    assert (settings["data.name"], settings["model.name"]) == ("torch/cifar10", "resnet18")
