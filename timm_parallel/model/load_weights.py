"""Load weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from timm.models import adapt_input_conv, clean_state_dict, get_model_traits, load_state_dict
from torch import Tensor, nn

from timm_parallel.model.freeze import head_names
from timm_parallel.model.weights import fill_model, read_weights

# Names that Lightning modules commonly give their model: of Lightning's documentation, and of
# lightning-hydra-template.
LIGHTNING_PREFIXES = ("model.", "net.")


def load_weights(
    model: nn.Module,
    path: Path,
    target_names: list[str],
    for_evaluation: bool = False,
    strict: bool = True,
) -> str:
    """Load a weights file into `model`. Return a line that lists which tensors were loaded and
    which stay random.

    In training, tensors are adapted as timm adapts its pretrained weights: names of original files,
    position embeddings of another image size, and a first convolution of other channels.
    `target_names`: of the data. `strict`: see `fill_model`.

    The file is .safetensors, a checkpoint of this project, of timm, of Lightning or of a PyTorch
    tutorial, or a bare state dict, read with `weights_only`. Of raw and averaged weights, those
    that the run's checkpoint.metric evaluates are loaded, or timm's averaged ones. Prefixes that
    DataParallel, DDP, torch.compile and Lightning put before names are removed.
    """
    file = read_weights(path, partial(_read_foreign, own_names=list(model.state_dict())))
    if not for_evaluation:
        try:
            file.tensors = _adapted(file.tensors, model)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"model.weights={path}: timm cannot adapt it to this model.name ({error})"
            ) from None
    return fill_model(model, file, head_names(model), target_names, for_evaluation, strict)


def _read_foreign(path: Path, own_names: list[str]) -> dict[str, Any]:
    """Read a state dict as timm does, from PyTorch's tutorials and Lightning too. `own_names`: of
    the model's tensors.
    """
    state = load_state_dict(str(path), use_ema=True, weights_only=True)
    if isinstance(state.get("model_state_dict"), dict):
        state = clean_state_dict(state["model_state_dict"])
    for prefix in LIGHTNING_PREFIXES:
        # A model may itself have a part of this name.
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
    """Adapt a file's tensors to a timm model as timm does: apply its filter, then resize the first
    convolution.

    Other models get their tensors unchanged. Follows timm.models.load_pretrained, which would also
    load them.
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
