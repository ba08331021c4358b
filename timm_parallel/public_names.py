"""Import the public names of a package only when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader_of(package: str, groups: Mapping[str, Mapping[str, str]]) -> Callable[[str], Any]:
    """Build the function `__getattr__` of a package, which imports a public name when it is first
    used.

    `package`: name of the package. `groups`: the public names by title, {title: {public name:
    module}}, with the module below timm_parallel. The built function raises AttributeError for a
    name that is in no group.
    """
    modules = {name: module for group in groups.values() for name, module in group.items()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package} has no attribute {name}")
        value = getattr(import_module(f"timm_parallel.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
