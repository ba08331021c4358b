"""Import classes and functions by their dotted names."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from timm_parallel.machine.platform import STOP_SIGNALS

T = TypeVar("T")


@contextmanager
def slow_imports() -> Iterator[None]:
    """Import torch and timm in this `with` block. The garbage collector is paused in it, which
    saves a fifth of the time. Stop signals wait for its end, because native code that imports numpy
    may drop the exception of a signal handler.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def import_name(name: str) -> Any:
    """Import a class or function by its dotted name, such as `torch.optim.SGD`."""
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(module), class_name)


def import_class(
    key: str, name: str, base: type[T], named: Mapping[str, str] | None = None
) -> type[T]:
    """Import the class that a config key names, by a short name or by a dotted name. Raises
    ValueError if it does not extend the class `base`.

    `key`: the config key, for the message. `name`: its value. `named`: dictionary from short name
    to dotted name.
    """
    imported = import_name((named or {}).get(name, name))
    if not (isinstance(imported, type) and issubclass(imported, base)):
        raise ValueError(f"{key}={name}: expected a class that extends {base.__name__}")
    return imported


def find_name(name: str, package: str) -> Any:
    """Import a class or function from a module of a package. Return None if there is no such name.

    `name`: dotted name. An error in the code of its module is raised unchanged.
    """
    module, _, last = name.rpartition(".")
    if not name.startswith(f"{package}."):
        return None
    try:
        return getattr(import_module(module), last, None)
    except ModuleNotFoundError as error:
        # The module itself is missing, and not a package that it imports.
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise
