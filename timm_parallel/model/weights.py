"""Read weights files (`model.weights`), and load the tensors that fit into a model."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.data.dataset import class_difference
from timm_parallel.machine.text import first


@dataclass
class WeightsFile:
    """Contents of a weights file: tensors by name.

    The class names and the image size are known only for a checkpoint of this project.
    """

    path: Path
    tensors: dict[str, Tensor]
    # Text that says if raw or averaged weights were read; empty if the file has only raw ones.
    label: str = ""
    target_names: list[str] | None = None
    # Channels, height and width of the images on which the saved run was evaluated.
    input_size: tuple[int, ...] | None = None


def read_weights(path: Path, read_foreign: Callable[[Path], dict[str, Any]]) -> WeightsFile:
    """Read a weights file.

    `read_foreign`: function that reads the state dict of a file that is not a checkpoint of this
    project. Raises ValueError if the file cannot be read or holds Python objects.
    """
    try:
        contents: Any = None
        if path.suffix != ".safetensors":
            # Allow the class Namespace, in which timm's train.py stores its arguments in a
            # checkpoint. It only holds values by name.
            with torch.serialization.safe_globals([argparse.Namespace]):
                contents = torch.load(path, map_location="cpu", weights_only=True)
        if (
            isinstance(contents, dict)
            and "model" in contents
            and isinstance(contents.get("format"), int)
        ):
            return _of_checkpoint(path, contents)
        tensors = {
            str(name): tensor
            for name, tensor in read_foreign(path).items()
            if isinstance(tensor, Tensor)
        }
    except FileNotFoundError:
        raise ValueError(f"model.weights={path}: no such file") from None
    # Catch every exception, because torch and safetensors raise many types of them for a file that
    # does not hold weights.
    except Exception as error:
        if _has_python_objects(path):
            raise ValueError(
                f"model.weights={path}: contains Python objects besides tensors and plain values, "
                "so it is not loaded; save model.state_dict() instead"
            ) from None
        reason = " ".join(str(error)[:200].split())
        if path.suffix != ".safetensors" and not zipfile.is_zipfile(path):
            reason = "not a complete file of torch.save"
        raise ValueError(
            f"model.weights={path}: not readable as weights ({reason}); give a checkpoint or a "
            "state dict"
        ) from None
    if not tensors:
        raise ValueError(
            f"model.weights={path}: contains no tensors with names; give a state dict or a "
            "checkpoint"
        )
    return WeightsFile(path, tensors)


def _has_python_objects(path: Path) -> bool:
    """Return True if a file of torch.save refers to a class or function that torch.load does not
    allow.
    """
    with suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        return bool(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    return False


def _of_checkpoint(path: Path, contents: dict[str, Any]) -> WeightsFile:
    """Convert a checkpoint of this project to a WeightsFile.

    The averaged weights are used if checkpoint.metric of the saved run evaluates them, else the raw
    weights.
    """
    weights, label = contents["model"], ""
    if contents.get("ema") is not None:
        metric = contents["made_by"]["metric"]
        label = f"raw weights (checkpoint.metric={metric}), "
        if metric.endswith("_ema"):
            weights, label = contents["ema"], f"averaged weights (checkpoint.metric={metric}), "
    size = contents.get("preprocessing", {}).get("input_size")
    return WeightsFile(path, weights, label, contents.get("classes"), size)


def preprocessing_of(path: Path) -> dict[str, Any]:
    """Read the preprocessing of images, such as mean and std, from a checkpoint of this project.

    Returns an empty dictionary for any other file.
    """
    try:
        # Map the file into memory, so that only small entries are read and no tensors.
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Ignore errors here, because read_weights reports a file that cannot be read.
    except Exception:
        return {}
    return dict(contents.get("preprocessing", {})) if isinstance(contents, dict) else {}


def fill_model(
    model: nn.Module,
    file: WeightsFile,
    head: set[str],
    target_names: list[str],
    for_evaluation: bool,
    strict: bool,
) -> str:
    """Load those tensors of a weights file that fit into a model, and return a line for the log.

    The line lists the loaded tensors and those that keep their random values. `head`: names of the
    tensors in the head. All of them keep their random values if one does not fit, or if the file's
    classes differ from `target_names`. Raises ValueError if a tensor outside of the head does not
    fit, unless `strict` is false. In an evaluation, every tensor must fit.
    """
    own = model.state_dict()
    problems = {name: _problem(name, file, own) for name in own}
    why_fresh = ""
    if file.target_names is not None and file.target_names != target_names:
        why_fresh = (
            "its classes are not those of the data "
            f"({class_difference(file.target_names, target_names)})"
        )
        if for_evaluation:
            raise ValueError(
                f"model.weights={file.path}: {why_fresh}; evaluate the weights on data with the "
                "classes that they were trained on"
            )
    elif not for_evaluation:
        why_fresh = first([problems[name] for name in own if name in head and problems[name]], 1)
    fresh = head if why_fresh else set()
    # Ignore a missing num_batches_tracked, because torch also loads a BatchNorm without this count
    # of batches.
    missing = [
        name
        for name in own
        if problems[name] and name not in fresh and "num_batches_tracked" not in name
    ]
    # At least one trainable tensor must fit. The buffers of a different model may fit by chance.
    trained = [
        name
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.requires_grad
    ]
    fits = any(not problems[name] and name not in fresh for name in trained)
    if missing and (strict or for_evaluation or not fits):
        size = (
            ""
            if file.input_size is None
            else " (channels, height, width: {}, {}, {})".format(*file.input_size)
        )
        may_be_fresh = fits and not for_evaluation
        hint = (
            "; or model.weights_strict=false, to train these tensors from scratch"
            if may_be_fresh
            else ""
        )
        raise ValueError(
            f"model.weights={file.path}: {len(missing)} of the model's {len(own)} tensors would "
            f"stay random: {first([problems[name] for name in missing], 3)}; use the model.name, "
            "model.kwargs, image size (data.image_size), channels and classes that the file was "
            f"trained with{size}{hint}"
        )
    loaded = {name: file.tensors[name] for name in own if not problems[name] and name not in fresh}
    model.load_state_dict(loaded, strict=False)
    line = f"{file.path}: {file.label}{len(loaded)} of {len(own)} tensors"
    if fresh:
        line += f"; the head is fresh: {', '.join(sorted(fresh))}: {why_fresh}"
    if missing:
        line += (
            "; also fresh (model.weights_strict=false): "
            f"{first([problems[name] for name in missing])}"
        )
    if unused := [name for name in file.tensors if name not in own]:
        line += f"; not used: {first(unused)}"
    return line


def _problem(name: str, file: WeightsFile, own: dict[str, Tensor]) -> str:
    """Describe why a weights file has no suitable value for the model tensor `name`. Returns an
    empty text if the file has one.
    """
    if name not in file.tensors:
        return f"{name} is not in the file"
    in_file, in_model = list(file.tensors[name].shape), list(own[name].shape)
    return (
        ""
        if in_file == in_model
        else f"{name} is {in_file} in the file and {in_model} in the model"
    )
