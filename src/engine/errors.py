"""Exceptions that your code raises so that the engine reports a refusal, a non-finite loss or an unreadable image."""

from __future__ import annotations


class RefusedError(ValueError):
    """Error for a setting or file of the user that cannot work. The engine prints its message, and exits with code 2."""


class NotFiniteError(RuntimeError):
    """Error for a loss or weights that became NaN or infinite. Every rank raises it at the same step."""

    def __init__(self, message: str, step: int) -> None:
        """`step`: the first step with a non-finite value."""
        super().__init__(message)
        self.step = step


class UnreadableImageError(ValueError):
    """Error for a sample that cannot be read. With data.on_error=skip, training skips samples that raise this error."""
