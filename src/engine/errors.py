"""Exceptions that the engine treats specially. Your code raises them; the engine reports each differently."""

from __future__ import annotations


class RefusedError(ValueError):
    """A request that cannot be fulfilled. The engine reports it in one line, with exit code 2."""


class NotFiniteError(RuntimeError):
    """The loss or the weights became NaN or infinite. Every rank raises this at the same step."""

    def __init__(self, message: str, step: int) -> None:
        """`step`: the first with a non-finite value."""
        super().__init__(message)
        self.step = step


class UnreadableImageError(ValueError):
    """A sample that cannot be read. `data.on_error=skip` skips samples that raise this error and no others."""
