"""Find a class and its attributes by parsing source files. train.py checks a config before torch is
imported, so it cannot import the classes that the config names.
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

# project.py sets both variables: the classes that have a short name in configs (short name ->
# dotted name), and the project's package. This file cannot import project.py, because project.py
# imports keys.py, and keys.py imports this file.
_named: dict[str, str] = {}
_package = "src"


def use_classes_of(package: str, named: Mapping[str, str]) -> None:
    """Set the package from which a config may name classes by their dotted names. Also set short
    names for some classes.

    `package`: name of the project's package, e.g. `src`. `named`: dictionary from a short name,
    e.g. `ddp`, to the dotted name of its class.
    """
    global _package
    _package = package
    _named.update(named)
    class_attributes.cache_clear()


def package() -> str:
    """Return the name of the project's package, e.g. `src`."""
    return _package


def is_own_class(name: str, folder: str = "") -> bool:
    """Return True if `name` has the form `src.<module>.<Class>`. A config may name only classes of
    the project by a dotted name.

    `folder`: subfolder of the package in which the class must be; empty for any.
    """
    place = f"{_package}.{folder}" if folder else _package
    return re.fullmatch(rf"{re.escape(place)}(\.[A-Za-z_]\w*){{2,}}", name) is not None


def find_class(name: str) -> tuple[str, ast.Module, ast.ClassDef] | None:
    """Find the source of a class by its dotted name `src.<module>.<Class>`, without importing it.

    Returns the name of the defining module, the syntax tree of that module and the syntax tree of
    the class; None if the class does not exist. If a package imports the class in `__init__.py`,
    the search continues in the module that the import names.
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
    """Read the `from … import …` statements of a module. Return a dictionary from each imported
    name to its dotted name. Imports below `if TYPE_CHECKING` are included.
    """
    return {
        alias.asname or alias.name: f"{statement.module}.{alias.name}"
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


@cache
def class_attributes(name: str) -> dict[str, Any]:
    """Read the attributes of a class from its source, base classes included.

    Returns a dictionary from attribute to value. Only attributes with a literal value (number,
    text, tuple …) are included. The dictionary is empty if the class does not exist.
    """
    name = _named.get(name, name)
    found = find_class(name)
    if found is None:
        return {}
    module, tree, node = found
    imported = _imports(tree)
    attributes: dict[str, Any] = {}
    # Python takes an attribute from the first base class that has it. So the first base class is
    # applied last, and its values replace those of the others.
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
            # The class overrides the inherited value, so remove that value. The new value is stored
            # only if it is a literal.
            attributes.pop(ast.unparse(target), None)
            with suppress(ValueError):
                attributes[ast.unparse(target)] = ast.literal_eval(statement.value)
    return attributes
