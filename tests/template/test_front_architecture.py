"""Import rules of the template's own code, which a fork may change, and of all code together."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from timm_parallel.tests.architecture import (
    ROOT,
    find_cycle,
    library_imports,
    past_the_interface,
    public_names,
    source_files,
)
from timm_parallel.tests.test_architecture import VAGUE_NAMES, broken_rules, name_of

# Files outside the library. The rules for them apply only to the template, because a fork adds its
# own code.
SOURCES = [
    path
    for path in (*source_files(), *sorted((ROOT / "scripts").rglob("*.py")))
    if not name_of(path).startswith("timm_parallel/")
]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_source_file_outside_the_library_follows_import_and_naming_rules(path: Path) -> None:
    assert broken_rules(name_of(path), path.read_text(encoding="utf-8")) == []
    assert not VAGUE_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}, (
        "names must describe the contents"
    )


@pytest.mark.parametrize("package", ["src", "timm_parallel.lab"])
def test_library_imports_neither_the_project_nor_its_lab(package: str) -> None:
    assert not library_imports(package)


def test_source_code_has_no_import_cycle_between_files_or_packages() -> None:
    assert find_cycle() == []
    assert find_cycle(for_types=True) == []


def test_user_code_imports_only_public_names_of_the_library() -> None:
    assert past_the_interface() == []


@pytest.mark.parametrize("package", public_names())
def test_public_names_exist_and_have_docstrings(package: str) -> None:
    module = import_module(package)
    assert sorted(public_names()[package]) == module.__all__ == dir(module)
    for name in module.__all__:
        value = getattr(module, name)
        assert inspect.isclass(value) or inspect.isfunction(value), name
        assert inspect.getdoc(value), name


def test_importing_the_library_imports_neither_torch_nor_timm() -> None:
    code = "import sys, timm_parallel.lab; from timm_parallel import App, Metric, key, main; "
    code += "sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
