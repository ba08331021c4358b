"""Import the public names of a package only when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, groups: Mapping[str, Mapping[str, str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` of a package that imports a public name when it
    is first used, as `lazy_loader.attach` does (SPEC 1 of Scientific Python).

    `package`: name of the package. `groups`: the public names by title, {title: {public name:
    module}}, with the module below timm_parallel. `__getattr__` raises AttributeError for a name
    that is in no group.
    """
    modules = {name: module for group in groups.values() for name, module in group.items()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package} has no attribute {name}")
        value = getattr(import_module(f"timm_parallel.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(modules), sorted(modules)
