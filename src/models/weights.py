"""Weights from a file into a model: `model.weights=<file>`."""

from __future__ import annotations

import logging
from pathlib import Path

from timm.models import load_state_dict
from torch import Tensor, nn

log = logging.getLogger(__name__)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what fits `model` by name and shape, and log what does not: a new head keeps its fresh weights.

    The file is .safetensors, or a checkpoint of this project, of timm or a bare state dict, read with `weights_only`; of
    timm's two sets of weights it is the averaged one. What DataParallel, DDP and torch.compile put before names, timm
    takes off. Refused where less than half of the model's tensors fit.
    """
    found = _read(path)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in found.items() if name in own and tensor.shape == own[name].shape}
    if len(fitting) < len(own) / 2:
        raise ValueError(
            f"model.weights={path}: of another architecture: {len(fitting)} of the model's {len(own)} tensors are in it "
            f"with their shape; it has {', '.join(list(found)[:3])} …; set model.name and model.kwargs to those it was "
            "made with"
        )
    model.load_state_dict(fitting, strict=False)
    log.info("weights      %s: %d of %d tensors", path, len(fitting), len(own))
    for what, names in (
        ("keep their fresh weights", [_with_shapes(name, found, own) for name in own if name not in fitting]),
        ("are in the file alone", [name for name in found if name not in own]),
    ):
        if names:
            log.info("weights      %d %s: %s", len(names), what, ", ".join(names[:8]) + " …" * (len(names) > 8))


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state = load_state_dict(str(path), use_ema=True, weights_only=True)
        tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    except FileNotFoundError:
        raise ValueError(f"model.weights={path}: no such file") from None
    except Exception as error:  # of torch, safetensors, or of a file that holds something else
        reason = "more than tensors and plain values" if "weights_only" in str(error) else f"{error}"[:200]
        raise ValueError(f"model.weights={path}: not readable as weights ({' '.join(reason.split())})") from None
    if not tensors:
        raise ValueError(f"model.weights={path}: holds no tensors by name")
    return tensors


def _with_shapes(name: str, found: dict[str, Tensor], own: dict[str, Tensor]) -> str:
    return f"{name} {list(found[name].shape)} against {list(own[name].shape)}" if name in found else name
