"""Import the public names of a package only when they are first used (PEP 562)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` of a package that imports a public name when it
    is first used, because --help and the check of a config must not import torch or timm. The file
    `__init__.pyi` of the package lists the names as imports, which type checkers read too, as
    with `lazy_loader.attach_stub` (SPEC 1 of Scientific Python).

    `package`: name of the package. `__getattr__` raises AttributeError for a name that is not in
    the list.
    """
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {name: module for module, name in re.findall(r"from (\S+) import (\w+) as", stub)}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package} has no attribute {name}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(modules), sorted(modules)
