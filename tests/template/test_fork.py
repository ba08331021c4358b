"""`make fork` makes a clone the user's project. Its own checks pass, its commands work, and its
library works without the template.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pages import code_of, read
from PIL import Image
from test_extend_pages import EXAMPLES

from scripts.install import out_of_step
from scripts.maintain.fork import KEPT_RECIPES, OLD_NAME, REMOVED, add_holder, main, web_address
from tests.template.repositories import NEEDS_GIT, git
from tests.template.runs import ROOT, files_below

pytestmark = NEEDS_GIT
URL = "https://example.org/owner/template"


@pytest.fixture
def clone(whole_template: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "-q", str(whole_template), "mine")
    return tmp_path / "mine"


@pytest.fixture
def fork_of(clone: Path, wheel: Path) -> Any:
    """Return a function that makes a fork of the clone, and returns its folder."""

    def make_fork(name: str, *options: str) -> Path:
        command = [name, "--holder=Ada Example", f"--wheel={wheel}", *options, f"--root={clone}"]
        assert main(command) == 0
        return clone

    return make_fork


def test_make_fork_names_the_project_and_links_to_the_pages_of_its_commit(
    fork_of: Any, clone: Path
) -> None:
    commit = git(clone, "rev-parse", "HEAD")
    fork_of("my_project", f"--from={URL}.git")
    readme = read(clone / "README.md")
    assert readme.startswith("# my_project\n") and len(readme.splitlines()) <= 30
    assert f"({URL}/tree/{commit}/docs/fork.md)" in readme
    assert "task_name: my_project" in read(clone / "conf" / "train.yaml")
    settings = tomllib.loads(read(clone / "pyproject.toml"))
    assert settings["project"]["name"] == "my_project"
    assert settings["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests"]
    assert json.loads(read(clone / ".template.json")) == {
        "options": [
            *("my_project", "--holder=Ada Example", f"--from={URL}", "--library=wheel"),
        ],
        "template_commit": commit,
    }
    named = {name for name, contents in files_below(clone).items() if OLD_NAME.encode() in contents}
    # The README tells on what the project is built.
    assert {name for name in named if not name.endswith(".whl")} == {"README.md", "Makefile"}
    assert git(clone, "status", "--porcelain", "--untracked-files=all").count("??") == 0


def test_license_keeps_all_holders_when_owners_are_added(fork_of: Any) -> None:
    text = read(ROOT / "LICENSE")
    added = ["Copyright (c) 2026 Ada & Söhne", r"Copyright (c) 2026 Acme \1 [AI]"]
    for line in added:
        text = add_holder(text, line.removeprefix("Copyright (c) 2026 "))
    lines = text.splitlines()
    assert lines[2:5] == ["Copyright (c) 2026 The maintainers", *added]
    assert [line for line in lines if line not in added] == read(ROOT / "LICENSE").splitlines()
    of_fork = read(fork_of("mine") / "LICENSE")
    assert of_fork == add_holder(read(ROOT / "LICENSE"), "Ada Example")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:owner/template.git", "https://github.com/owner/template"),
        ("ssh://git@github.com/owner/template", "https://github.com/owner/template"),
        (f"{URL}.git", URL),
        ("https://ada:token@example.org/owner/template", URL),
    ],
)
def test_remote_is_converted_to_the_address_of_its_web_page(remote: str, address: str) -> None:
    assert web_address(remote) == address


@pytest.mark.parametrize("name", ["", "My Project", "my-project", "1st", "class", "../x", "a/b"])
def test_make_fork_refuses_an_invalid_package_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q")
    assert main([name, f"--root={tmp_path}"]) == 2
    assert f"NAME={name}:" in capsys.readouterr().err


def test_make_fork_refuses_uncommitted_changes_a_second_fork_and_a_missing_url(
    clone: Path, fork_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal() -> str:
        assert main(["other", f"--root={clone}"]) == 2
        return capsys.readouterr().err

    (clone / "note").write_text("mine")
    assert re.match(r"fork: NAME=other: .*uncommitted", refusal())
    (clone / "note").unlink()
    git(clone, "remote", "remove", "origin")
    assert refusal().startswith("fork: FROM=: ")
    fork_of("mine", f"--from={URL}")
    git(clone, "commit", "-qm", "mine")
    assert re.match(r"fork: NAME=other: .*\.template\.json", refusal())


def test_make_fork_changes_nothing_when_the_wheel_cannot_be_built(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone / "timm_parallel" / "pyproject.toml").write_text('[project]\nversion = "1"\nwrong')
    git(clone, "commit", "-qam", "a mistake")
    before = files_below(clone)
    assert main(["mine", f"--root={clone}"]) == 2
    assert "LIBRARY=source" in capsys.readouterr().err
    assert files_below(clone) == before


def test_fork_has_the_library_as_a_wheel_and_no_file_that_only_the_template_needs(
    clone: Path, fork_of: Any, wheel: Path
) -> None:
    # A module that was compiled before.
    (clone / "timm_parallel" / "__pycache__").mkdir()
    (clone / "timm_parallel" / "__pycache__" / "app.pyc").touch()
    mine = fork_of("mine")
    assert (mine / "vendor" / wheel.name).read_bytes() == wheel.read_bytes()
    requirements, lock = read(mine / "requirements.txt"), read(mine / "requirements.lock")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"\n./vendor/{wheel.name}\n" in requirements
    assert f"\n./vendor/{wheel.name} \\\n    --hash=sha256:{digest}\n" in lock
    assert out_of_step(requirements, lock) == []
    assert out_of_step(requirements, lock.replace(wheel.name, "old.whl")) != []
    container = read(mine / "Dockerfile")
    assert container.index("COPY vendor vendor") < container.index("RUN pip install")
    assert [path for path in (*REMOVED, "docs", "timm_parallel") if (mine / path).exists()] == []
    assert {path.stem for path in (mine / "conf/experiment").iterdir()} == set(KEPT_RECIPES)
    tests = {path.name for path in (mine / "tests").iterdir()}
    assert tests == {"__init__.py", "conftest.py", "test_own_model.py", "test_own_loss.py"}
    assert {path.name for path in (mine / "scripts").glob("*.py")} == {
        path.name for path in (ROOT / "scripts").glob("*.py")
    }
    assert files_below(mine / "examples") == files_below(ROOT / "examples")


def test_fork_with_the_library_as_source_and_the_pages_has_their_files(
    fork_of: Any, wheel: Path, tmp_path: Path
) -> None:
    mine = fork_of("mine", "--library=source", "--docs")
    assert not (mine / "vendor").exists()
    assert "vendor" not in read(mine / "requirements.txt") + read(mine / "requirements.lock")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    assert files_below(mine / "timm_parallel") == files_below(tmp_path / "wheel" / "timm_parallel")
    assert files_below(mine / "docs") == files_below(ROOT / "docs")
    links = re.findall(r"\((docs[^)]*)\)", read(mine / "README.md"))
    assert len(links) == 2 and all((mine / link).exists() for link in links)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("given", [(), (f"--from={URL}",)], ids=["clone", "other remote"])
def test_commands_that_make_fork_prints_can_be_pasted(
    given: tuple[str, ...], fork_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = fork_of("mine", *given)
    lines = capsys.readouterr().out.splitlines()
    commands = [line.strip() for line in lines if line.startswith("  ")]
    remote = f"add template {URL}" if given else "rename origin template"
    assert commands[1:3] == [f"git remote {remote}", "make lint test"]
    git(mine, "config", "user.name", "Ada")
    git(mine, "config", "user.email", "ada@example.org")
    for command in commands:
        # make would install the requirements.
        dry = command.replace("make ", "make -n ")
        subprocess.run(dry, cwd=mine, shell=True, check=True, capture_output=True, timeout=300)
    assert git(mine, "status", "--porcelain") == ""
    assert "template" in git(mine, "remote").splitlines()
    helped = subprocess.run(["make", "help"], cwd=mine, capture_output=True, text=True, check=True)
    assert "make own-library" in helped.stdout and "make bench" not in helped.stdout


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


@pytest.mark.processes
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
    result = json.loads(read(tmp_path / "run" / "result.json"))
    assert (result["status"], result["world_size"], result["steps"]) == ("done", 2, 2)


@pytest.mark.nightly
@pytest.mark.slow(seconds=120)
def test_tests_of_the_library_pass_without_the_template(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "timm_parallel", tmp_path / "timm_parallel")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    options = ("-p", "timm_parallel.testing.fixtures", "-n0", "-m", "not slow and not nightly")
    output = run_in(tmp_path, sys.executable, "-m", "pytest", *options, "timm_parallel/tests")
    assert " passed" in output and " failed" not in output


# A tiny run of a second.
TINY = ("model=tiny", "data.limit_train=128", "data.batch_size=32", "train.epochs=1")


@pytest.fixture
def mine(fork_of: Any) -> Path:
    """Make a fork whose README is its own."""
    folder: Path = fork_of("mine")
    (folder / "README.md").write_text("Own words.\n", encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "mine")
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.slow(seconds=90)
def test_make_lint_test_of_a_fork_passes_with_all_examples_of_docs_extend_md(
    mine: Path, environment: Path
) -> None:
    # Copy the cache of mypy if `make lint` has left one, because mypy takes half a minute to check
    # torch.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", mine / ".mypy_cache")
    for example in EXAMPLES.values():
        example.follow(mine)
    python = str(environment / "bin" / "python")
    run_in(mine, python, "scripts/schema.py")
    # The recipe of docs/quickstart.md.
    [recipe] = code_of("docs/quickstart.md", "yaml")
    (mine / "conf" / "experiment" / "second.yaml").write_text(recipe, encoding="utf-8")
    shown = run_in(mine, python, "train.py", "experiment=second", "--cfg", "job")
    assert "name: resnet50" in shown
    # Start no workers, because other tests run at the same time.
    run_in(mine, "make", f"VENV={environment}", "lint", "test", "ARGS=-n0")


@pytest.mark.timeout(1800)
@pytest.mark.nightly
@pytest.mark.slow(seconds=120)
def test_commands_of_a_fork_work_with_the_library_as_a_wheel(mine: Path, environment: Path) -> None:
    python = str(environment / "bin" / "python")

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        return run_in(mine, python, *words, codes=codes)

    library = run("-c", "import timm_parallel; print(timm_parallel.__file__)")
    assert Path(library).is_relative_to(environment)
    run("train.py", *TINY, "parallel=ddp", "parallel.devices=2", "hydra.run.dir=outputs/two")
    result = json.loads(read(mine / "outputs/two/result.json"))
    assert (result["status"], result["world_size"]) == ("done", 2)
    run("train.py", *TINY, "parallel=single", "train.max_steps=2", "hydra.run.dir=outputs/one")
    run("train.py", "resume=outputs/one", "train.max_steps=4")
    assert json.loads(read(mine / "outputs/one/result.json"))["steps"] == 4
    run("evaluate.py", "run=outputs/two")
    Image.new("L", (8, 8)).save(mine / "photo.png")
    run("scripts/predict.py", "run=outputs/two", "images=photo.png", "output=labels.csv")
    assert (mine / "labels.csv").exists()
    run("scripts/export.py", "run=outputs/two")
    # Use jobs with one rank, which are forked from one server that imports torch once.
    sweep = ("-m", "parallel=single", "seed=1,2", "hydra.sweep.dir=outputs/sweep")
    run("train.py", *TINY, *sweep)
    assert len([*mine.glob("outputs/sweep/*/result.json")]) == 2
    with open(mine / "src/models/build.py", "a") as code:
        code.write("# changed\n")
    words = (*TINY, "parallel=single", "sweep.repeats=2")
    run("scripts/verdict.py", "base=HEAD", *words, codes=(0, 3, 4))
    slurm = ("cluster=slurm", "cluster.cpus=2", "cluster.submit=false")
    run("train.py", *slurm, "hydra.run.dir=outputs/job")
    assert (mine / "outputs/job/job.sbatch").exists()
