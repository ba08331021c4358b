"""Tests of the import rules of the library. tests/template/test_front_architecture.py tests the
import rules of src/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from timm_parallel.tests.architecture import ROOT, names_in, private_names

SOURCES = sorted(
    path
    for path in (ROOT / "timm_parallel").rglob("*.py")
    if not {"tests", "testing"} & {*path.parts}
)

# Dictionary from a pattern of library names to the files that may import the library. A name that
# ends with a slash is a folder.
ALLOWED = {
    r"(hydra|omegaconf)": (
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
        "timm_parallel/lab/doctor/probe.py",
        "scripts/maintain/bench_rounds.py",
    ),
    r"(.*\.)?(DataParallel|DistributedDataParallel)": ("timm_parallel/parallel/",),
    r"timm": (
        "src/models/",
        "src/data/",
        "src/train/",
        "src/tasks/",
        "src/commands/",
        "timm_parallel/data/erasing.py",
        "timm_parallel/data/mixing.py",
        "timm_parallel/data/timm_datasets.py",
        "timm_parallel/model/",
        "timm_parallel/parallel/blocks.py",
        "timm_parallel/patches.py",
        "timm_parallel/lab/doctor/probe.py",
        "scripts/maintain/",
    ),
}
# Files that may import torch only inside functions. Commands such as --help import these files and
# must start quickly without torch.
NO_TORCH_AT_THE_TOP = (
    "timm_parallel/patches.py",
    "train.py",
    "evaluate.py",
    "src/app.py",
    "src/schema.py",
    "timm_parallel/app.py",
    "timm_parallel/entry.py",
    "src/data/__init__.py",
    "timm_parallel/data/csv_listing.py",
    "timm_parallel/data/folder.py",
    "timm_parallel/data/tar_index.py",
    "timm_parallel/data/fractions.py",
    "src/train/__init__.py",
    "timm_parallel/errors.py",
    "timm_parallel/keys.py",
    "timm_parallel/metric.py",
    "timm_parallel/lab/analysis/",
    "timm_parallel/config/",
    "timm_parallel/data/dataset.py",
    "timm_parallel/machine/seeds.py",
    "timm_parallel/lab/doctor/",
    "timm_parallel/faults/",
    "timm_parallel/lab/jobs/",
    "timm_parallel/launch/",
    "timm_parallel/machine/",
    "timm_parallel/record/environment.py",
    "timm_parallel/record/jobs.py",
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


def broken_rules(file: str, source: str) -> list[str]:
    """Return a message for each import or name in a source file that breaks a rule."""
    problems = []
    for named in names_in(source):
        at = f"{file}:{named.line}"
        if named.is_import and named.name.startswith("."):
            problems.append(f"{at} imports {named.name}: give the full name")
        # The library must not import src/, not even for type checkers, because another project has
        # other files there.
        is_library = file.startswith("timm_parallel/")
        if is_library and re.match(r"src\b", named.name):
            problems.append(f"{at} the library imports {named.name}")
        is_lab = file.startswith("timm_parallel/lab/")
        if is_library and not is_lab and re.match(r"timm_parallel\.lab\b", named.name):
            problems.append(f"{at} the library imports the lab: {named.name}")
        if named.for_types:
            continue
        for library, places in ALLOWED.items():
            if re.fullmatch(rf"{library}(\..*)?", named.name) and not is_in(file, places):
                problems.append(f"{at} {named.name} belongs in {', '.join(places)}")
        is_heavy = re.match(r"(torch|torchvision|timm)\b", named.name)
        if (
            is_heavy
            and named.is_import
            and not named.in_function
            and is_in(file, NO_TORCH_AT_THE_TOP)
        ):
            problems.append(f"{at} imports {named.name} at the top")
    return problems


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_source_file_follows_import_and_naming_rules(path: Path) -> None:
    file, source = name_of(path), path.read_text(encoding="utf-8")
    assert broken_rules(file, source) == []
    assert not VAGUE_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}, (
        "names must describe the contents"
    )


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        (
            "timm_parallel/launch/job.py",
            "def f():\n    from src.train import run",
            "the library imports src.train.run",
        ),
        (
            "timm_parallel/data/loader.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from src.schema import Config",  # noqa: E501
            "the library imports src.schema.Config",
        ),
        (
            "timm_parallel/launch/job.py",
            "from timm_parallel.lab import sweep",
            "the library imports the lab: timm_parallel.lab.sweep",
        ),
        ("timm_parallel/data/loader.py", "from ..models import build_model", "give the full name"),
        (
            "timm_parallel/lab/report/report.py",
            "from hydra.core import plugins",
            "hydra.core.plugins belongs in",
        ),
        (
            "src/train/run.py",
            "import torch\ntorch.distributed.barrier()",
            "torch.distributed.barrier belongs in",
        ),
        ("timm_parallel/lab/report/tables.py", "import torch", "imports torch at the top"),
        ("train.py", "from timm import create_model", "imports timm.create_model at the top"),
    ],
)
def test_architecture_check_reports_forbidden_imports(
    file: str, source: str, complaint: str
) -> None:
    assert any(complaint in line for line in broken_rules(file, source))


def test_small_project_uses_only_public_names_of_the_library_and_nothing_of_src() -> None:
    files = sorted((ROOT / "timm_parallel/tests/small_project").rglob("*.py"))
    assert len(files) > 1
    assert private_names(files) == []
    names = [named.name for path in files for named in names_in(path.read_text(encoding="utf-8"))]
    assert [name for name in names if re.match(r"src\b", name)] == []


# Terms of the tasks in src/tasks/, which the library must not know.
WORDS_OF_TASKS = re.compile(r"\b(multilabel|class_names|num_classes|acc)\b")


def test_library_code_contains_no_terms_of_a_specific_task_such_as_classification() -> None:
    found = {
        f"{name_of(path)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if WORDS_OF_TASKS.search(line)
    }
    assert found == set()
