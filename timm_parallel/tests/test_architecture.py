"""Import rules of the library, which are read in the source files. No code is imported.
tests/template/test_front_architecture.py has those of the template's own code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

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


SOURCES = library_files()

# Pattern of names -> files that may import them. A name that ends with a slash is a folder.
ALLOWED = {
    r"(hydra|omegaconf)": (
        "timm_parallel/checked_configs.py",
        "timm_parallel/entry.py",
        "timm_parallel/config/",
        "timm_parallel/patches.py",
        "timm_parallel/launch/resume.py",
        "timm_parallel/lab/sweep/",
        "timm_parallel/lab/search/",
    ),
    r"torch\.distributed": (
        "timm_parallel/parallel/",
        "timm_parallel/launch/",
        "timm_parallel/machine/ranks.py",
    ),
    r"(.*\.)?(DataParallel|DistributedDataParallel)": ("timm_parallel/parallel/",),
    r"timm": (
        "timm_parallel/data/on_device.py",
        "timm_parallel/data/timm_datasets.py",
        "timm_parallel/model/",
        "timm_parallel/parallel/fully_sharded.py",
        "timm_parallel/parallel/networks.py",
        "timm_parallel/patches.py",
        "timm_parallel/lab/doctor.py",
    ),
}
# Files that may import torch only inside functions. Commands such as --help import these files and
# must start quickly without torch.
NO_TORCH_AT_THE_TOP = (
    "timm_parallel/patches.py",
    "timm_parallel/app.py",
    "timm_parallel/entry.py",
    "timm_parallel/data/csv_listing.py",
    "timm_parallel/data/folder.py",
    "timm_parallel/data/file_list.py",
    "timm_parallel/errors.py",
    "timm_parallel/keys.py",
    "timm_parallel/metric.py",
    "timm_parallel/lab/analysis/",
    "timm_parallel/config/",
    "timm_parallel/data/dataset.py",
    "timm_parallel/lab/doctor.py",
    "timm_parallel/faults/",
    "timm_parallel/lab/jobs/",
    "timm_parallel/launch/",
    "timm_parallel/machine/",
    "timm_parallel/record/environment.py",
    "timm_parallel/record/result.py",
    "timm_parallel/lab/report/",
    "timm_parallel/lab/search/",
    "timm_parallel/lab/sweep/",
    "timm_parallel/lab/verdict/",
    "timm_parallel/trackers/",
)
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "base", "extras"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(
        file == place or (place.endswith("/") and file.startswith(place)) for place in places
    )


def broken_rules(
    file: str,
    source: str,
    allowed: Mapping[str, tuple[str, ...]] = ALLOWED,
    no_torch_at_the_top: tuple[str, ...] = NO_TORCH_AT_THE_TOP,
) -> list[str]:
    """Return a message for each import or name in a source file that breaks a rule."""
    problems = []
    for named in names_in(source):
        at = f"{file}:{named.line}"
        if named.is_import and named.name.startswith("."):
            problems.append(f"{at} imports {named.name}: give the full name")
        is_below_the_lab = is_in(file, ("timm_parallel/",)) and not is_in(
            file, ("timm_parallel/lab/",)
        )
        if re.match(r"timm_parallel\.lab\b", named.name) and is_below_the_lab:
            problems.append(f"{at} the library imports the lab: {named.name}")
        if named.for_types:
            continue
        for library, places in allowed.items():
            if re.fullmatch(rf"{library}(\..*)?", named.name) and not is_in(file, places):
                problems.append(f"{at} {named.name} belongs in {', '.join(places)}")
        is_heavy = re.match(r"(torch|torchvision|timm)\b", named.name)
        if (
            is_heavy
            and named.is_import
            and not named.in_function
            and is_in(file, no_torch_at_the_top)
        ):
            problems.append(f"{at} imports {named.name} at the top")
    return problems


def broken_rules_of(
    path: Path,
    allowed: Mapping[str, tuple[str, ...]] = ALLOWED,
    no_torch_at_the_top: tuple[str, ...] = NO_TORCH_AT_THE_TOP,
) -> list[str]:
    """Return a message for each import and name in a file that breaks a rule."""
    file, source = name_of(path), path.read_text(encoding="utf-8")
    vague = VAGUE_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}
    names = [f"{file}: the name {name} does not describe the contents" for name in vague]
    return names + broken_rules(file, source, allowed, no_torch_at_the_top)


def test_source_files_follow_import_and_naming_rules() -> None:
    assert [line for path in SOURCES for line in broken_rules_of(path)] == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("launch/job.py", "from timm_parallel.lab import sweep", "the library imports the lab"),
        ("data/loader.py", "from ..models import build_model", "give the full name"),
        ("lab/report/report.py", "from hydra.core import plugins", "plugins belongs in"),
        ("data/loader.py", "import torch\ntorch.distributed.barrier()", "barrier belongs in"),
        ("data/loader.py", "import torch\nm = torch.nn.DataParallel(m)", "Parallel belongs in"),
        ("lab/report/tables.py", "import torch", "imports torch at the top"),
        ("keys.py", "from timm import x", "imports timm.x at the top"),
    ],
)
def test_architecture_check_reports_forbidden_imports(
    file: str, source: str, complaint: str
) -> None:
    assert any(complaint in line for line in broken_rules(f"timm_parallel/{file}", source))


def test_library_with_its_testing_kit_and_tests_imports_nothing_of_the_project() -> None:
    assert imports_of_the_project() == []


def test_architecture_check_reports_an_import_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "train.py").touch()
    sources = {
        "launch": "import src.train.optim",
        "testing": "def f():\n    from src.train import run",
        "tests/small": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import train",
    }
    for folder, source in sources.items():
        path = tmp_path / "timm_parallel" / folder / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
    assert len(imports_of_the_project(tmp_path)) == len(sources)


def test_small_project_uses_only_public_names_of_the_library() -> None:
    files = python_files(["timm_parallel/tests/small_project"])
    assert len(files) > 1
    assert private_names(files) == []


# Terms of the template's tasks, which the library must not know.
WORDS_OF_TASKS = re.compile(r"\b(multilabel|class_names|num_classes|acc)\b")


def test_library_code_contains_no_terms_of_a_specific_task_such_as_classification() -> None:
    found = {
        f"{name_of(path)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if WORDS_OF_TASKS.search(line)
    }
    assert found == set()
