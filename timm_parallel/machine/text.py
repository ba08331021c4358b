"""Texts for messages: a count with its noun, a short list of names, a value in YAML spelling, and
text that is safe for a terminal. Also reads numbers from records.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: `1 device`, `2 devices`, `2 processes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def first(names: list[str], count: int = 5) -> str:
    """Join the first `count` names with commas. If there are more names, append `…`."""
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def for_terminal(text: str) -> str:
    """Escape the control characters of a text, except line breaks and tabs, and bytes that are not
    UTF-8. The name of a file may contain commands for a terminal.
    """
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
        lambda match: ascii(match[0])[1:-1],
        text,
    )


def yaml_text(value: Any) -> str:
    """Return a value in YAML spelling, as on the command line: `null`, `true`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"


def as_number(value: Any) -> float | None:
    """Return a value as a float if it is a finite number; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def change_text(key: str, before: Any, now: Any) -> str:
    """Format a changed setting as `key: before -> now`."""
    return f"{key}: {yaml_text(before)} -> {yaml_text(now)}"


def similar_names(names: Sequence[str]) -> str:
    """Describe in one sentence the class names that probably mean the same class.

    Such names differ only in case, in spaces or invisible characters, or are the same number.
    Returns an empty text if there are none.
    """
    alike: dict[str | float, list[str]] = {}
    for name in names:
        text = unicodedata.normalize("NFKC", name).casefold()
        visible = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        words = " ".join(visible.split())
        alike.setdefault(float(words) if is_number(words) else words, []).append(name)
    # repr shows the invisible characters of a name.
    groups = [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]
    if not groups:
        return ""
    return f"class names that probably mean the same: {first(groups)}; write each in one way"


def is_number(text: str) -> bool:
    """Return True if a text is a finite number."""
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False
