"""Which keys exist, and Hydra's and OmegaConf's errors about them in one line with the nearest that does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from src.engine.config.names import hint
from src.schema import Config, leaves


def known_keys() -> list[str]:
    """Every dotted key of the schema, sections included."""
    keys = [key for key, _, _ in leaves(Config())]
    return keys + sorted({key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)})


def is_known(key: str) -> bool:
    """Whether the schema has `key`; anything goes below a free dictionary."""
    node: object = Config()
    for part in key.split("."):
        if isinstance(node, dict):
            return True
        if not hasattr(node, part):
            return False
        node = getattr(node, part)
    return True


def plain_values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value in dicts and lists; what a list holds is under the list's key."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from plain_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from plain_values(value, key)
    else:
        yield key, node


def key_hint(key: str, more: Iterable[str] = ()) -> str:
    """`; did you mean …?`: the same last word elsewhere in the tree, else what looks alike."""
    known = known_keys()
    last = key.rsplit(".", 1)[-1]
    elsewhere = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last]
    if elsewhere:
        return f"; did you mean {', '.join(elsewhere[:3])}?"
    return hint(key, [*known, *more])


def explain(error: Exception, overrides: Iterable[str] = ()) -> str:
    """An error of Hydra, OmegaConf or the YAML parser in one line: the key as it was given, what is wrong, the remedy."""
    cause = error.__cause__ if getattr(error.__cause__, "full_key", None) else error
    text = " ".join(str(cause).split())
    if hasattr(error, "override"):  # Hydra could not parse this word of the command line
        return f"{error.override}: {text.split(' See https')[0]}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found[1]}: is set already, so leave the + away: {found[1]}=…"
    in_text = re.search(r"full_key: (\S+)", str(error))
    key = str(getattr(cause, "full_key", None) or (in_text.group(1) if in_text else ""))
    if not key:
        return text
    if re.search(r"Key '.*' not in|not in struct|is not in", text):
        if is_known(key) and not key.startswith("hydra"):
            return f"{key}: not set yet, so add it: +{key}=…"
        return f"{key}: unknown key{key_hint(key)}"
    if "Missing mandatory" in text:
        return f"{key}=???: must be given, e.g. {key}=…"
    as_given = {override.lstrip("+~").partition("=")[0]: override.lstrip("+~") for override in overrides}
    return f"{as_given.get(key, key)}: {text.split(' full_key: ')[0]}"
