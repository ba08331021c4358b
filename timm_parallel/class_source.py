"""Read a class from its source. train.py checks a config before it imports torch, so it cannot
import the classes that the config names.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# Set by the project (project.py), which imports keys.py, which asks this file for attributes.
# Name in a config -> dotted name, of the classes that the project names.
_named: dict[str, str] = {}
_package = "src"


def use_classes_of(package: str, named: Mapping[str, str]) -> None:
    """Let a config name the classes of a package, some of them otherwise than by a dotted name."""
    global _package
    _package = package
    _named.update(named)
    class_attributes.cache_clear()


def package() -> str:
    """Return the name of the project's package."""
    return _package


def is_own_class(name: str, folder: str = "") -> bool:
    """Return True for `src.<module>.<Class>`, a class of this project. A config may name no other
    classes. `folder`: one of the package, which the class must be in.
    """
    place = f"{_package}.{folder}" if folder else _package
    return re.fullmatch(rf"{re.escape(place)}(\.[A-Za-z_]\w*){{2,}}", name) is not None


def find_class(name: str) -> tuple[str, ast.Module, ast.ClassDef] | None:
    """Return the module that defines the class `name`, `src.<module>.<Class>`, its syntax tree and
    that of the class; None if there is no such class. Follows the imports of a package.
    """
    module, _, class_name = name.rpartition(".")
    if not module:
        return None
    for folder in sys.path:
        path = Path(folder).joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                tree = ast.parse(file.read_text(encoding="utf-8"))
                for node in tree.body:
                    if isinstance(node, ast.ClassDef) and node.name == class_name:
                        return module, tree, node
                origin = _imports(tree).get(class_name) if file.name == "__init__.py" else None
                return None if origin is None else find_class(origin)
    return None


def _imports(tree: ast.Module) -> dict[str, str]:
    """Map the names that `from … import` gives a module, also for types only, to dotted names."""
    return {
        alias.asname or alias.name: f"{statement.module}.{alias.name}"
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


@cache
def class_attributes(name: str) -> dict[str, Any]:
    """Return the class attributes that have a plain value, with those of its base classes;
    an empty dict for an unknown class.
    """
    name = _named.get(name, name)
    found = find_class(name)
    if found is None:
        return {}
    module, tree, node = found
    imported = _imports(tree)
    attributes: dict[str, Any] = {}
    # The first base wins, as in Python.
    for base in reversed(node.bases):
        first, dot, rest = ast.unparse(base).partition(".")
        dotted = imported.get(first, f"{module}.{first}") + dot + rest
        if dotted != name:
            attributes |= class_attributes(dotted)
    for statement in node.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            # A value that is not plain is left out.
            attributes.pop(ast.unparse(target), None)
            with suppress(ValueError):
                attributes[ast.unparse(target)] = ast.literal_eval(statement.value)
    return attributes
