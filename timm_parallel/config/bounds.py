"""Compare values with the types, bounds and choices that the dataclasses of a config declare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.config import timm_rules
from timm_parallel.config.explain import type_text
from timm_parallel.config.suggest import hint
from timm_parallel.keys import Config, leaves


def key_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each config key whose value is out of bounds."""
    for key, value, entry in leaves(config):
        yield from (
            f"{key}={value}: {problem}" for problem in _out_of_bounds(value, entry.metadata)
        )


def _out_of_bounds(value: Any, bounds: Any) -> Iterator[str]:
    """Compare a value with the bounds and choices in the metadata of its config key. Yield a
    description of the allowed values, e.g. `expected >= 1`, if the value is not allowed.
    """
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            yield "expected a finite number"
    least, above, most = (bounds.get(name) for name in ("ge", "gt", "le"))
    if value is None:
        return
    if "choices" in bounds and value not in bounds["choices"]:
        yield f"allowed: {', '.join(map(str, bounds['choices']))}"
    elif bounds.get("syntax") == "auto_augment":
        if not timm_rules.is_auto_augment(value):
            yield "expected timm's syntax, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0"
    elif isinstance(value, str):
        if least is not None and value != "auto":
            yield f"expected auto or an integer >= {least}"
    elif least is not None and value < least:
        yield f"expected >= {least}"
    elif above is not None and value <= above:
        yield f"expected > {above}"
    elif most is not None and value > most:
        yield f"expected <= {most}"


def option_problems(key: str, options: type[Any], given: dict[str, Any]) -> Iterator[str]:
    """Yield an error message for each option that is unknown, has the wrong type, or is out of
    bounds.

    `key`: the config key that holds the options, e.g. train.task_kwargs. `options`: the dataclass
    that declares them. `given`: the options of the config.
    """
    declared = {entry.name: entry for entry in dataclasses.fields(options)}
    for name, value in given.items():
        if name not in declared:
            known = f"{key} has {', '.join(declared)}" if declared else f"{key} has no options"
            yield f"{key}.{name}={value}: unknown option{hint(name, declared)}; {known}"
            continue
        try:
            OmegaConf.merge(OmegaConf.structured(options), {name: value})
        except OmegaConfBaseException:
            yield f"{key}.{name}={value}: expected {type_text(declared[name])}"
            continue
        for problem in _out_of_bounds(value, declared[name].metadata):
            yield f"{key}.{name}={value}: {problem}"
