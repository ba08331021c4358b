"""`make` lists its targets, and installs only the requirements of a target, once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, folder: Path = ROOT) -> str:
    # Remove variables of a make command that runs these tests, such as `make test VENV=… ARGS=…`.
    given = re.compile("MAKE.*|MFLAGS|ARGS|VENV|PYTHON|BIN")
    environment = {name: value for name, value in os.environ.items() if not given.fullmatch(name)}
    done = subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def makefiles() -> str:
    """Return the text of the Makefile and of the targets of the template."""
    files = [ROOT / "Makefile", *(ROOT / "scripts").glob("*/targets.mk")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that make reads to a folder without a virtual environment."""
    for name in ("Makefile", "requirements.txt", "requirements.lock", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def touch(path: Path, time: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time, time))


def make_stamps(checkout: Path, *names: str) -> None:
    """Create a .venv in the folder with stamp files that are newer than the requirements."""
    for name in ("requirements.txt", "requirements.lock", "requirements-dev.txt", "Makefile"):
        touch(checkout / name, 1_000_000)
    touch(checkout / ".venv" / "bin" / "python", 1_000_000)
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    for age, name in enumerate(names):
        touch(checkout / ".venv" / name, 2_000_000 + age)


def test_make_without_a_target_prints_help_with_every_target_on_one_line() -> None:
    targets = set(TARGET.findall(makefiles()))
    assert {"help", "train", "compare", "test", "test-fast", "check"} <= targets
    # A file with the name of a target would disable a target that is not phony.
    phony = re.findall(r"^\.PHONY: (.*)$", makefiles(), re.MULTILINE)
    assert set(" ".join(phony).split()) == targets
    assert make() == make("help")
    lines = make("help").splitlines()
    listed = [re.fullmatch(r"  make ([a-z-]+) +(\S.*)", line) for line in lines]
    assert all(listed), lines
    assert sorted(match.group(1) for match in listed if match) == sorted(targets)


@pytest.mark.parametrize(
    ("target", "files"),
    [
        ("train", ["requirements.lock"]),
        ("install", ["requirements.lock"]),
        ("test", ["requirements.lock", "requirements-dev.txt"]),
    ],
)
def test_make_target_installs_only_its_requirements_unless_they_are_installed(
    checkout: Path, target: str, files: list[str]
) -> None:
    commands = make("-n", target, folder=checkout)
    assert re.findall(r"install\.py (\S+)", commands) == files
    assert "python3 -m venv .venv" in commands
    # Installing runs no code of the project.
    assert target != "install" or set(re.findall(r"(\w+)\.py\b", commands)) == {"install"}
    make_stamps(checkout, *("runtime", "development")[: len(files)])
    commands = make("-n", target, folder=checkout)
    assert "install" not in commands
    assert "venv " not in commands
    assert len(commands.splitlines()) == 1


def test_make_train_uses_make_variables_from_the_command_line(
    checkout: Path,
) -> None:
    commands = make(
        "-n", "train", "PYTHON=python3.12", "VENV=/elsewhere/env", "ARGS=seed=3", folder=checkout
    )
    assert "python3.12 -m venv /elsewhere/env" in commands
    assert commands.strip().splitlines()[-1].strip() == "/elsewhere/env/bin/python train.py seed=3"
    assert ".venv" not in commands
    assert make("-n", "doctor", "quick=true").rstrip().endswith("scripts/doctor.py quick=true")


def test_make_installs_a_requirements_file_again_when_the_file_has_changed(checkout: Path) -> None:
    for name in ("requirements.txt", "requirements.lock"):
        make_stamps(checkout, "runtime", "development")
        touch(checkout / name, 3_000_000)
        assert "install.py requirements.lock" in make("-n", "train", folder=checkout)
    make_stamps(checkout, "runtime", "development")
    touch(checkout / "requirements-dev.txt", 3_000_000)
    assert "install" not in make("-n", "train", folder=checkout)
    assert "install.py requirements-dev.txt" in make("-n", "test", folder=checkout)


def test_make_lock_runs_when_runtime_requirements_are_not_installed(checkout: Path) -> None:
    touch(checkout / ".venv" / "bin" / "python", 1_000_000)
    commands = make("-n", "lock", folder=checkout)
    assert "install.py" not in commands and "uv==" in commands and "uv pip compile" in commands


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_requirements_files_pin_every_package_to_an_exact_version(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pins = [line for line in lines if line and line != "-r requirements.txt"]
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+]+", pin)] == []


def test_ci_script_calls_make_lint_make_test_and_only_existing_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!")
    assert "make lint" in text
    assert re.search(r"^make test", text, re.MULTILINE)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=300)
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        make("-n", target)
