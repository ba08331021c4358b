"""Refuse YAML files whose aliases expand to millions of values: `a: [x, x]`, `b: [*a, *a]`, `c:
[*b, *b]` …
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MOST_VALUES = 100_000  # OmegaConf copies each of them, in a second


def check_aliases(path: Path) -> None:
    """Raise ValueError if the aliases of a YAML file expand to too many values, or to an endless
    one.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    # Without an anchor there is no alias.
    if "&" not in text:
        return
    try:
        count = _expanded(yaml.compose(text, Loader=yaml.SafeLoader), {})
    # OmegaConf's own reading reports it.
    except (yaml.YAMLError, RecursionError):
        return
    if count > MOST_VALUES:
        raise ValueError(
            f"{path}: its aliases expand to more than {MOST_VALUES:,} values; write the file "
            "without aliases"
        )


def _expanded(node: Any, counts: dict[int, float]) -> float:
    """Return the number of values of a YAML node in which each alias is replaced by its anchor's
    value.
    """
    if id(node) not in counts:
        # For a node that contains itself.
        counts[id(node)] = float("inf")
        parts = getattr(node, "value", None)
        nested = parts if isinstance(parts, list) else []
        children = [
            child for part in nested for child in (part if isinstance(part, tuple) else (part,))
        ]
        counts[id(node)] = 1 + sum(_expanded(child, counts) for child in children)
    return counts[id(node)]
