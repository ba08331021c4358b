"""Export a trained model for other programs: safetensors that timm loads, or a torch.export program."""

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

from src.commands.load import Trained

# Largest difference of outputs that counts as rounding, because a traced program may use other kernels.
ROUNDING = 1e-4


def export_safetensors(trained: Trained, folder: Path) -> list[str]:
    """Write `model.safetensors` and `config.json` as on the Hugging Face hub. Return Python expressions that load them.

    Raises RuntimeError if the model that timm loads from these files has other outputs than the checkpoint.
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
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return [
        f"timm.create_model({by_folder!r}, pretrained=True)",
        f"timm.create_model({name!r}, checkpoint_path={str(path)!r}, {keywords})",
    ]


def export_program(trained: Trained, folder: Path) -> list[str]:
    """Write `model.pt2`, a torch.export program for any batch size. Return the Python expression that loads it."""
    path = folder / "model.pt2"
    images = _example(trained, 2)
    try:
        program = torch.export.export(trained.model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    # torch raises many types here, all about the model.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"format=torch_export: torch cannot trace {trained.config.model.name} ({reason})") from None
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    _check_same(trained, torch.export.load(path).module(), path)
    return [f"torch.export.load({str(path)!r}).module()"]


def _example(trained: Trained, batch: int) -> torch.Tensor:
    """Create a batch of random images of the model's input size, on its device."""
    device = next(trained.model.parameters()).device
    return torch.randn(batch, *trained.preprocessing.input_size, generator=torch.Generator().manual_seed(0)).to(device)


@torch.inference_mode()
def _check_same(trained: Trained, loaded: Any, path: Path) -> None:
    images = _example(trained, 3)
    if isinstance(loaded, nn.Module) and not isinstance(loaded, torch.fx.GraphModule):
        loaded = loaded.to(images.device).eval()
    difference = float((trained.model(images) - loaded(images)).abs().max())
    if not difference <= ROUNDING:
        raise RuntimeError(f"{path}: its outputs differ from the checkpoint's (by {difference:.2g}); do not use it")
