"""`model.weights=<file>` loads common formats, or refuses the file."""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from timm.utils import CheckpointSaver
from torch import Tensor, nn

from src.models.build import build_model
from src.schema import ModelConfig
from src.train.build import build_data_and_model
from tests.template.runs import draw_images, resolved
from timm_parallel.model.weights import load_weights
from timm_parallel.parallel.strategy import build_strategy

TINY = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32}
DIGITS = [str(digit) for digit in range(10)]


def model(num_classes: int = 10, seed: int = 0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", num_classes=num_classes, **(TINY | kwargs)
    )
    return made


def is_equal(one: nn.Module, other: dict[str, Tensor], but: str = "nothing") -> bool:
    return all(
        torch.equal(tensor, other[name])
        for name, tensor in one.state_dict().items()
        if but not in name
    )


@pytest.mark.parametrize(
    ("suffix", "key", "prefix"),
    [
        ("safetensors", None, "module."),
        ("pt", None, "_orig_mod."),
        ("pt", "state_dict", "module._orig_mod."),
        ("pt", "net", "timm_model."),
        ("pt", "state_dict.net", ""),
        # A tutorial of PyTorch, and Lightning with a compiled model.
        ("pt", "model_state_dict", ""),
        ("pt", "state_dict", "net._orig_mod."),
    ],
)
def test_weights_load_with_any_one_prefix_and_below_any_one_key(
    tmp_path: Path, suffix: str, key: str | None, prefix: str
) -> None:
    state, path = model(seed=1).state_dict(), tmp_path / f"weights.{suffix}"
    named: dict[str, Any] = {prefix + name: tensor for name, tensor in state.items()}
    named["loss.s"] = torch.ones(2)
    if suffix == "safetensors":
        save_file(named, path)
    else:
        more = {"acc": 0.5, "optimizer_state_dict": {}}
        for each in reversed([] if key is None else key.split(".")):
            named = {each: named, **more}
        torch.save(named, path)
    fresh = model(seed=2)
    assert not is_equal(fresh, state)
    assert "loss.s" in load_weights(fresh, path, DIGITS, for_evaluation=True)
    assert is_equal(fresh, state)


@pytest.mark.parametrize(
    ("of_run", "overrides", "expected"),
    [
        ((0.2, 0.3, 0.4), (), (0.2, 0.3, 0.4)),
        ((0.2, 0.3, 0.4), ("data.mean=[0.6,0.6,0.6]", "data.std=[0.1,0.1,0.1]"), (0.6, 0.6, 0.6)),
        ((0.2,), (), (0.5, 0.5, 0.5)),
    ],
)
def test_data_mean_defaults_to_the_mean_in_the_weights_checkpoint_when_channels_match(
    tmp_path: Path,
    of_run: tuple[float, ...],
    overrides: tuple[str, ...],
    expected: tuple[float, ...],
) -> None:
    draw_images(tmp_path, size=32)
    preprocessing = {"mean": of_run, "std": of_run, "input_size": (len(of_run), 32, 32)}
    torch.save({"format": 2, "model": {}, "preprocessing": preprocessing}, tmp_path / "best.pt")
    config = resolved(
        "data=folder", f"data.root={tmp_path}", f"model.weights={tmp_path / 'best.pt'}", *overrides
    )
    built = build_data_and_model(config, build_strategy(config))
    assert built.preprocessing.mean == expected
    assert torch.allclose(
        built.eval_loaders["val"].prefetcher.mean.flatten() / 255, torch.tensor(expected)
    )


def test_weights_with_another_class_count_leave_the_head_random_and_list_unused_tensors(
    tmp_path: Path,
) -> None:
    state = model(num_classes=1000, seed=1).state_dict()
    torch.save(state | {"head_dist.weight": torch.zeros(2)}, tmp_path / "weights.pt")
    fresh = model(num_classes=10, seed=2)
    head = {
        name: tensor.clone()
        for name, tensor in fresh.state_dict().items()
        if name.startswith("head")
    }
    line = load_weights(fresh, tmp_path / "weights.pt", DIGITS)
    assert is_equal(fresh, state, but="head")
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in head.items())
    assert f"{len(state) - 2} of {len(state)} tensors" in line
    for name in ("head.weight", "head.bias", "[1000, 48]", "[10, 48]", "head_dist.weight"):
        assert name in line


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (
            lambda: timm.create_model("test_resnet").state_dict(),
            r"cls_token is not in the file.*model\.name",
        ),
        (
            lambda: model(embed_dim=24).state_dict(),
            r"cls_token is \[1, 1, 24\] .*\[1, 1, 48\] .*model\.kwargs",
        ),
        (lambda: {"epoch": 3}, "contains no tensors|not readable"),
        (lambda: torch.zeros(3), "contains no tensors|not readable"),
        (lambda: {"args": pickle.PickleBuffer}, "Python objects besides tensors"),
        (
            lambda: dict.fromkeys(("student", "teacher"), model().state_dict()),
            r"student, teacher; .*\['student'\]",
        ),
        (
            lambda: {
                f"{name}.{key}": tensor
                for name in ("online", "target")
                for key, tensor in model().state_dict().items()
            },
            r"online\., target\.",
        ),
        (
            lambda: model().state_dict() | {"blocks.1.mlp.fc1.bias": torch.full((192,), math.nan)},
            r"blocks\.1\.mlp\.fc1\.bias",
        ),
    ],
    ids=[
        *("architecture", "width", "numbers", "tensor", "unsafe"),
        *("two models", "two prefixes", "not finite"),
    ],
)
@pytest.mark.parametrize("for_evaluation", [False, True])
def test_model_weights_error_is_one_line_when_a_file_has_no_usable_weights(
    tmp_path: Path, contents: Any, message: str, for_evaluation: bool
) -> None:
    path = tmp_path / "weights.pt"
    torch.save(contents(), path)
    with pytest.raises(ValueError, match=message) as refusal:
        load_weights(model(), path, DIGITS, for_evaluation)
    assert str(refusal.value).startswith(f"model.weights={path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_model_weights_error_is_one_line_when_a_file_is_truncated(
    tmp_path: Path, save: Any
) -> None:
    path = tmp_path / ("weights.pt" if save is torch.save else "weights.safetensors")
    save(model().state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="not readable as weights") as refusal:
        load_weights(model(), path, DIGITS)
    assert "\n" not in str(refusal.value)
    if save is torch.save:
        # The page of an error, downloaded instead of the file.
        path.write_text("<html>")
        with pytest.raises(ValueError, match=r"\(not a complete file of torch\.save\)"):
            load_weights(model(), path, DIGITS)


class Wrapped(nn.Module):
    """Model without `get_classifier`, with a BatchNorm after its last linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.neck = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scores = nn.Linear(4, num_classes)
        self.last = nn.BatchNorm1d(4)


def test_only_the_last_linear_layer_of_a_custom_model_may_differ_from_the_weights_file(
    tmp_path: Path,
) -> None:
    """As in torch, `num_batches_tracked` of BatchNorm may be missing in the file."""
    state = {
        name: value for name, value in Wrapped(5).state_dict().items() if "num_batches" not in name
    }
    torch.save(state, tmp_path / "weights.pt")
    fresh = Wrapped(3)
    line = load_weights(fresh, tmp_path / "weights.pt", ["a", "b", "c"])
    assert is_equal(fresh.neck, {"weight": state["neck.weight"], "bias": state["neck.bias"]})
    assert "scores.bias, scores.weight" in line
    del state["neck.weight"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"neck\.weight"):
        load_weights(fresh, tmp_path / "weights.pt", ["a", "b", "c"])


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("name", "pixels", "channels", "classes"),
    [
        ("vit_tiny_patch16_224", (224, 384), (3, 3), (10, 10)),
        ("test_convnext", (None, None), (1, 4), (10, 7)),
        ("swin_tiny_patch4_window7_224", (224, 384), (3, 1), (10, 10)),
    ],
)
def test_model_weights_are_adapted_to_image_size_channels_and_classes_as_in_timm(
    tmp_path: Path,
    name: str,
    pixels: tuple[Any, Any],
    channels: tuple[int, int],
    classes: tuple[int, int],
) -> None:
    path = tmp_path / "weights.pth"
    sizes: list[dict[str, Any]] = [{} if size is None else {"img_size": size} for size in pixels]
    source = timm.create_model(name, num_classes=classes[0], in_chans=channels[0], **sizes[0])
    torch.save(source.state_dict(), path)
    overlay = {
        "file": str(path),
        "num_classes": classes[0],
        "input_size": (channels[0], pixels[0] or 64, pixels[0] or 64),
        "custom_load": False,
    }
    target = {"num_classes": classes[1], "in_chans": channels[1], **sizes[1]}
    torch.manual_seed(1)
    expected = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **target)
    torch.manual_seed(1)
    config = ModelConfig(name=name, weights=str(path))
    built = build_model(config, classes[1], channels[1], pixels[1], torch.device("cpu"))
    load_weights(built, path, [str(number) for number in range(classes[1])])
    assert list(built.state_dict()) == list(expected.state_dict())
    assert is_equal(built, expected.state_dict())


def test_weights_strict_false_keeps_random_values_for_tensors_missing_in_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "weights.pth"
    state = model(depth=1).state_dict()
    torch.save(state, path)
    deeper = model(seed=2)
    fresh = {name: tensor.clone() for name, tensor in deeper.state_dict().items()}
    with pytest.raises(ValueError, match=r"blocks\.1\..*model\.weights_strict=false"):
        load_weights(deeper, path, DIGITS)
    with pytest.raises(ValueError, match=r"blocks\.1\."):
        load_weights(deeper, path, DIGITS, for_evaluation=True, strict=False)
    line = load_weights(deeper, path, DIGITS, strict=False)
    assert "blocks.1." in line
    for name, tensor in deeper.state_dict().items():
        assert torch.equal(tensor, state[name] if name in state else fresh[name]), name


def test_names_in_a_weights_file_are_converted_by_a_filter_that_takes_only_the_tensors(
    tmp_path: Path,
) -> None:
    """timm has such filters, for example for VGG, next to those that take the model too."""
    saved, made = model(seed=1).state_dict(), model()
    path = tmp_path / "weights.pt"
    torch.save({name.replace("patch_embed", "stem"): of for name, of in saved.items()}, path)
    made.checkpoint_filter = lambda tensors: {  # type: ignore[assignment]
        name.replace("stem", "patch_embed"): of for name, of in tensors.items()
    }
    load_weights(made, path, DIGITS)
    assert is_equal(made, saved)


def test_original_dinov2_checkpoint_loads_into_a_timm_model(tmp_path: Path) -> None:
    """The file of facebookresearch/dinov2 has other names, no head, and a mask token."""
    name, path = "vit_small_patch14_reg4_dinov2", tmp_path / "original.pth"
    kwargs: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 28}
    torch.manual_seed(0)
    state = timm.create_model(name, num_classes=5, **kwargs).state_dict()
    original = {key: tensor for key, tensor in state.items() if not key.startswith("head.")}
    original["pos_embed"] = torch.cat([torch.zeros(1, 1, 24), original["pos_embed"]], 1)
    original["register_tokens"] = original.pop("reg_token")
    torch.save(original | {"mask_token": torch.zeros(1, 24)}, path)
    config = ModelConfig(name=name, weights=str(path), kwargs=kwargs)
    built = build_model(config, 5, 3, None, torch.device("cpu"))
    load_weights(built, path, list("abcde"))
    assert is_equal(built, state, but="head.")


def test_model_weights_load_from_a_checkpoint_that_timm_train_py_saved(tmp_path: Path) -> None:
    """timm's train.py saves its arguments in a Namespace."""
    source = model(seed=1)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    arguments = Namespace(model="vit_tiny_patch16_224", lr=0.1)
    saver = CheckpointSaver(source, optimizer, arguments, checkpoint_dir=tmp_path)
    saver.save_checkpoint(1, metric=0.5)
    fresh = model(seed=2)
    load_weights(fresh, tmp_path / "last.pth.tar", DIGITS)
    assert is_equal(fresh, source.state_dict())


class Inner(nn.Module):
    """Model whose submodules are named `model` and `net`, like common prefixes in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.net = nn.Linear(2, 2), nn.Linear(2, 3)


def test_weights_load_into_a_custom_model_with_names_of_common_prefixes(tmp_path: Path) -> None:
    fresh = Inner()
    state = {name: torch.ones_like(tensor) for name, tensor in fresh.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    load_weights(fresh, tmp_path / "weights.pt", ["a", "b", "c"])
    assert is_equal(fresh, state)


def test_weights_strict_false_refuses_a_file_in_which_only_buffers_match_the_model(
    tmp_path: Path,
) -> None:
    state = timm.create_model("test_resnet", num_classes=10).state_dict()
    counters = {name: tensor for name, tensor in state.items() if "num_batches_tracked" in name}
    averages = {name: tensor for name, tensor in state.items() if "running_mean" in name}
    other = timm.create_model("test_resnet", num_classes=10)
    for tensors in (model().state_dict(), model().state_dict() | counters, counters | averages):
        torch.save(tensors, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=r"^model\.weights=") as refusal:
            load_weights(other, tmp_path / "weights.pt", DIGITS, strict=False)
        assert "weights_strict=" not in str(refusal.value)
    torch.save({"conv1.0.weight": state["conv1.0.weight"]}, tmp_path / "weights.pt")
    load_weights(other, tmp_path / "weights.pt", DIGITS, strict=False)
    assert torch.equal(other.state_dict()["conv1.0.weight"], state["conv1.0.weight"])


# Class names that timm's train.py sorts in another order than this project: by number, ignoring
# case.
MIXED = ["Zebra", "class_10", "class_9"]
OF_TIMM = ["class_9", "class_10", "Zebra"]


def head_of(model: Any) -> Tensor:
    weight = model.state_dict()["head.weight"]
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.parametrize(
    ("more", "order"),
    [
        ({"arch": "vit", "args": Namespace(lr=0.1, dataset="", class_map="")}, OF_TIMM),
        (
            {"class_to_idx": {"class_10": 0, "Zebra": 1, "class_9": 2}},
            ["class_10", "Zebra", "class_9"],
        ),
        ({"classes": MIXED, "epoch": 2}, MIXED),
        ({"names": {0: "class_10", 1: "class_9", 2: "Zebra"}}, ["class_10", "class_9", "Zebra"]),
        ({"vocab": OF_TIMM, "history": ["Zebra", "Zebra", "class_9"]}, OF_TIMM),
        (
            {"hyper_parameters": {"labels": {"Zebra": "2", "class_9": "0", "class_10": "1"}}},
            OF_TIMM,
        ),
        ({"args": Namespace(categories=OF_TIMM), "shape": [3, 3, 3]}, OF_TIMM),
    ],
    ids=["timm", "class_to_idx", "classes", "number to name", "list", "below", "options"],
)
def test_head_follows_the_class_order_of_the_program_that_wrote_the_weights(
    tmp_path: Path, more: dict[str, Any], order: list[str]
) -> None:
    state = model(num_classes=3, seed=1).state_dict()
    torch.save({"state_dict": state, **more}, tmp_path / "last.pth")
    fresh = model(num_classes=3, seed=2)
    load_weights(fresh, tmp_path / "last.pth", MIXED, for_evaluation=True)
    rows = [order.index(name) for name in MIXED]
    assert torch.equal(head_of(fresh), state["head.weight"][rows])
    assert torch.equal(fresh.state_dict()["head.bias"], state["head.bias"][rows])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"arch": "vit", "args": Namespace(dataset="", class_map="names.txt")},
        {"arch": "vit", "args": Namespace(dataset="hfds/animals")},
    ],
    ids=["bare", "class map", "hub"],
)
def test_head_is_fresh_in_training_and_refused_in_evaluation_when_class_order_is_unknown(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    path, state = tmp_path / "last.pth", model(num_classes=3, seed=1).state_dict()
    torch.save({"state_dict": state, **more}, path)
    fresh = model(num_classes=3, seed=2)
    line = load_weights(fresh, path, MIXED)
    assert torch.equal(head_of(fresh), head_of(model(num_classes=3, seed=2)))
    assert "the head is fresh" in line and is_equal(fresh, state, but="head")
    with pytest.raises(ValueError, match=rf"^model\.weights={path}: .*class_to_idx"):
        load_weights(fresh, path, MIXED, for_evaluation=True)
    # Names that all programs sort in one order leave no doubt.
    load_weights(fresh, path, ["ant", "bee", "cow"], for_evaluation=True)
    assert torch.equal(head_of(fresh), state["head.weight"])
    load_weights(fresh, path, MIXED, for_evaluation=True, sorted_names=False)


@pytest.mark.parametrize(
    "config",
    [{"label_names": OF_TIMM}, {"id2label": {"2": "Zebra", "0": "class_9", "1": "class_10"}}],
    ids=["timm", "transformers"],
)
def test_class_names_of_safetensors_come_from_config_json_in_its_folder(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    state = model(num_classes=3, seed=1).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    fresh = model(num_classes=3, seed=2)
    load_weights(fresh, tmp_path / "model.safetensors", MIXED, for_evaluation=True)
    assert torch.equal(head_of(fresh), state["head.weight"][[2, 1, 0]])
    # A file of this name may be that of another program.
    for other in ("[]", "null", '["a"]'):
        (tmp_path / "config.json").write_text(other)
        load_weights(fresh, tmp_path / "model.safetensors", sorted(MIXED), sorted_names=False)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.float32(0.7), "numpy"),
        (OmegaConf.create({"lr": 0.1}), "omegaconf"),
        (functools.partial(print, 1), "functools.partial"),
    ],
    ids=["numpy", "omegaconf", "partial"],
)
def test_error_names_the_class_of_an_object_in_a_weights_file_and_a_command_that_removes_it(
    tmp_path: Path, value: object, name: str
) -> None:
    path, state = tmp_path / "my file.pt", model(seed=1).state_dict()
    torch.save({"state_dict": state, "extra": value}, path)
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        load_weights(model(), path, DIGITS)
    assert "\n" not in str(refusal.value)
    command = str(refusal.value).rpartition("python -c ")[2]
    [code] = shlex.split(command)
    exec(code, {})
    [written] = [file for file in tmp_path.iterdir() if file != path]
    fresh = model(seed=2)
    load_weights(fresh, written, DIGITS)
    assert is_equal(fresh, state)
