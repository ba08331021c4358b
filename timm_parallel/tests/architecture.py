"""Structure of the code: python timm_parallel/tests/architecture.py

Read import statements and print a table, whose limits are in test_architecture.py. No project code
is run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "methods that a strategy may override": 13,
    "import levels inside any package": 5,
    "public names of the library": 60,
    "public names of its lab": 15,
    "imports past the public names": 0,
    "files of the library that import src": 0,
    "files of the rest of the library that import its lab": 0,
}


@dataclass(frozen=True)
class Named:
    """Dotted name that a file imports, or uses as an attribute of an imported name."""

    name: str
    line: int
    in_function: bool
    for_types: bool  # below `if TYPE_CHECKING:`
    is_import: bool


def names_in(source: str) -> Iterator[Named]:
    """Yield every name that a file imports, and every dotted use such as
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


def source_files(root: Path = ROOT) -> list[Path]:
    """Return the entry points, the files of src/ and those of the library without its tests."""
    return [
        root / "train.py",
        root / "evaluate.py",
        *sorted((root / "src").rglob("*.py")),
        *_library(root),
    ]


def _library(root: Path) -> list[Path]:
    files = sorted((root / "timm_parallel").rglob("*.py"))
    return [path for path in files if not {"tests", "testing"} & {*path.relative_to(root).parts}]


def package_of(file: str) -> str:
    """Return the package of a file: `timm_parallel/launch/job.py` -> `timm_parallel.launch`,
    `src/models/build.py` -> `models`.
    """
    parts = Path(file).with_suffix("").parts
    if len(parts) == 1:
        return ""
    if parts[0] == "src":
        return parts[1]
    return ".".join(parts[:3] if parts[1] == "lab" else parts[:2])


@cache
def imports(root: Path = ROOT, for_types: bool = False) -> dict[str, set[str]]:
    """Return the files that each file imports. `for_types`: also in `if TYPE_CHECKING` blocks,
    except in the lists of public names.
    """
    modules: dict[str, str] = {}
    for path in source_files(root):
        relative = path.relative_to(root)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        modules[module] = relative.as_posix()
    arrows: dict[str, set[str]] = {file: set() for file in modules.values()}
    for file in modules.values():
        for named in names_in((root / file).read_text(encoding="utf-8")):
            is_left_out = named.for_types and (not for_types or file.endswith("__init__.py"))
            if is_left_out or not named.is_import:
                continue
            target = modules.get(named.name) or modules.get(named.name.rpartition(".")[0])
            if target is not None and target != file:
                arrows[file].add(target)
    return arrows


def import_levels(root: Path = ROOT) -> dict[str, int]:
    """Return the depth of imports between files of each package: 1 if no file imports another."""
    arrows = imports(root)
    packages: dict[str, set[str]] = {}
    for file in arrows:
        if not file.endswith("__init__.py"):
            packages.setdefault(package_of(file), set()).add(file)

    def depth(file: str, package: set[str]) -> int:
        return 1 + max((depth(other, package) for other in arrows[file] & package), default=0)

    return {name: max(depth(file, files) for file in files) for name, files in packages.items()}


def library_imports(of: str, root: Path = ROOT) -> list[str]:
    """Return the files of the library, without its lab, that import names of the package `of`."""
    files = [path for path in _library(root) if "lab" not in path.relative_to(root).parts]
    return [
        path.relative_to(root).as_posix()
        for path in files
        if any(
            named.is_import and re.match(rf"{re.escape(of)}\b", named.name)
            for named in names_in(path.read_text(encoding="utf-8"))
        )
    ]


def find_cycle(root: Path = ROOT, for_types: bool = False) -> list[str]:
    """Return the files of an import cycle or of a cycle between packages, or an empty result if
    there is no cycle. `for_types`: count imports for types too.
    """
    arrows = imports(root, for_types)
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


def long_functions(file: str, source: str, limit: int = 46) -> list[str]:
    """Return the functions of more than `limit` statements."""
    functions = (
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = (
        (node, sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1) for node in functions
    )
    return [
        f"{file}:{node.lineno} {node.name} has {size} statements"
        for node, size in sizes
        if size > limit
    ]


def strategy_methods(root: Path = ROOT) -> list[str]:
    """Return the methods of the strategy base class that a subclass may override."""
    tree = ast.parse((root / "timm_parallel/parallel/strategy.py").read_text(encoding="utf-8"))
    base = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Strategy"
    )
    names = [node.name for node in base.body if isinstance(node, ast.FunctionDef)]
    return [
        name
        for name in names
        if name not in ("__init__", "is_first", "measured_world_size", "close")
    ]


def public_names(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the names that the library and its lab list as public, by package."""
    public = {}
    for package in ("timm_parallel", "timm_parallel.lab"):
        path = root.joinpath(*package.split("."), "__init__.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (groups,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_GROUPS"
        )
        named = ast.literal_eval(groups)
        public[package] = {name for group in named.values() for name in group}
    return public


def past_the_interface(root: Path = ROOT) -> list[str]:
    """Return what src/, the scripts and the entry points import or use of the library besides its
    public names.
    """
    public = {
        f"{package}.{name}" for package, names in public_names(root).items() for name in names
    }
    allowed = public | set(public_names(root))
    scripts = sorted((root / "scripts").glob("*.py"))
    outside = [path for path in source_files(root) if "timm_parallel" not in path.parts]
    return [
        f"{path.relative_to(root)}:{named.line} {named.name}"
        for path in (*outside, *scripts)
        for named in names_in(path.read_text(encoding="utf-8"))
        if re.match(r"timm_parallel\b", named.name)
        and named.name not in allowed
        # What scripts/schema.py writes docs/api.md from.
        and named.name.rpartition(".")[2] != "_GROUPS"
    ]


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return the measured value of every entry of LIMITS."""
    library, lab = public_names(root).values()
    values = (
        len(strategy_methods(root)),
        max(import_levels(root).values()),
        len(library),
        len(lab),
        len(past_the_interface(root)),
        len(library_imports("src", root)),
        len(library_imports("timm_parallel.lab", root)),
    )
    return dict(zip(LIMITS, values, strict=True))


def main() -> int:
    """Print the table and return 1 if a limit is exceeded."""
    measured = measure()
    for name, value in measured.items():
        print(
            f"{name:70s} {value:7,}  limit "
            f"{LIMITS[name]:7,}{'' if value <= LIMITS[name] else '  EXCEEDED'}"
        )
    print(
        "import levels:",
        ", ".join(f"{name or 'entry points'} {levels}" for name, levels in import_levels().items()),
    )
    print("import cycle:", " > ".join(find_cycle()) or "none")
    print("import cycle with types:", " > ".join(find_cycle(for_types=True)) or "none")
    return int(any(value > LIMITS[name] for name, value in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
