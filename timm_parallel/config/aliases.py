"""Reject YAML files whose aliases expand to more than 100,000 values. Three lines suffice for
millions: `a: [x, x]`, `b: [*a, *a]`, `c: [*b, *b]` …
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Largest number of values. OmegaConf copies each value, which takes a second for this number.
MOST_VALUES = 100_000


def check_aliases(path: Path) -> None:
    """Raise ValueError if the aliases of a YAML file expand to more than MOST_VALUES values, or if
    an alias contains itself.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    # A file without `&` has no anchor, and so no alias.
    if "&" not in text:
        return
    try:
        count = _expanded(yaml.compose(text, Loader=yaml.SafeLoader), {})
    # Ignore invalid YAML here, because OmegaConf reports the error when it reads the file.
    except (yaml.YAMLError, RecursionError):
        return
    if count > MOST_VALUES:
        raise ValueError(
            f"{path}: its YAML aliases expand to more than {MOST_VALUES:,} values; write the file "
            "without aliases"
        )


def _expanded(node: Any, counts: dict[int, float]) -> float:
    """Count the values that a YAML node contains after each alias is replaced by the value of its
    anchor. The count is infinite for a node that contains itself.

    `counts`: counts of the nodes that were visited before, by id(node).
    """
    if id(node) not in counts:
        # Mark the node as infinite while its children are counted, so that a node that contains
        # itself keeps this count.
        counts[id(node)] = float("inf")
        parts = getattr(node, "value", None)
        nested = parts if isinstance(parts, list) else []
        children = [
            child for part in nested for child in (part if isinstance(part, tuple) else (part,))
        ]
        counts[id(node)] = 1 + sum(_expanded(child, counts) for child in children)
    return counts[id(node)]
