"""The library works without the template: as a wheel, and its tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.template.repositories import NEEDS_GIT
from tests.template.runs import ROOT

pytestmark = [NEEDS_GIT, pytest.mark.processes]
SMALL_PROJECT = ROOT / "timm_parallel" / "tests" / "small_project"


def run_in(folder: Path, *command: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command without the variables of this test run. `codes`: expected exit codes."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name != "PYTHONPATH"
    }
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode in codes, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_wheel_contains_the_library_and_its_license_without_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (license_file,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        assert "Copyright (c)" in archive.read(license_file).decode()
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "timm_parallel").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected -= {name for name in expected if name.startswith("timm_parallel/tests/")}
    expected.remove("timm_parallel/pyproject.toml")
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.slow(seconds=15)
def test_installed_wheel_trains_a_project_outside_this_repository(
    environment: Path, tmp_path: Path
) -> None:
    project = shutil.copytree(SMALL_PROJECT, tmp_path / "project")
    python = str(environment / "bin" / "python")
    library = run_in(project, python, "-c", "import timm_parallel; print(timm_parallel.__file__)")
    assert Path(library).is_relative_to(environment)
    overrides = ("parallel=ddp", "parallel.devices=2", "train.max_steps=2")
    run_in(project, python, "train.py", *overrides, f"hydra.run.dir={tmp_path / 'run'}")
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["world_size"], result["steps"]) == ("done", 2, 2)


@pytest.mark.nightly
@pytest.mark.slow(seconds=120)
def test_tests_of_the_library_pass_without_the_template(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "timm_parallel", tmp_path / "timm_parallel")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    options = ("-p", "timm_parallel.testing.fixtures", "-n0", "-m", "not slow and not nightly")
    output = run_in(tmp_path, sys.executable, "-m", "pytest", *options, "timm_parallel/tests")
    assert " passed" in output and " failed" not in output
