"""Suggestions for a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean a, b?`, or all known names if they are few, or an empty string."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    # cifar -> cifar10_resnet18
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
