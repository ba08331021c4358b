"""Exception classes for rejected settings, failed runs and unreadable images. Code compares
exception classes, never the text of a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RefusedError(ValueError):
    """Error for a setting or file of the user that cannot work. train.py prints the message in one
    line and exits with code 2.
    """


class UnknownFormatError(RefusedError):
    """Error for a file that another version of the code wrote. Unlike a damaged file, it must not
    be replaced.
    """


class ReplicasDifferError(RuntimeError):
    """Error for ranks whose model parameters differ. result.json stores the name of this class in
    `failure.exception`.
    """


class NotFiniteError(RuntimeError):
    """Error for a loss or a weight that is NaN or infinite. Every rank raises the error at the same
    step.
    """

    def __init__(self, message: str, step: int) -> None:
        """`step`: the first optimizer step with a value that is not finite."""
        super().__init__(message)
        self.step = step


class ConnectError(RuntimeError):
    """Error for a process group that could not connect at the start of a run. It is not the error
    of a connection that was lost later.
    """


class UnreadableImageError(ValueError):
    """Error for an image that cannot be read. With data.on_error=skip, training skips the image."""


class UnsentBatchError(RuntimeError):
    """Error for a batch that a loader worker could not send, for example for lack of shared
    memory.
    """


@contextmanager
def refuse_wrong_arguments(
    key: str, values: Any, receiver: str, *errors: type[Exception], fix: str = ""
) -> Iterator[None]:
    """Convert an error about wrong arguments in the `with` block to a ValueError that names the
    config key.

    `key`, `values`: the config key and its value, which holds the arguments. `receiver`: the
    function or class that takes the arguments. `errors`: exception classes that a library function
    raises for wrong arguments. `fix`: advice at the end of the message.

    Without `errors`, the receiver is a class of the project. Then only a TypeError about an
    argument is converted. Any other error is a bug of that class and keeps its traceback.
    """
    wrong_arguments: tuple[type[Exception], ...] = (TypeError, *errors)
    try:
        yield
    except wrong_arguments as error:
        if not errors and "argument" not in str(error):
            raise
        # If the key is empty, the wrong argument comes from another key of the same config group,
        # so name the group only.
        given = f"{key}={values}" if values else key.partition(".")[0]
        what = "them" if values else "its settings"
        raise ValueError(f"{given}: {receiver} does not accept {what} ({error}){fix}") from None
