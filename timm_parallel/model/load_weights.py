"""Load weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from timm.models import adapt_input_conv, clean_state_dict, get_model_traits, load_state_dict
from torch import Tensor, nn

from timm_parallel.errors import RefusedError
from timm_parallel.model.freeze import head_names
from timm_parallel.model.weights import fill_model, read_weights

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
    adapted to the number of channels.
    """
    read_foreign = partial(_read_foreign, own_names=list(model.state_dict()))
    file = read_weights(path, read_foreign, target_names)
    if not for_evaluation:
        try:
            file.tensors = _adapted(file.tensors, model)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"model.weights={path}: timm cannot adapt these weights to model.name ({error}); "
                "use the model that they were trained with"
            ) from None
    return fill_model(
        model, file, head_names(model), target_names, for_evaluation, strict, sorted_names
    )


def _read_foreign(path: Path, own_names: list[str]) -> dict[str, Any]:
    """Read a state dict from a file of timm, Lightning or another program.

    The tensors may be below a key such as `net`, and their names may have a prefix such as
    `model.`. `own_names`: names of the tensors in our model.
    """
    state = load_state_dict(str(path), use_ema=True, weights_only=True)
    below = {
        key: value
        for key, value in state.items()
        if isinstance(value, dict) and any(isinstance(each, Tensor) for each in value.values())
    }
    if below and not any(isinstance(value, Tensor) for value in state.values()):
        key = "model_state_dict" if "model_state_dict" in below else next(iter(below))
        if len(below) > 1 and key != "model_state_dict":
            raise RefusedError(
                f"model.weights={path}: has the tensors of several models below the keys "
                f"{', '.join(below)}; save those of one: "
                f"torch.save(torch.load({str(path)!r})[{key!r}], <new file>)"
            )
        state = clean_state_dict(below[key])
    prefix = _common_prefix(path, list(state), set(own_names))
    return clean_state_dict({name.removeprefix(prefix): value for name, value in state.items()})


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
        raise RefusedError(
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
        # If timm cannot adapt this tensor, keep its shape, so that fill_model reports that it does
        # not fit.
        with suppress(NotImplementedError):
            tensors[f"{stem}.weight"] = adapt_input_conv(in_chans, weight, base_chans=file_in_chans)
    return tensors
