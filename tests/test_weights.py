"""`model.weights=<file>`: what fits is loaded and what does not is said; a file of something else is refused."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import Finished, resolved
from safetensors.torch import save_file
from torch import Tensor, nn

from src.engine.machine.ranks import Ranks
from src.models.weights import load_weights
from src.parallel import build_strategy

TINY = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32}


def model(num_classes: int = 10, seed: int = 0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **(TINY | kwargs))
    return made


def is_equal(one: nn.Module, other: dict[str, Tensor], but: str = "nothing") -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items() if but not in name)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("form", ["safetensors", "bare", "state_dict", "model"])
def test_any_usual_form_is_loaded_whole(tmp_path: Path, prefix: str, form: str) -> None:
    state = model(seed=1).state_dict()
    named = {prefix + name: tensor for name, tensor in state.items()}
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    if form == "safetensors":
        save_file(named, path)
    else:
        torch.save(named if form == "bare" else {form: named, "epoch": 3}, path)
    fresh = model(seed=2)
    assert not is_equal(fresh, state)
    load_weights(fresh, path)
    assert is_equal(fresh, state)


def test_a_checkpoint_of_a_run_is_loaded(finished_run: Finished) -> None:
    path = finished_run.folder / "checkpoints" / "last.pt"
    fresh = model(in_chans=1)
    load_weights(fresh, path)
    assert is_equal(fresh, torch.load(path, weights_only=True)["model"])


def test_a_new_head_keeps_its_fresh_weights_and_the_rest_is_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = model(num_classes=1000, seed=1).state_dict()
    torch.save(state | {"head_dist.weight": torch.zeros(2)}, tmp_path / "weights.pt")
    fresh = model(num_classes=10, seed=2)
    head = {name: tensor.clone() for name, tensor in fresh.state_dict().items() if name.startswith("head")}
    with caplog.at_level(logging.INFO):
        load_weights(fresh, tmp_path / "weights.pt")
    assert is_equal(fresh, state, but="head")
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in head.items())
    assert f"{len(state) - 2} of {len(state)} tensors" in caplog.text
    assert "2 keep their fresh weights: head.weight [1000, 48] against [10, 48], head.bias" in caplog.text
    assert "1 are in the file alone: head_dist.weight" in caplog.text


def another_architecture() -> Any:
    return timm.create_model("test_resnet").state_dict()


def unsafe() -> Any:
    return {"model": model().state_dict(), "args": pickle.PickleBuffer}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (another_architecture, r"of another architecture: 0 of the model's \d+ tensors"),
        (lambda: model(embed_dim=24).state_dict(), r"of another architecture: \d of the model's"),
        (lambda: {}, "holds no tensors by name|not readable"),
        (lambda: {"epoch": 3}, "holds no tensors by name|not readable"),
        (lambda: torch.zeros(3), "not readable as weights|holds no tensors"),
        (unsafe, "more than tensors and plain values"),
    ],
    ids=["architecture", "width", "empty", "numbers", "tensor", "unsafe"],
)
def test_something_else_is_refused_in_a_line(tmp_path: Path, contents: Any, said: str) -> None:
    path = tmp_path / "weights.pt"
    torch.save(contents(), path)
    with pytest.raises(ValueError, match=said) as refusal:
        load_weights(model(), path)
    assert str(refusal.value).startswith(f"model.weights={path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_damaged_file_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save = save_file if name.endswith("safetensors") else torch.save
    save(model().state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="not readable as weights") as refusal:
        load_weights(model(), path)
    assert "\n" not in str(refusal.value)


def test_training_starts_from_them(finished_run: Finished) -> None:
    """The whole way from the config: a fine-tuned model's first loss is that of the weights, not of a fresh model."""
    from src.run.build import Run

    path = finished_run.folder / "checkpoints" / "last.pt"
    config = resolved("parallel=single", "parallel.accelerator=cpu", f"model.weights={path}")
    run = Run(config, build_strategy(config.parallel, Ranks(), None))
    assert is_equal(run.state.model, torch.load(path, weights_only=True)["model"])
