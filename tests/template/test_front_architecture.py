"""Import rules of the template's own code, which a fork may change, and of all code together."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from timm_parallel.tests.test_architecture import (
    ALLOWED,
    ROOT,
    broken_rules_of,
    find_cycle,
    private_names,
    public_names,
    python_files,
)

PROJECT = ("train.py", "evaluate.py", "src")
MAY_IMPORT = {
    **ALLOWED,
    r"torch\.distributed": ("scripts/maintain/bench_rounds.py",),
    r"timm": (
        *("src/models/", "src/data/", "src/train/", "src/tasks/", "src/commands/"),
        "scripts/maintain/",
    ),
}
NO_TORCH = (
    *("train.py", "evaluate.py", "src/app.py", "src/schema.py"),
    *("src/data/__init__.py", "src/train/__init__.py"),
)


def test_source_files_outside_the_library_follow_import_and_naming_rules() -> None:
    files = python_files([*PROJECT, "scripts"])
    assert [line for path in files for line in broken_rules_of(path, MAY_IMPORT, NO_TORCH)] == []


def test_source_code_has_no_import_cycle_between_files_or_packages() -> None:
    assert find_cycle(PROJECT) == []
    assert find_cycle(PROJECT, for_types=True) == []


def test_user_code_imports_only_public_names_of_the_library() -> None:
    commands = [path for path in python_files(["scripts"]) if "maintain" not in path.parts]
    assert private_names([*python_files(PROJECT), *commands]) == []


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
