"""Names of models, settings and lists of them, as labels of groups and configurations."""

from __future__ import annotations

from collections.abc import Iterable

from timm_parallel.config.timm_names import timm_models
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.machine.text import yaml_text

# Text for a value that was not recorded.
DASH = "—"


def join_short(items: Iterable[str], limit: int = 4) -> str:
    unique = list(dict.fromkeys(items))
    rest = [f"and {len(unique) - limit} more"] if len(unique) > limit else []
    return "; ".join(unique[:limit] + rest)


def model_name(run: RunRecord) -> str:
    """Return the name of a run's model, for example `resnet18`. If model.kwargs changes the model,
    add its size: `tiny (vit_tiny_patch16_224, 61 k parameters, 32 px)`.
    """
    name = str(run.result.get("model") or DASH)
    parameters, sides = run.integer("parameters"), run.entries(int, "image_size")
    pixels = " x ".join(map(str, sides)) or run.integer("image_size")
    if not any(key.startswith("model.kwargs.") for key in run.config):
        return name
    details = [f"{rounded(parameters)} parameters"] if parameters is not None else []
    details += [f"{pixels} px"] if pixels is not None else []
    # Do not use a config file's name that is also the name of a timm model, because it does not
    # describe the changed model.
    if run.model_option and run.model_option not in timm_models():
        details.insert(0, name)
        name = run.model_option
    return f"{name} ({', '.join(details)})" if details else name


def rounded(count: int) -> str:
    """Format a count with at most two or three digits, for example `999`, `61 k` or `5.7 M`."""
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if count >= factor:
            return (
                f"{count / factor:.2g}{unit}"
                if count < 10 * factor
                else f"{count / factor:.0f}{unit}"
            )
    return str(count)


def describe_settings(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={yaml_text(run.config.get(key))}" for key in keys)
