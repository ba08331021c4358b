"""Export a trained model for other programs: safetensors that timm loads, a torch.export program,
or ONNX.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.utils.onnx import onnx_export
from torch import nn

from src.commands.load import Trained
from timm_parallel import write_json

# Largest difference of outputs that counts as rounding, because a traced program may use other
# kernels. It is relative to the largest score, or absolute if all scores are below 1.
ROUNDING = 1e-4
# Batch sizes for comparing outputs. There are two, because a program may be valid only for the
# batch size of its trace.
BATCHES = (1, 7)
# Entries of timm's pretrained_cfg that are about its own weights.
OF_PRETRAINED_WEIGHTS = (
    "license",
    "origin_url",
    "paper_ids",
    "paper_name",
    "tag",
    "notes",
    "description",
)


def export_safetensors(trained: Trained, folder: Path) -> list[str]:
    """Write `model.safetensors` and `config.json` as on the Hugging Face hub. Return Python
    expressions that load them.

    Raises RuntimeError if the model that timm loads from these files has other outputs than the
    checkpoint.
    """
    path, name = folder / "model.safetensors", trained.config.model.name
    if name.startswith("src."):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: tensor.contiguous() for key, tensor in trained.model.state_dict().items()}, path
        )
        return [f"{name}(…).load_state_dict(safetensors.torch.load_file({str(path)!r}))"]
    save_for_hf(
        trained.model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        str(folder),
        model_config={"label_names": trained.task.names},
        safe_serialization=True,
        data_config=dataclasses.asdict(trained.preprocessing),
    )
    arguments = _describe_own_weights(trained, folder / "config.json")["model_args"]
    check_same(trained, timm.create_model(name, checkpoint_path=str(path), **arguments), path)
    by_folder = f"local-dir:{folder.resolve()}"
    check_same(trained, timm.create_model(by_folder, pretrained=True), folder)
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return [
        f"timm.create_model({by_folder!r}, pretrained=True)",
        f"timm.create_model({name!r}, checkpoint_path={str(path)!r}, {keywords})",
    ]


def _describe_own_weights(trained: Trained, path: Path) -> dict[str, Any]:
    """Remove from config.json what timm states of its own weights, such as their license. Return
    the contents.

    Weights of timm that the run started from are named as `base_model`.
    """
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key in OF_PRETRAINED_WEIGHTS:
        config["pretrained_cfg"].pop(key, None)
    if (origin := base_model(trained)) is not None:
        config["base_model"] = origin
    write_json(path, config)
    return config


def base_model(trained: Trained) -> str | None:
    """Return the Hugging Face name of timm's weights that the run started from; None if it started
    from others.
    """
    if not trained.config.model.pretrained:
        return None
    name: str | None = getattr(trained.model, "pretrained_cfg", {}).get("hf_hub_id")
    return name


def export_program(trained: Trained, folder: Path) -> list[str]:
    """Write `model.pt2`, a torch.export program for any batch size. Return the Python expression
    that loads it.
    """
    path = folder / "model.pt2"
    images = _example(trained, 2)
    try:
        program = torch.export.export(
            trained.model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    # torch raises many types here, all about the model.
    except Exception as error:
        raise _untraceable(trained, "torch_export", error) from None
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    check_same(trained, torch.export.load(path).module(), path)
    return [f"torch.export.load({str(path)!r}).module()"]


def export_onnx(trained: Trained, folder: Path) -> list[str]:
    """Write `model.onnx` for any batch size. Return the Python expression that loads it.

    Its input is `images`, its output `scores`. Its metadata holds, as JSON, the class names and the
    preprocessing.
    """
    import onnx
    import onnxruntime

    path, images = folder / "model.onnx", _example(trained, 2)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        onnx_export(
            trained.model,
            str(path),
            images,
            use_dynamo=True,
            input_names=["images"],
            output_names=["scores"],
        )
    # torch and onnx raise many types here, all about the model.
    except Exception as error:
        raise _untraceable(trained, "onnx", error) from None
    metadata = {"class_names": trained.task.names, **dataclasses.asdict(trained.preprocessing)}
    # Weights of more than 2 GB are in a second file, which stays as it is.
    written = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(
        written, {key: json.dumps(value) for key, value in metadata.items()}
    )
    onnx.save(written, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    check_same(
        trained,
        lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
        path,
    )
    return [f"onnxruntime.InferenceSession({str(path)!r})"]


def _untraceable(trained: Trained, form: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:300]
    return ValueError(
        f"format={form}: torch cannot trace {trained.config.model.name} ({reason}); use "
        "format=safetensors"
    )


def _example(trained: Trained, batch: int) -> torch.Tensor:
    """Create a batch of random images of the model's input size, on its device."""
    device = next(trained.model.parameters()).device
    return torch.randn(
        batch, *trained.preprocessing.input_size, generator=torch.Generator().manual_seed(0)
    ).to(device)


@torch.inference_mode()
def check_same(trained: Trained, loaded: Any, path: Path) -> None:
    """Compare the outputs of `loaded` with those of the trained model. Raises RuntimeError above a
    difference of ROUNDING.
    """
    for batch in BATCHES:
        images = _example(trained, batch)
        if isinstance(loaded, nn.Module) and not isinstance(loaded, torch.fx.GraphModule):
            loaded = loaded.to(images.device).eval()
        expected = trained.model(images)
        difference = float((expected - loaded(images)).abs().max())
        if not difference <= ROUNDING * max(1.0, float(expected.abs().max())):
            raise RuntimeError(
                f"{path}: its outputs differ from the checkpoint's (by {difference:.2g}); do not "
                "use it"
            )
