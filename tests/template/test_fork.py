"""`make fork` makes a clone the user's project; tested in a scratch copy with git."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from test_makefile import make

from scripts.maintain.fork import (
    COMMANDS,
    OF_THE_TEMPLATE,
    OLD_NAME,
    RECIPES,
    RUN_FOLDER,
    add_holder,
    fork,
)
from scripts.test_library import library_hash
from tests.template.runs import ROOT

pytestmark = [
    pytest.mark.skipif(
        shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
    ),
]


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(
        ["git", *who, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_template(folder: Path) -> Path:
    """Create a repository with the files of this working tree that git tracks or would add."""
    names = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder.parent, "init", "-q", "-b", "main", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "the template")
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return make_template(tmp_path / "template")


@pytest.fixture
def clone(template: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "-q", str(template), "mine")
    return tmp_path / "mine"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_make_fork_replaces_every_occurrence_of_the_template_name(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD").strip()
    fork(clone, "my_project", "Ada Example", drop_demo=False)
    assert read(clone / "README.md").startswith("# my_project\n")
    # The tests of the library do not fit the types of a fork's own code.
    overrides = tomllib.loads(read(clone / "pyproject.toml"))["tool"]["mypy"]["overrides"]
    ignored = [each["module"] for each in overrides if each.get("ignore_errors")]
    assert ignored == [["timm_parallel.tests.*", "timm_parallel.testing.*"]]
    assert read(clone / "LICENSE") == add_holder(read(ROOT / "LICENSE"), "Ada Example")
    assert read(clone / "timm_parallel" / "LICENSE") == read(ROOT / "LICENSE")
    assert "task_name: my_project" in read(clone / "conf" / "train.yaml")
    record = {
        "name": "my_project",
        "holder": "Ada Example",
        "drop_demo": False,
        "template_commit": commit,
    }
    record["library_hash"] = library_hash(clone)
    assert json.loads(read(clone / ".template.json")) == record
    pages = "".join(map(read, [*clone.glob("README*.md"), *(clone / "docs").rglob("*.md")]))
    assert "outputs/train" not in pages
    assert "python train.py resume=outputs/my_project/<date>/<time>" in pages
    texts = [path for path in clone.rglob("*") if path.is_file() and ".git/" not in str(path)]
    # Skip the library, because make fork does not change its name.
    own = [path for path in texts if not path.is_relative_to(clone / "timm_parallel")]
    assert [path.name for path in own if OLD_NAME.encode() in path.read_bytes()] in (
        [],
        ["CHANGELOG.md"],
    )


def test_license_keeps_all_holders_when_owners_are_added() -> None:
    text = read(ROOT / "LICENSE")
    added = ["Copyright (c) 2026 Ada & Söhne", r"Copyright (c) 2026 Acme \1 [AI]"]
    for line in added:
        text = add_holder(text, line.removeprefix("Copyright (c) 2026 "))
    lines = text.splitlines()
    assert lines[2:5] == ["Copyright (c) 2026 The maintainers", *added]
    assert [line for line in lines if line not in added] == read(ROOT / "LICENSE").splitlines()


@pytest.mark.parametrize("name", ["", "My Project", "my-project", "1st", "class", "../x", "a/b"])
def test_make_fork_refuses_an_invalid_package_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NAME="):
        fork(tmp_path, name, "", drop_demo=False)


def test_make_fork_refuses_uncommitted_changes_and_a_second_fork(clone: Path) -> None:
    (clone / "note").write_text("mine")
    with pytest.raises(ValueError, match=r"NAME=mine: .*uncommitted"):
        fork(clone, "mine", "", drop_demo=False)
    (clone / "note").unlink()
    fork(clone, "mine", "Ada", drop_demo=False)
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "mine")
    with pytest.raises(ValueError, match=r"NAME=other: .*\(mine"):
        fork(clone, "other", "", drop_demo=False)


def test_make_fork_keeps_examples_and_removes_files_that_only_the_template_needs(
    clone: Path,
) -> None:
    examples = git(clone, "ls-files", "examples")
    fork(clone, "mine", "Ada", drop_demo=True)
    assert git(clone, "ls-files", "examples") == examples != ""
    tests = [*(clone / "tests").rglob("*.py")]
    assert tests and [path.name for path in tests if "examples/" in read(path)] == []
    assert not [path for path in OF_THE_TEMPLATE if (clone / path).exists()]
    assert {path.name for path in (clone / "scripts").glob("*.py")} >= {
        "install.py",
        "schema.py",
        "doctor.py",
    }
    pages = [*clone.glob("*.md"), *(clone / "docs").rglob("*.md")]
    assert [
        page.name
        for page in pages
        if page.name != "CHANGELOG.md" and re.search(COMMANDS, read(page))
    ] == []
    done = subprocess.run(
        ["make", "help"], cwd=clone, capture_output=True, text=True, timeout=300, check=True
    )
    assert "make train" in done.stdout and "make bench" not in done.stdout


def units_of(text: str) -> list[str]:
    """Split a page into parts that can be removed alone: lines of whole sentences, list items,
    table rows and lines of code.
    """
    units: list[str] = []
    in_code = joins = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        is_line = in_code or is_fence or line.startswith(("|", "#"))
        if joins and line.strip() and not is_line and not re.match(r" *([-*]|\d+\.) ", line):
            units[-1] += f"\n{line}"
        elif line.strip():
            units.append(line)
        joins = bool(line.strip()) and not is_line and not line.endswith((".", "。"))
        in_code ^= is_fence
    return units


@pytest.mark.parametrize("drop_demo", [False, True])
def test_make_fork_removes_only_whole_sentences_list_items_and_table_rows_from_pages(
    drop_demo: bool, template: Path, clone: Path
) -> None:
    fork(clone, "mine", "Ada", drop_demo)
    cut = {}
    for page in [*clone.glob("*.md"), *(clone / "docs").rglob("*.md")]:
        before = read(template / page.relative_to(clone)).replace(OLD_NAME, "mine")
        allowed = {"# mine", *units_of(re.sub(RUN_FOLDER, r"\1mine", before))}
        after = read(page)
        cut[page.name] = [unit for unit in units_of(after) if unit not in allowed]
        cut[page.name] += re.findall(r"^.*\n+```\w*\n```$", after, re.MULTILINE)
    assert {page: texts for page, texts in cut.items() if texts} == {}


def test_make_fork_removes_demo_experiments_when_drop_demo_is_true(clone: Path) -> None:
    fork(clone, "mine", "Ada", drop_demo=True)
    assert not [
        recipe for recipe in RECIPES if (clone / "conf" / "experiment" / f"{recipe}.yaml").exists()
    ]
    assert (clone / "conf" / "experiment" / "compare.yaml").exists()
    pages = [*clone.glob("*.md"), *(clone / "docs").rglob("*.md")]
    assert not [
        page
        for page in pages
        if page.name != "CHANGELOG.md" and any(r in read(page) for r in RECIPES)
    ]
    assert not (clone / "docs" / "figures" / "report.png").exists()


@pytest.mark.slow(seconds=2)
def test_make_test_in_a_fork_runs_the_library_tests_apart_unless_args_are_given(
    clone: Path,
) -> None:
    def commands(*words: str) -> list[str]:
        output = make("-n", f"PYTHON={sys.executable}", *words, folder=clone)
        return re.findall(r".* -m pytest .*|.*test_library.*", output)

    (one,) = commands("test")
    assert "testpaths" not in one
    fork(clone, "mine", "Ada", drop_demo=False)
    for target in ("test", "test-fast", "test-all", "test-nightly"):
        own, library = commands(target)
        assert "-o testpaths=tests" in own
        assert "scripts/test_library.py" in library
        assert ("--if-changed" in library) == (target in ("test", "test-fast"))
    (own,) = commands("test", "ARGS=tests/test_step.py")
    assert "-o testpaths=tests" in own


@pytest.mark.processes
@pytest.mark.slow(seconds=9)
def test_changed_library_of_a_fork_is_tested_with_the_project_of_the_template(clone: Path) -> None:
    fork(clone, "mine", "Ada", drop_demo=False)
    own = "timm_parallel/tests/test_own.py"

    def run_tests(*options: str) -> tuple[int, str]:
        command = [sys.executable, "scripts/test_library.py", *options, "-p", "no:cacheprovider"]
        command += ["-v", own]
        done = subprocess.run(
            command, cwd=clone, capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, done.stdout

    assert run_tests("--if-changed") == (0, "")
    # A fork may delete parts of the template's project.
    shutil.rmtree(clone / "conf" / "model")
    (clone / "src" / "tasks" / "classification.py").unlink()
    assert run_tests("--if-changed") == (0, "")
    test = """
        from src.app import app
        from src.tasks.classification import Classification
        def test_own():
            assert (app.root / "conf" / "model" / "tiny.yaml").exists()
    """
    (clone / own).write_text(textwrap.dedent(test))
    code, output = run_tests("--if-changed")
    assert code == 0 and "1 passed" in output, output
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "the library has changed")
    (clone / "timm_parallel" / "metric.py").write_text("raise ImportError\n")
    assert run_tests("--if-changed")[0] != 0
    (clone / "timm_parallel" / "tests" / "project.zip").unlink()
    assert run_tests() == (2, "")
