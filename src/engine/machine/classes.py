"""Import a class by its name in a config, and report arguments that a class or function does not accept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def import_class(name: str) -> Any:
    """Return the class with a dotted name, for example `src.models.cifar_resnet.CifarResNet18`."""
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(module), class_name)


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
