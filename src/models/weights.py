"""Load weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models import adapt_input_conv, get_model_traits, load_state_dict
from torch import Tensor, nn

from src.engine.data.folder import class_difference, first
from src.models.freeze import head_names


@dataclass
class WeightsFile:
    """Contents of a weights file: tensors by name. Only a checkpoint of this project has the other entries."""

    tensors: dict[str, Tensor]
    label: str = ""  # raw or averaged weights, if the file has both
    class_names: list[str] | None = None
    input_size: tuple[int, ...] | None = None  # (channels, height, width) of its evaluation images


def load_weights(
    model: nn.Module, path: Path, class_names: list[str], for_evaluation: bool = False, strict: bool = True
) -> str:
    """Load a weights file into `model`. Return a line that lists which tensors were loaded and which stay random.

    In training, a timm model gets its tensors adapted as timm adapts its pretrained weights: names of original files,
    position embeddings of another image size, and a first convolution of other channels. The head is loaded if all of its
    tensors fit, and the file has the data's `class_names` or none. In training, all other tensors must come from the file,
    unless `strict` is false (model.weights_strict). In evaluation, every tensor must come from the file as it is.

    The file is .safetensors, a checkpoint of this project or of timm, or a bare state dict, read with `weights_only`. Of
    raw and averaged weights, this loads those whose value the checkpoint.metric of that run was, or timm's averaged ones. It
    removes the prefixes that DataParallel, DDP and torch.compile put before names.
    """
    file = _read(path)
    own = model.state_dict()
    if not for_evaluation:
        try:
            file.tensors = _adapted(file.tensors, model)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"model.weights={path}: timm cannot adapt it to this model ({error})") from None
    problems = {name: _problem(name, file, own) for name in own}
    head, why_fresh = head_names(model), ""
    if file.class_names is not None and file.class_names != class_names:
        why_fresh = f"its classes are not those of the data ({class_difference(file.class_names, class_names)})"
        if for_evaluation:
            raise ValueError(f"model.weights={path}: {why_fresh}; evaluate it on data with the same classes")
    elif not for_evaluation:
        why_fresh = first([problems[name] for name in own if name in head and problems[name]], 1)
    fresh = head if why_fresh else set()
    # torch loads a BatchNorm without its count of batches.
    missing = [name for name in own if problems[name] and name not in fresh and "num_batches_tracked" not in name]
    if missing and (strict or for_evaluation or len(missing) + len(fresh) == len(own)):
        size = "" if file.input_size is None else " (channels, height, width: {}, {}, {})".format(*file.input_size)
        hint = "" if for_evaluation else "; or model.weights_strict=false, to train these tensors from scratch"
        raise ValueError(
            f"model.weights={path}: {len(missing)} of the model's {len(own)} tensors would stay random: "
            f"{first([problems[name] for name in missing], 3)}; use the model.name, model.kwargs, image size "
            f"(data.image_size), channels and classes that the file was trained with{size}{hint}"
        )
    loaded = {name: file.tensors[name] for name in own if not problems[name] and name not in fresh}
    model.load_state_dict(loaded, strict=False)
    line = f"{path}: {file.label}{len(loaded)} of {len(own)} tensors"
    if fresh:
        line += f"; the head is fresh: {', '.join(sorted(fresh))}: {why_fresh}"
    if missing:
        line += f"; also fresh (model.weights_strict=false): {first([problems[name] for name in missing])}"
    if unused := [name for name in file.tensors if name not in own]:
        line += f"; not used: {first(unused)}"
    return line


def preprocessing_of(path: Path) -> dict[str, Any]:
    """Return the preprocessing (mean, std …) with which a checkpoint of this project was trained; {} for other files."""
    try:
        # Mapped: only the small entries are read, not the tensors.
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # load_weights reports a file that cannot be read.
    except Exception:
        return {}
    return dict(contents.get("preprocessing", {})) if isinstance(contents, dict) else {}


def _adapted(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adapt a file's tensors to a timm model as timm does: apply its filter, then resize the first convolution.

    Other models get their tensors unchanged. Follows timm.models.load_pretrained, which would also load them.
    """
    tensors = dict(tensors)
    checkpoint_filter = getattr(model, "checkpoint_filter", None)
    if checkpoint_filter is not None:
        try:
            tensors = checkpoint_filter(tensors, model)
        except TypeError:
            # Some of timm's filters take one argument.
            tensors = checkpoint_filter(tensors)
    traits = get_model_traits(model)
    stems = traits.get("first_conv", getattr(model, "pretrained_cfg", {}).get("first_conv"))
    for stem in (stems,) if isinstance(stems, str) else stems or ():
        convolution, weight = model.get_submodule(stem), tensors.get(f"{stem}.weight")
        if not isinstance(convolution, nn.Conv2d) or weight is None or weight.ndim != 4:
            continue
        # A space-to-depth stem reads a multiple of the image's channels.
        in_chans = traits.get("in_chans", convolution.in_channels)
        file_in_chans = weight.shape[1] * convolution.groups * in_chans // convolution.in_channels
        try:
            tensors[f"{stem}.weight"] = adapt_input_conv(in_chans, weight, base_chans=file_in_chans)
        except NotImplementedError:
            # The tensor keeps the shape that does not fit, and is reported as missing.
            continue
    return tensors


def _problem(name: str, file: WeightsFile, own: dict[str, Tensor]) -> str:
    """Describe why the file lacks a value for the model tensor `name`; empty if it has one."""
    if name not in file.tensors:
        return f"{name} is not in the file"
    in_file, in_model = list(file.tensors[name].shape), list(own[name].shape)
    return "" if in_file == in_model else f"{name} is {in_file} in the file and {in_model} in the model"


def _read(path: Path) -> WeightsFile:
    try:
        contents: Any = None
        if path.suffix != ".safetensors":
            contents = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(contents, dict) and "model" in contents and isinstance(contents.get("format"), int):
            return _of_this_project(contents)
        state = load_state_dict(str(path), use_ema=True, weights_only=True)
        tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    except FileNotFoundError:
        raise ValueError(f"model.weights={path}: no such file") from None
    # torch, safetensors and files that hold something else raise many types.
    except Exception as error:
        reason = "more than tensors and plain values" if "weights_only" in str(error) else f"{error}"[:200]
        raise ValueError(f"model.weights={path}: not readable as weights ({' '.join(reason.split())})") from None
    if not tensors:
        raise ValueError(f"model.weights={path}: contains no tensors by name")
    return WeightsFile(tensors)


def _of_this_project(contents: dict[str, Any]) -> WeightsFile:
    """Convert a checkpoint of this project: raw weights, or averaged ones if checkpoint.metric is of those."""
    weights, label = contents["model"], ""
    if contents.get("ema") is not None:
        metric = contents.get("made_by", {}).get("metric") or "unknown"
        label = f"raw weights (checkpoint.metric={metric}), "
        if metric.endswith("_ema"):
            weights, label = contents["ema"], f"averaged weights (checkpoint.metric={metric}), "
    size = contents.get("preprocessing", {}).get("input_size")
    return WeightsFile(weights, label, contents.get("classes"), size)
