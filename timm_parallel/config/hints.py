"""Suggestions of valid names for a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Build the end of an error message for an unknown name: `; did you mean a, b?` with similar
    names. Without a similar name, the text lists all known names if there are at most 20, and is
    empty otherwise.
    """
    lower = {candidate.lower(): candidate for candidate in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    # Without a similar name, suggest names that start with the given one: cifar10_resnet18 for
    # cifar.
    close = (
        close
        or [
            lower[match]
            for match in sorted(lower)
            if len(name) > 2 and match.startswith(name.lower())
        ][:3]
    )
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; allowed: {', '.join(sorted(lower.values()))}" if 0 < len(lower) <= 20 else ""
