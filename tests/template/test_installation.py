"""`make` lists its targets, and installs only the requirements of a target, once. Requirements are
pinned, and container files have the documented properties. No image is built.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from pages import read

from scripts.install import out_of_step
from scripts.maintain import gpu_check, gpu_rows
from scripts.maintain.gpu_check import NOT_SEEN, PARTS
from scripts.maintain.gpu_rows import Done, Part, Row
from tests.template.runs import ROOT, run_python
from timm_parallel.config.compose import compose_command
from timm_parallel.machine import hardware
from timm_parallel.testing.configs import parse

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
    return "\n".join(map(read, files))


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
    lines = [line.partition("#")[0].strip() for line in read(name).splitlines()]
    pins = [line for line in lines if line and line != "-r requirements.txt"]
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+]+", pin)] == []


def test_ci_script_calls_make_lint_make_test_and_only_existing_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = read(script)
    assert text.startswith("#!")
    assert "make lint" in text
    assert re.search(r"^make test", text, re.MULTILINE)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=300)
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        make("-n", target)


LOCK, PINS = read("requirements.lock"), read("requirements.txt")


def test_requirements_lock_matches_requirements_txt() -> None:
    assert out_of_step(PINS, LOCK) == [], "run make lock"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"^timm==.*$", "timm==0.0.1"),
        (r"\Z", "einops==0.8.0\n"),
        (r"\Z", "einops[extra]>=0.8  # why\n"),
        (r"^rich==", "richer=="),
    ],
)
def test_lock_check_detects_a_changed_added_or_renamed_requirement(old: str, new: str) -> None:
    changed = re.sub(old, new, PINS, count=1, flags=re.MULTILINE)
    assert changed != PINS
    assert len(out_of_step(changed, LOCK)) == 1


def test_requirements_lock_has_hashes_of_every_package_and_no_path_or_url() -> None:
    pin, digest = re.compile(r"([\w.-]+)==\d"), re.compile(r"    --hash=sha256:[0-9a-f]{64}\b")
    lines = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
    for line, following in pairwise([*lines, ""]):
        assert digest.match(line) or (pin.match(line) and digest.match(following)), line
    packages = {found[1] for found in map(pin.match, lines) if found}
    assert {"antlr4-python3-runtime", "sympy", "pillow", "sqlalchemy", "setuptools"} <= packages
    places = r"https?://|file:|--(extra-)?index-url|--find-links|/(opt|home|root|tmp)/"
    assert not re.search(places, LOCK)


@pytest.mark.processes
def test_make_gpu_check_prints_one_line_when_no_gpu_is_visible() -> None:
    if hardware.visible_cuda_devices():
        pytest.skip("a GPU is visible")
    done = run_python("scripts/maintain/gpu_check.py")
    assert (done.returncode, done.stdout) == (
        0,
        NOT_SEEN.format("no CUDA device is visible here") + "\n",
    ), done.stderr


@pytest.mark.processes
def test_every_test_that_gpu_check_names_exists_and_is_marked_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str] = []

    def record(words: list[str], seconds: float) -> Done:
        named.extend(word for word in words if "test_" in word)
        return Done(0, "")

    monkeypatch.setattr(gpu_rows, "python", record)
    for part in PARTS:
        if part.run.__qualname__.startswith("tests."):
            part.run(1)
    assert len(named) > 8
    done = run_python("-m", "pytest", "--collect-only", "-n", "0", "-m", "gpu", *named)
    assert done.returncode == 0, done.stdout
    listed = done.stdout.splitlines()
    assert [name for name in named if not any(line.startswith(name) for line in listed)] == []


def test_make_gpu_check_continues_after_a_check_fails_or_times_out() -> None:
    def breaks(seconds: float) -> list[Row]:
        raise RuntimeError("no\ndriver")

    def sees(seconds: float) -> list[Row]:
        return [Row("seen", f"{seconds:.0f}")]

    def hangs(seconds: float) -> list[Row]:
        subprocess.run(["sleep", "100"], timeout=0.2, check=False)
        return []

    expected = {
        "one": [Row("one", "broke: RuntimeError: no driver", True, is_run=False)],
        "two": [Row("two", "not within 8 s", True, is_run=False)],
        "three": [Row("seen", "7")],
    }
    parts = [Part("one", 9, breaks), Part("two", 8, hangs), Part("three", 7, sees)]
    assert gpu_check.check(parts) == expected
    assert gpu_check.check([replace(part, alone=True) for part in parts]) == expected


DOCKERFILE = read("Dockerfile")
NOTEBOOK = ROOT / "notebooks" / "compare.ipynb"


def stages() -> dict[str, str]:
    """Return the text of the Dockerfile by build stage."""
    parts = re.split(r"(?m)^FROM \S+ AS (\w+)$", DOCKERFILE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_dockerfile_has_the_c_compiler_that_torch_compile_calls_on_a_gpu() -> None:
    [installed] = re.findall(
        r"(?m)^RUN apt-get update && apt-get install (.*?) && rm -rf /var/lib/apt/lists", DOCKERFILE
    )
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    assert installed in stages()["packages"]


def test_dockerfile_runs_as_non_root_user_without_ssh_server() -> None:
    for name in ("train", "jupyter"):
        assert re.search(r"(?m)^USER 1000$", stages()[name]), name
        assert stages()[name].index("USER 1000") < stages()[name].index("CMD")
    assert "sshd" not in DOCKERFILE


def test_compose_file_publishes_ports_on_loopback_only() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"].values()
    ports = [port for service in services for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "0.0.0.0" not in DOCKERFILE, (
        "expected loopback only when the image is started without compose"
    )


def test_dockerignore_excludes_secrets_data_and_outputs() -> None:
    ignored = {*read(".dockerignore").splitlines()}
    own = {"conf/local/default.yaml", "conf/local/slurm.sh"}
    assert {".git", ".venv", ".env", "outputs", "data", *own} <= ignored


def test_code_of_the_notebook_compiles_and_its_sweep_is_a_valid_command() -> None:
    cells = json.loads(read(NOTEBOOK))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lists = {
        ast.unparse(statement.targets[0]): statement.value
        for source in code
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
    }
    overrides = [word for name in ("STRATEGIES", "SHORT") for word in ast.literal_eval(lists[name])]
    assert compose_command(parse("-m", *overrides)).config.sweep.repeats == 2


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="needs requirements-notebook.txt",
)
def test_notebook_runs_and_shows_plots_and_the_report(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = [cell for cell in notebook["cells"] if "sweep.repeats=2" in cell["source"]]
    settings["source"] = (
        settings["source"]
        .replace("sweep.repeats=2", "sweep.repeats=1")
        # Leave out ddp, because jobs with one rank start faster: they are forked from a warm
        # server.
        .replace("parallel=single,dp,ddp", "parallel=single,dp")
    )
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    shown = json.dumps(notebook["cells"])
    assert "image/png" in shown, "expected plots of the curves"
    assert "text/markdown" in shown, "expected the report"
