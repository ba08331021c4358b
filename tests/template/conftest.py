"""Fixtures of the tests that train, fork or install the template. All test workers share what a
session fixture makes, so a test must copy it before changing it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from scripts.maintain.fork import build_wheel
from tests.template.repositories import git, make_template
from tests.template.runs import EXAMPLES, IMPORT_EXAMPLES, ROOT, TINY
from timm_parallel.testing.commands import Finished, Train

# A shared machine may be ten times slower than a quiet one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_run() -> tuple[str, ...]:
    return TINY


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: Path, caches: Path
) -> Finished:
    """Train one run, and return its exit code, output and run folder."""
    record = shared_folder / "finished_run.json"
    with FileLock(shared_folder / "finished_run.lock", timeout=300):
        if not record.exists():
            starter = Train(tmp_path_factory.mktemp("finished"), caches, ROOT, TINY)
            arguments = (
                "parallel=single",
                "optim.lr=3e-3",
                "data.limit_train=1256",
                "checkpoint.every_steps=25",
            )
            done = starter(*arguments)
            starter.close()
            assert done.returncode == 0, done.output
            record.write_text(json.dumps(asdict(done), default=str), encoding="utf-8")
    values = json.loads(record.read_text(encoding="utf-8"))
    return Finished(**{**values, "folder": Path(values["folder"])})


@pytest.fixture(scope="session")
def examples() -> Path:
    """Let this process import the files of examples/, and return their folder."""
    exec(IMPORT_EXAMPLES)
    return EXAMPLES


@pytest.fixture(scope="session")
def whole_template(shared_folder: Path) -> Path:
    """Return a git repository with the files of this working tree."""
    folder = shared_folder / "template"
    with FileLock(shared_folder / "template.lock", timeout=300):
        return folder if folder.exists() else make_template(folder)


@pytest.fixture(scope="session")
def wheel(shared_folder: Path, whole_template: Path) -> Path:
    """Return a wheel of the library, as `make fork` builds it."""
    with FileLock(shared_folder / "wheel.lock", timeout=300):
        copy = shared_folder / "copy_for_the_wheel"
        if not copy.exists():
            git(shared_folder, "clone", "-q", str(whole_template), copy.name)
            build_wheel(copy, git(copy, "rev-parse", "HEAD"))
        (built,) = (copy / "vendor").glob("*.whl")
        return built


@pytest.fixture(scope="session")
def environment(shared_folder: Path, wheel: Path) -> Path:
    """Return a virtual environment that has the packages of this test run, and the wheel."""
    folder = shared_folder / "environment"
    with FileLock(shared_folder / "environment.lock", timeout=300):
        if not folder.exists():
            command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
            subprocess.run(command, check=True)
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "of_this_test_run.pth").write_text(sysconfig.get_path("purelib"))
            (folder / "bin" / "ruff").symlink_to(Path(sys.executable).with_name("ruff"))
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, "--no-index", "--no-deps", str(wheel)], check=True)
            # To make, all requirements are installed.
            for stamp in ("runtime", "development"):
                (folder / stamp).touch()
                os.utime(folder / stamp, (2**32, 2**32))
    return folder
