"""Load weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

import argparse
import json
import shlex
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv, clean_state_dict, get_model_traits
from timm.utils.misc import natural_key
from torch import Tensor, nn

from timm_parallel.data.dataset import class_difference
from timm_parallel.machine.text import first, plural
from timm_parallel.model.freeze import head_names

# Code that reads a file with all its objects, and saves its first dictionary of tensors alone.
_SAVE_TENSORS = (
    "import torch; c = torch.load({0}, weights_only=False); "
    'c = getattr(c, "state_dict", lambda: c)(); '
    "s = next((v for v in c.values() if isinstance(v, dict) "
    "and any(map(torch.is_tensor, v.values()))), c); "
    'torch.save({{k: v for k, v in s.items() if torch.is_tensor(v)}}, {0} + ".tensors.pt")'
)
# Keys below which timm, Lightning and a tutorial of PyTorch store a state dict. Averaged weights
# come first, as in timm.
STATE_DICTS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
# Attribute names under which Lightning modules commonly hold their model, next to an averaged copy.
# They come from the documentation of Lightning and from lightning-hydra-template.
LIGHTNING_PREFIXES = ("model.", "net.")


def load_weights(
    model: nn.Module,
    path: Path,
    target_names: list[str],
    for_evaluation: bool = False,
    strict: bool = True,
    sorted_names: bool = True,
) -> str:
    """Load a weights file into a model, and return a line for the log.

    The line lists which tensors were loaded and which keep their random values. `target_names`:
    class names of the data. `for_evaluation`: every tensor must come from the file. `strict`: raise
    ValueError if a tensor outside of the head would keep its random values. `sorted_names`: false
    if the user gave the order of `target_names`, as for masks and columns of numbers.

    The file is a .safetensors file, a state dict, or a checkpoint of this project, of timm, of
    Lightning or of a PyTorch tutorial. It is read with `weights_only=True`, so it cannot run code.
    If the file has raw and averaged weights, those that the run's checkpoint.metric evaluates are
    loaded; from a file of timm, the averaged ones. A prefix that most names have, such as that of
    DDP, torch.compile or Lightning, is removed. If the file has the classes in another order than
    `target_names`, the outputs of the head are reordered.

    For training, timm adapts the tensors like its own pretrained weights. Names of other
    implementations are converted, position embeddings are resized, and the first convolution is
    adapted to the number of channels. The whole head keeps its random values if a tensor of it does
    not fit, or if the file's classes are not those of the data.
    """
    contents, own, head = _read(path), model.state_dict(), head_names(model)
    tensors, label = _tensors(path, contents, set(own))
    if not for_evaluation:
        try:
            tensors = _adapted(tensors, model)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"model.weights={path}: timm cannot adapt these weights to model.name ({error}); "
                "use the model that they were trained with"
            ) from None
    # Tensors of the head that have a row for each class.
    rows = [
        name
        for name in sorted(head & tensors.keys())
        if tensors[name].shape[:1] == (len(target_names),)
    ]
    names = _class_names(path, contents, target_names)
    if names is None and sorted_names and rows and _has_classes_of_timm(contents):
        names = natural_order(target_names)
    is_moved = False
    if rows and names and names != target_names and sorted(names) == sorted(target_names):
        order = torch.tensor([names.index(name) for name in target_names])
        tensors |= {name: tensors[name][order] for name in rows}
        names, is_moved = target_names, True
    problems = {name: problem for name in own if (problem := _problem(name, tensors, own))}
    why_fresh = _doubt(names, target_names, sorted_names and bool(rows))
    if why_fresh and for_evaluation:
        raise ValueError(
            f"model.weights={path}: {why_fresh}; evaluate the weights on data with the classes "
            "that they were trained on, and add the order of the classes to the file, as "
            "class_to_idx={<class>: <number of its output>} next to state_dict"
        )
    if not for_evaluation and not why_fresh:
        why_fresh = next((problem for name, problem in problems.items() if name in head), "")
    fresh = head if why_fresh else set()
    loaded = {name: tensors[name] for name in own if name not in problems and name not in fresh}
    # Ignore a missing num_batches_tracked, because torch also loads a BatchNorm without this count
    # of batches.
    missing = [
        problem
        for name, problem in problems.items()
        if name not in fresh and "num_batches_tracked" not in name
    ]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unused = first([name for name in tensors if name not in own])
    # At least one parameter must fit. The buffers of a different model may fit by chance.
    may_be_fresh = not for_evaluation and not parameters.isdisjoint(loaded)
    if missing and not (may_be_fresh and not strict):
        hint = "; or model.weights_strict=false, to train these tensors from scratch"
        raise ValueError(
            f"model.weights={path}: {len(missing)} of the model's {len(own)} tensors would stay "
            f"random: {first(missing, 3)}; use the model.name, model.kwargs, image size "
            "(data.image_size), channels and classes that the file was trained with"
            f"{hint if may_be_fresh else ''}; not used: {unused or 'nothing'}"
        )
    _check_finite(path, loaded, parameters)
    model.load_state_dict(loaded, strict=False)
    line = f"{path}: {label}{len(loaded)} of {len(own)} tensors"
    if is_moved:
        line += "; the head is in the order of the data's classes"
    if fresh:
        line += f"; the head is fresh: {', '.join(sorted(fresh))}: {why_fresh}"
    if missing:
        line += f"; also fresh (model.weights_strict=false): {first(missing)}"
    return line + (f"; not used: {unused}" if unused else "")


def _read(path: Path) -> dict[str, Any]:
    """Read a weights file without running code that it may contain. Return an empty dictionary if
    it holds something else than a dictionary.

    Raises ValueError if the file cannot be read or has Python objects.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Allow the class Namespace, in which timm's train.py stores its arguments in a checkpoint.
        # It only holds values by name.
        with torch.serialization.safe_globals([argparse.Namespace]):
            contents = torch.load(path, map_location="cpu", weights_only=True)
            return contents if isinstance(contents, dict) else {}
    except FileNotFoundError:
        raise ValueError(f"model.weights={path}: no such file") from None
    # Catch every exception, because torch and safetensors raise many types of them for a file that
    # does not hold weights.
    except Exception as error:
        if objects := _python_objects(path):
            raise ValueError(
                f"model.weights={path}: contains Python objects besides tensors and plain values, "
                f"so it is not loaded: {first(objects)}; if you trust the author of the file, save "
                f"its tensors: python -c {shlex.quote(_SAVE_TENSORS.format(json.dumps(str(path))))}"
            ) from None
        reason = " ".join(str(error)[:200].split())
        # torch reads other files in its old format, and its error advises weights_only=False.
        if path.suffix != ".safetensors" and not zipfile.is_zipfile(path):
            reason = "not a complete file of torch.save"
        raise ValueError(
            f"model.weights={path}: not readable as weights ({reason}); give a checkpoint or a "
            "state dict"
        ) from None


def _python_objects(path: Path) -> list[str]:
    """Return the names of the classes and functions in a file of torch.save that torch.load does
    not allow.
    """
    with suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    return []


def _tensors(
    path: Path, contents: dict[str, Any], own_names: set[str]
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors in the contents of a weights file by name, and a text that says if they
    are raw or averaged; it is empty if the file has one set of weights.

    In a checkpoint of this project, the averaged weights are used if checkpoint.metric of the saved
    run evaluates them, else the raw weights. In a file of another program, the tensors may be below
    a key such as `net`, and their names may have a prefix such as `model.`. `own_names`: names of
    the tensors in our model.
    """
    if isinstance(contents.get("format"), int) and "model" in contents:
        # Checkpoints of format 2 have one average, under its own name.
        averaged = contents.get("averages", contents).get("ema")
        if averaged is None:
            return contents["model"], ""
        metric = contents["made_by"]["metric"]
        if metric.endswith("_ema"):
            return averaged, f"averaged weights (checkpoint.metric={metric}), "
        return contents["model"], f"raw weights (checkpoint.metric={metric}), "
    key = next((key for key in STATE_DICTS if isinstance(contents.get(key), dict)), None)
    state = contents if key is None else contents[key]
    if not any(isinstance(value, Tensor) for value in state.values()):
        below = [
            name
            for name, value in state.items()
            if isinstance(value, dict) and any(isinstance(each, Tensor) for each in value.values())
        ]
        if len(below) > 1:
            loaded = f"torch.load({str(path)!r}){'' if key is None else f'[{key!r}]'}"
            raise ValueError(
                f"model.weights={path}: has the tensors of several models below the keys "
                f"{', '.join(map(str, below))}; save those of one: "
                f"torch.save({loaded}[{below[0]!r}], <new file>)"
            )
        state = state[below[0]] if below else state
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"model.weights={path}: contains no tensors with names; give a state dict or a "
            "checkpoint"
        )
    # Remove the prefixes of DDP and torch.compile, which may be before and after another prefix.
    tensors = clean_state_dict(tensors)
    prefix = _common_prefix(path, [*tensors], own_names)
    return clean_state_dict({name.removeprefix(prefix): of for name, of in tensors.items()}), ""


def _common_prefix(path: Path, names: list[str], own_names: set[str]) -> str:
    """Return the text that names in a file have before the names of our model, such as
    `backbone.`; an empty text if most names fit without a prefix, or do not fit at all.
    """
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in own_names:
                counts[name.removesuffix(".".join(parts[start:]))] += 1
    # A name such as `norm.weight` also fits the end of others, so a prefix has to fit most tensors.
    most = max(counts.values(), default=0)
    likely = [prefix for prefix, count in counts.items() if count == most > len(own_names) / 2]
    known = [prefix for prefix in ("", *LIGHTNING_PREFIXES) if prefix in likely]
    if len(likely) > 1 and not known:
        raise ValueError(
            f"model.weights={path}: has the tensors of several models, whose names start with "
            f"{', '.join(likely)}; save those of one, without this prefix"
        )
    return next(iter([*known, *likely]), "")


def _adapted(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adapt the tensors of a file to a timm model, as timm adapts its pretrained weights.

    The model's own filter converts names and position embeddings. Then the weights of the first
    convolution are adapted to the number of image channels. For a model that is not of timm, the
    tensors stay unchanged. This follows timm.models.load_pretrained, which would also load the
    tensors.
    """
    tensors = dict(tensors)
    checkpoint_filter = getattr(model, "checkpoint_filter", None)
    if checkpoint_filter is not None:
        try:
            tensors = checkpoint_filter(tensors, model)
        except TypeError:
            # The checkpoint filters of some timm models take only the tensors as argument, and not
            # the model.
            tensors = checkpoint_filter(tensors)
    traits = get_model_traits(model)
    stems = traits.get("first_conv", getattr(model, "pretrained_cfg", {}).get("first_conv"))
    modules = dict(model.named_modules())
    for stem in (stems,) if isinstance(stems, str) else stems or ():
        # A model around a timm model may have the settings of timm, but other names of layers.
        convolution, weight = modules.get(stem), tensors.get(f"{stem}.weight")
        if not isinstance(convolution, nn.Conv2d) or weight is None or weight.ndim != 4:
            continue
        # Read the number of image channels from timm's traits of the model, because a
        # space-to-depth layer may multiply the channels before the first convolution.
        in_chans = traits.get("in_chans", convolution.in_channels)
        file_in_chans = weight.shape[1] * convolution.groups * in_chans // convolution.in_channels
        # If timm cannot adapt this tensor, keep its shape, so that load_weights reports that it
        # does not fit.
        with suppress(NotImplementedError):
            tensors[f"{stem}.weight"] = adapt_input_conv(in_chans, weight, base_chans=file_in_chans)
    return tensors


def _class_names(path: Path, contents: dict[str, Any], target_names: list[str]) -> list[str] | None:
    """Return the class names that another program has stored with the weights, in the order of the
    outputs: in a checkpoint as `classes` or `class_to_idx`, for a .safetensors file in the
    config.json of the Hugging Face hub next to the file. Below other keys, only the names of the
    data are found. None if there are none.
    """
    if path.suffix == ".safetensors":
        with suppress(OSError, TypeError, ValueError):
            contents = dict(json.loads(path.with_name("config.json").read_text(encoding="utf-8")))
    numbers = contents.get("class_to_idx")
    if isinstance(numbers, dict):
        return [str(name) for name in sorted(numbers, key=lambda name: int(numbers[name]))]
    names = contents.get("classes", contents.get("label_names"))
    if isinstance(names, list | tuple):
        return [str(name) for name in names]
    return _order_of(set(target_names), contents)


def _order_of(classes: set[str], value: Any) -> list[str] | None:
    """Find the order of class names in a value of a weights file, or below it: a list of these
    names, or a dictionary from name to number or from number to name. None if there is none.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    numbered = [range(len(value)), value] if isinstance(value, list | tuple) else []
    if isinstance(value, dict):
        numbered = [[*value], [*value.values()]]
    for numbers, names in (numbered, numbered[::-1]) if numbered else ():
        are_names = len(names) == len(classes) and all(isinstance(name, str) for name in names)
        if are_names and set(names) == classes and all(str(n).isdecimal() for n in numbers):
            return [name for _, name in sorted(zip(map(int, numbers), names, strict=True))]
    below = value.values() if isinstance(value, dict) else ()
    return next(filter(None, (_order_of(classes, each) for each in below)), None)


def _has_classes_of_timm(contents: dict[str, Any]) -> bool:
    """Return True for a checkpoint of timm's train.py that was trained on folders of images. With a
    class map, or a dataset such as hfds/…, the classes may have any order.
    """
    arguments = contents.get("args")
    has_map = getattr(arguments, "class_map", "")
    is_folder = "/" not in (getattr(arguments, "dataset", None) or "")
    return "arch" in contents and is_folder and not has_map


def natural_order(names: list[str]) -> list[str] | None:
    """Sort class names as timm does: numbers by value, and ignoring case. None if two names are
    equal by this rule, because timm then leaves their order to chance.
    """
    keys = {name: tuple(natural_key(name)) for name in names}
    return sorted(names, key=keys.__getitem__) if len({*keys.values()}) == len(names) else None


def _doubt(names: list[str] | None, target_names: list[str], may_be_sorted: bool) -> str:
    """Return the reason why the outputs of a head may belong to other classes than those of the
    data; an empty text if there is no doubt.

    `names`: class names in the file. `may_be_sorted`: the head has an output for each class, and
    the program that wrote the file may have sorted the classes by another rule.
    """
    if names is not None and names != target_names:
        difference = class_difference(names, target_names)
        return f"its classes are not those of the data ({difference})"
    natural = natural_order(target_names)
    # A dataset such as CIFAR-10 has an order of its own, which every program uses.
    is_own_order = target_names != sorted(target_names)
    if names is not None or not may_be_sorted or is_own_order or natural == target_names:
        return ""
    return (
        "it does not name its classes, whose order may be that of this project "
        f"({first(target_names, 3)}) or that of timm ({first(natural or [], 3)})"
    )


def _check_finite(path: Path, loaded: dict[str, Tensor], parameters: set[str]) -> None:
    """Raise ValueError if a tensor that the model takes from a file is NaN, or one of its
    `parameters` is infinite. A buffer, such as a mask of attention, may be infinite.
    """
    bad = [
        name
        for name, tensor in loaded.items()
        if tensor.isnan().any() or (name in parameters and tensor.isinf().any())
    ]
    if bad:
        raise ValueError(
            f"model.weights={path}: {plural(len(bad), 'tensor')} with values that are NaN or "
            f"infinite: {first(bad, 3)}; give a checkpoint from before the training diverged"
        )


def _problem(name: str, tensors: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    """Describe why a weights file has no suitable value for the model tensor `name`. Return an
    empty text if the file has one.
    """
    if name not in tensors:
        return f"{name} is not in the file"
    in_file, in_model = list(tensors[name].shape), list(own[name].shape)
    is_equal = in_file == in_model
    return "" if is_equal else f"{name} is {in_file} in the file and {in_model} in the model"


def preprocessing_of(path: Path) -> dict[str, Any]:
    """Read the preprocessing of images, such as mean and std, from a checkpoint of this project.

    Returns an empty dictionary for any other file.
    """
    try:
        # Map the file into memory, so that only small entries are read and no tensors.
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Ignore errors here, because load_weights reports a file that cannot be read.
    except Exception:
        return {}
    return dict(contents.get("preprocessing", {})) if isinstance(contents, dict) else {}
