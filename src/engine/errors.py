"""Exceptions that your code raises so that the engine reports a refusal, a non-finite loss or an unreadable image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def refuse_wrong_arguments(key: str, values: Any, receiver: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert an error about arguments in the `with` block to a ValueError that names the config key.

    `errors`: types that a library function raises for wrong arguments. Without them the receiver is a class of this
    project: only a TypeError about an argument is converted, because other errors are bugs, which need their traceback.
    """
    wrong_arguments: tuple[type[Exception], ...] = (TypeError, *errors)
    try:
        yield
    except wrong_arguments as error:
        if not errors and "argument" not in str(error):
            raise
        raise ValueError(f"{key}={values}: {receiver} does not accept them ({error})") from None
