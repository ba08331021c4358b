"""A trained model in files that other programs read: safetensors as timm loads them, or a torch.export program."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

from src.trained.load import Trained

SAME = 1e-4  # largest difference of outputs that is rounding: a traced program may use other kernels


def export_safetensors(trained: Trained, folder: Path) -> list[str]:
    """Write `model.safetensors` and `config.json` (arguments, class names, data config), as on the Hugging Face hub.

    Returns what loads them, as lines of Python. Raises RuntimeError when timm, given what was written, does not give the
    checkpoint's outputs.
    """
    path, name = folder / "model.safetensors", trained.config.model.name
    if name.startswith("src."):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in trained.model.state_dict().items()}, path)
        return [f"{name}(…).load_state_dict(safetensors.torch.load_file({str(path)!r}))"]
    save_for_hf(
        trained.model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        str(folder),
        model_config={"label_names": trained.class_names},
        safe_serialization=True,
        data_config=dataclasses.asdict(trained.preprocessing),
    )
    arguments = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_args"]
    _check_same(trained, timm.create_model(name, checkpoint_path=str(path), **arguments), path)
    by_folder = f"local-dir:{folder.resolve()}"
    _check_same(trained, timm.create_model(by_folder, pretrained=True), folder)
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return [
        f"timm.create_model({by_folder!r}, pretrained=True)",
        f"timm.create_model({name!r}, checkpoint_path={str(path)!r}, {written})",
    ]


def export_program(trained: Trained, folder: Path) -> list[str]:
    """Write `model.pt2`, a torch.export program for batches of any size. Returns what loads it, as a line of Python.

    Raises RuntimeError when the program gives other outputs.
    """
    path = folder / "model.pt2"
    images = _example(trained, 2)
    try:
        program = torch.export.export(trained.model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # torch has many kinds, all about the model
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"format=torch_export: torch cannot trace {trained.config.model.name} ({reason})") from None
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    _check_same(trained, torch.export.load(path).module(), path)
    return [f"torch.export.load({str(path)!r}).module()"]


def _example(trained: Trained, batch: int) -> torch.Tensor:
    """Random images of the model's size, on its device."""
    device = next(trained.model.parameters()).device
    return torch.randn(batch, *trained.preprocessing.input_size, generator=torch.Generator().manual_seed(0)).to(device)


@torch.inference_mode()
def _check_same(trained: Trained, loaded: Any, path: Path) -> None:
    images = _example(trained, 3)
    if isinstance(loaded, nn.Module) and not isinstance(loaded, torch.fx.GraphModule):
        loaded = loaded.to(images.device).eval()
    difference = float((trained.model(images) - loaded(images)).abs().max())
    if not difference <= SAME:
        raise RuntimeError(f"{path}: gives other outputs than the checkpoint (by {difference:.2g}); do not use it")
