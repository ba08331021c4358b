"""Load weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from timm.models import adapt_input_conv, clean_state_dict, get_model_traits, load_state_dict
from torch import Tensor, nn

from timm_parallel.model.freeze import head_names
from timm_parallel.model.weights import fill_model, read_weights

# Attribute names under which Lightning modules commonly hold their model. They come from the
# documentation of Lightning and from lightning-hydra-template.
LIGHTNING_PREFIXES = ("model.", "net.")


def load_weights(
    model: nn.Module,
    path: Path,
    target_names: list[str],
    for_evaluation: bool = False,
    strict: bool = True,
) -> str:
    """Load a weights file into a model, and return a line for the log.

    The line lists which tensors were loaded and which keep their random values. `target_names`:
    class names of the data. `for_evaluation`: every tensor must come from the file. `strict`: raise
    ValueError if a tensor outside of the head would keep its random values.

    The file is a .safetensors file, a state dict, or a checkpoint of this project, of timm, of
    Lightning or of a PyTorch tutorial. It is read with `weights_only=True`, so it cannot run code.
    If the file has raw and averaged weights, those that the run's checkpoint.metric evaluates are
    loaded; from a file of timm, the averaged ones. Prefixes that DataParallel, DDP, torch.compile
    and Lightning put before names are removed.

    For training, timm adapts the tensors like its own pretrained weights. Names of other
    implementations are converted, position embeddings are resized, and the first convolution is
    adapted to the number of channels.
    """
    file = read_weights(path, partial(_read_foreign, own_names=list(model.state_dict())))
    if not for_evaluation:
        try:
            file.tensors = _adapted(file.tensors, model)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"model.weights={path}: timm cannot adapt these weights to model.name ({error}); "
                "use the model that they were trained with"
            ) from None
    return fill_model(model, file, head_names(model), target_names, for_evaluation, strict)


def _read_foreign(path: Path, own_names: list[str]) -> dict[str, Any]:
    """Read a state dict from a file of timm, Lightning or a PyTorch tutorial.

    Prefixes that Lightning puts before names, such as `model.`, are removed. `own_names`: names of
    the tensors in our model. If one of these names starts with the prefix, the prefix is kept.
    """
    state = load_state_dict(str(path), use_ema=True, weights_only=True)
    if isinstance(state.get("model_state_dict"), dict):
        state = clean_state_dict(state["model_state_dict"])
    for prefix in LIGHTNING_PREFIXES:
        # Keep the prefix if the model itself has a module of this name.
        if any(name.startswith(prefix) for name in own_names):
            continue
        inner = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        outer = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        state = outer | clean_state_dict(inner)
    return state


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
