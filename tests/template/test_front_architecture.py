"""Import rules of the template's own code, which a fork may change, and limits on the structure of
all code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from timm_parallel.tests.architecture import (
    LIMITS,
    ROOT,
    find_cycle,
    imports,
    measure,
    package_of,
    source_files,
)
from timm_parallel.tests.test_architecture import VAGUE_NAMES, broken_rules, name_of

# A fork adds code of its own, so these rules are the template's.
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


@pytest.mark.parametrize("name", LIMITS)
def test_import_levels_and_strategy_methods_stay_within_their_limits(name: str) -> None:
    assert measure()[name] <= LIMITS[name]


def test_source_code_has_no_import_cycle_between_files_or_packages() -> None:
    assert find_cycle() == []


def test_user_code_imports_only_the_permitted_library_packages() -> None:
    allowed = {
        "data",
        "parallel",
        "runtime",
        "faults",
        "machine",
        "record",
        "config",
        "errors",
        "class_source",
        "patches",
        "lab.forecast",
        "keys",
        "app",
        "main",
        "metric",
        "task",
        "trackers",
    }
    wrong = [
        f"{file} imports {target}"
        for file, targets in imports().items()
        if file.startswith("src/") and not file.endswith("__main__.py")
        for target in targets
        if package_of(target).startswith("timm_parallel.")
        and package_of(target).removeprefix("timm_parallel.") not in allowed
    ]
    assert wrong == []
