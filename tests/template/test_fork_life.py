"""A fork after `make fork`: it has its own pages and the examples of docs/extend.md, and its own
checks pass.

At every commit, `make lint` and the tests of the files of a project run in a fork with all examples
together. Every night, `make lint test` runs there in full.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_extend_pages import EXAMPLES
from test_fork import git, make_template

from scripts.maintain.fork import fork
from tests.template.runs import ROOT

pytestmark = [
    pytest.mark.skipif(
        shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
    ),
    pytest.mark.processes,
]
# Tests that depend on the files, keys and training step of a project.
QUICKEST = " ".join(f"tests/test_{file}.py" for file in ("lock", "schema_json", "step"))


def run_in(folder: Path, *command: str, **variables: str) -> str:
    """Run a command without the variables of this test run, and return its output, or fail with
    it.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    } | variables
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a fork without recipes and Chinese pages, whose README and pages are its own."""
    folder = tmp_path_factory.mktemp("fork_life")
    template = make_template(folder / "template")
    git(folder, "clone", "-q", str(template), "mine")
    mine = folder / "mine"
    fork(mine, "mine", "Ada", drop_demo=True)
    for page in [*mine.glob("README*.md"), *(mine / "docs").glob("*.md")]:
        if "zh-CN" in page.name:
            page.unlink()
        else:
            page.write_text("Own words.\n", encoding="utf-8")
    git(mine, "add", "-A")
    git(mine, "commit", "-qm", "mine")
    # Copy the cache of mypy if `make lint` has left one, because mypy takes half a minute to check
    # torch.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", mine / ".mypy_cache")
    return mine


@pytest.fixture
def fork_at_start(forked: Path) -> Path:
    """Undo the examples that an earlier test has followed."""
    git(forked, "checkout", "-q", ".")
    git(forked, "clean", "-qfd")
    return forked


@pytest.mark.timeout(1800)
@pytest.mark.slow(seconds=90)
@pytest.mark.parametrize(
    "tests", [QUICKEST, pytest.param("", marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_make_lint_test_of_a_fork_passes_with_all_examples_of_docs_extend_md(
    fork_at_start: Path, tests: str
) -> None:
    for example in EXAMPLES.values():
        example.follow(fork_at_start)
    run_in(fork_at_start, sys.executable, "scripts/schema.py")
    # Use the environment of this test run, and mark all requirements as installed.
    installed = [
        word for stamp in ("development", "runtime") for word in ("-o", f"{sys.prefix}/{stamp}")
    ]
    make = ("make", f"VENV={sys.prefix}", *installed)
    # No example changes the library.
    assert run_in(fork_at_start, sys.executable, "scripts/test_library.py", "--if-changed") == ""
    # Start no workers, because other tests run at the same time.
    run_in(fork_at_start, *make, "lint", "test", f"ARGS=-n0 {tests}")


@pytest.mark.nightly
@pytest.mark.slow(seconds=15)
def test_fork_trains_and_sweeps_when_the_library_is_installed_from_a_tag(
    fork_at_start: Path, tmp_path: Path
) -> None:
    git(fork_at_start, "tag", "--force", "v0")
    source = f"git+{fork_at_start.as_uri()}@v0#subdirectory=timm_parallel"
    install = ("-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), source)
    run_in(fork_at_start, sys.executable, *install)
    git(fork_at_start, "rm", "-rqf", "timm_parallel")
    run = ("train.py", "model=tiny", "train.max_steps=2", "data.limit_train=128")
    # Use jobs with one rank, which are forked from one server that imports torch once.
    jobs = ("-m", "parallel=dp", "parallel.devices=1,2", "hydra.sweep.dir=sweep")
    on_path = {"PYTHONPATH": str(tmp_path)}
    run_in(fork_at_start, sys.executable, *run, *jobs, **on_path)
    run_in(fork_at_start, sys.executable, "-m", "pytest", "-n0", "tests/test_step.py", **on_path)
    results = [
        json.loads(path.read_text()) for path in sorted(fork_at_start.glob("sweep/*/result.json"))
    ]
    assert [result["world_size"] for result in results] == [1, 2]
    git(fork_at_start, "reset", "-q", "--hard")
