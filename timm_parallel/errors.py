"""Exceptions for refusals, failures and unreadable images, and codes that tell them apart. No code
reads the words of a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Codes of refusals, which jobs.json has next to the message.
ONE_DEVICE = "one_device"
ONE_PROCESS = "one_process"
TOO_FEW_DEVICES = "too_few_devices"
BATCH_TOO_SMALL = "batch_too_small"
BATCH_NOT_DIVISIBLE = "batch_not_divisible"


class Problem(str):
    """Message of a broken rule with a code, for rules whose refusal other code or a reader of
    jobs.json looks for.
    """

    code: str

    def __new__(cls, message: str, code: str = "") -> Problem:
        problem = super().__new__(cls, message)
        problem.code = code
        return problem


class RefusedError(ValueError):
    """Error for a setting or file of the user that cannot work. The library prints its message, and
    exits with code 2.
    """

    def __init__(self, message: str) -> None:
        """`message`: text, or a Problem, whose code the error keeps."""
        super().__init__(str(message))
        self.code: str = getattr(message, "code", "")


class ReplicasDifferError(RuntimeError):
    """Error for ranks with different parameters. result.json names it in `failure.exception`."""


class NotFiniteError(RuntimeError):
    """Error for a loss or weights that became NaN or infinite. Every rank raises it at the same
    step.
    """

    def __init__(self, message: str, step: int) -> None:
        """`step`: the first step with a non-finite value."""
        super().__init__(message)
        self.step = step


class ConnectError(RuntimeError):
    """Error of a process group that never connected, so that no other rank can have closed the
    connection.
    """


class UnreadableImageError(ValueError):
    """Error for a sample that cannot be read. With data.on_error=skip, training skips samples that
    raise this error.
    """


@contextmanager
def refuse_wrong_arguments(
    key: str, values: Any, receiver: str, *errors: type[Exception], fix: str = ""
) -> Iterator[None]:
    """Convert an error about arguments in the `with` block to a ValueError that names the config
    key, and the `fix`.

    `errors`: types that a library function raises for wrong arguments. Without them the receiver is
    a class of this project: only a TypeError about an argument is converted, because other errors
    are bugs, which need their traceback.
    """
    wrong_arguments: tuple[type[Exception], ...] = (TypeError, *errors)
    try:
        yield
    except wrong_arguments as error:
        if not errors and "argument" not in str(error):
            raise
        # Without values, another key of the group is wrong.
        given = (
            f"{key}={values}: {receiver} does not accept them"
            if values
            else f"{key.partition('.')[0]}: {receiver} does not accept its settings"
        )
        raise ValueError(f"{given} ({error}){fix}") from None
