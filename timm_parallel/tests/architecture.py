"""Import statements of all source files of the library and of a project. No code is imported.

test_architecture.py tests the rules of the library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Named:
    """Dotted name in a source file, which is either imported or used as an attribute of an imported
    name.
    """

    name: str
    line: int
    in_function: bool
    # True if the name is imported or used inside `if TYPE_CHECKING:`.
    for_types: bool
    is_import: bool


def names_in(source: str) -> Iterator[Named]:
    """Yield every name that a source file imports, and every dotted use of a name, such as
    `torch.distributed.barrier`.
    """
    yield from _walk(ast.parse(source), in_function=False, for_types=False)


def _walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Named]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        typed = for_types or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        )
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            names = [f"{module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.Attribute):
            text = ast.unparse(child)
            names = [text] if text.replace(".", "").replace("_", "").isalnum() else []
        for name in names:
            is_import = isinstance(child, ast.Import | ast.ImportFrom)
            yield Named(name, getattr(child, "lineno", 0), in_function, for_types, is_import)
        yield from _walk(child, inside, typed)


def python_files(names: Iterable[str], root: Path = ROOT) -> list[Path]:
    """Return the Python files of a project. `names`: its files and folders, relative to `root`."""
    given = [root / name for name in names]
    files = [path for path in given if path.is_file()]
    return files + [path for folder in given for path in sorted(folder.rglob("*.py"))]


def library_files(root: Path = ROOT) -> list[Path]:
    """Return the files of the library, without those of its testing kit and its tests."""
    files = python_files(["timm_parallel"], root)
    return [path for path in files if not {"tests", "testing"} & {*path.relative_to(root).parts}]


def package_of(file: str) -> str:
    """Return the package that a file belongs to, such as `timm_parallel.launch` for
    `timm_parallel/launch/job.py`, and `project.models` for `project/models/build.py`.
    """
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:3] if parts[1:2] == ("lab",) else parts[:2] if parts[1:] else ())


@cache
def imports(
    project: tuple[str, ...] = (), root: Path = ROOT, for_types: bool = False
) -> dict[str, set[str]]:
    """Return the import graph, as a dictionary from each source file to the set of source files
    that it imports. A public name of the library counts as an import of the module that defines it.
    `for_types` includes imports in `if TYPE_CHECKING` blocks, except in the lists of public names.
    """
    modules: dict[str, str] = {}
    for path in [*python_files(project, root), *library_files(root)]:
        relative = path.relative_to(root)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        modules[module] = relative.as_posix()
    # The packages import their public names when these are first used.
    for package, names in _public_modules(root).items():
        modules |= {f"{package}.{name}": modules[module] for name, module in names.items()}
    arrows: dict[str, set[str]] = {file: set() for file in modules.values()}
    for file in arrows:
        for named in names_in((root / file).read_text(encoding="utf-8")):
            is_left_out = named.for_types and (not for_types or file.endswith("__init__.py"))
            if is_left_out or not named.is_import:
                continue
            target = modules.get(named.name) or modules.get(named.name.rpartition(".")[0])
            if target is not None and target != file:
                arrows[file].add(target)
    return arrows


def imports_of_the_project(root: Path = ROOT) -> list[str]:
    """Return a line of text for each import of a module of the project, which is next to the
    library, in any file of the library, its testing kit and its tests.
    """
    modules = [path for path in root.iterdir() if path.is_dir() or path.suffix == ".py"]
    outside = {path.stem for path in modules} - {"timm_parallel"}
    return [
        f"{path.relative_to(root)}:{named.line} {named.name}"
        for path in python_files(["timm_parallel"], root)
        for named in names_in(path.read_text(encoding="utf-8"))
        if named.is_import and named.name.partition(".")[0] in outside
    ]


def find_cycle(
    project: tuple[str, ...] = (), root: Path = ROOT, for_types: bool = False
) -> list[str]:
    """Return the files of an import cycle, or the packages of a cycle between packages. Return an
    empty list if there is no cycle. `for_types` includes imports that only type checkers execute.
    """
    arrows = imports(project, root, for_types)
    packages: dict[str, set[str]] = {}
    for file, targets in arrows.items():
        others = {package_of(target) for target in targets} - {package_of(file)}
        packages.setdefault(package_of(file), set()).update(others)
    return _cycle(arrows) or _cycle(packages)


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def public_names(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the public names, as a dictionary from the packages timm_parallel and
    timm_parallel.lab to a set of names.
    """
    return {package: set(names) for package, names in _public_modules(root).items()}


def _public_modules(root: Path) -> dict[str, dict[str, str]]:
    """Return the module that defines each public name: {package: {name: module}}."""
    public = {}
    for package in ("timm_parallel", "timm_parallel.lab"):
        stub = root.joinpath(*package.split("."), "__init__.pyi").read_text(encoding="utf-8")
        public[package] = {
            name: module for module, name in re.findall(r"from (\S+) import (\w+) as", stub)
        }
    return public


def private_names(files: list[Path], root: Path = ROOT) -> list[str]:
    """Return a line of text for each use of a name of the library in `files` that is not public."""
    public = {
        f"{package}.{name}" for package, names in public_names(root).items() for name in names
    }
    allowed = public | set(public_names(root))
    return [
        f"{path.relative_to(root)}:{named.line} {named.name}"
        for path in files
        for named in names_in(path.read_text(encoding="utf-8"))
        if re.match(r"timm_parallel\b", named.name) and named.name not in allowed
    ]
