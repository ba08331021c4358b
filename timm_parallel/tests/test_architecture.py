"""Tests of the import rules of the library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from timm_parallel.tests.architecture import (
    ROOT,
    imports_of_the_project,
    library_files,
    names_in,
    private_names,
    python_files,
)

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
    "timm_parallel/data/tar_index.py",
    "timm_parallel/data/file_list.py",
    "timm_parallel/errors.py",
    "timm_parallel/keys.py",
    "timm_parallel/metric.py",
    "timm_parallel/lab/analysis/",
    "timm_parallel/config/",
    "timm_parallel/data/dataset.py",
    "timm_parallel/machine/seeds.py",
    "timm_parallel/lab/doctor.py",
    "timm_parallel/faults/",
    "timm_parallel/lab/jobs/",
    "timm_parallel/launch/",
    "timm_parallel/machine/",
    "timm_parallel/record/environment.py",
    "timm_parallel/record/result.py",
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
