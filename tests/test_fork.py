"""A clone becomes somebody's project, and takes the template's later fixes; in a scratch copy, with git."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from scripts.maintain.fork import OLD_NAME, PULLING, RECIPES, fork

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"),
]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A repository of what git would hold of this working tree."""
    folder = tmp_path / "template"
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
def clone(template: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "-q", str(template), "mine")
    return tmp_path / "mine"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_name_stands_wherever_the_old_one_stood(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD").strip()
    fork(clone, "my_project", "Ada Example", drop_demo=False)
    assert read(clone / "README.md").startswith("# my_project\n")
    assert "Copyright (c) 2026 Ada Example" in read(clone / "LICENSE")
    assert "task_name: my_project" in read(clone / "conf" / "train.yaml")
    assert json.loads(read(clone / ".template.json")) == {"name": "my_project", "template_commit": commit}
    texts = [path for path in clone.rglob("*") if path.is_file() and ".git/" not in str(path)]
    assert [path.name for path in texts if OLD_NAME.encode() in path.read_bytes()] in ([], ["CHANGELOG.md"])


@pytest.mark.parametrize("name", ["", "My Project", "my-project", "1st", "class", "../x", "a/b"])
def test_a_name_that_is_no_package_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no package name"):
        fork(tmp_path, name, "", drop_demo=False)


def test_a_dirty_tree_and_a_second_fork_are_refused(clone: Path) -> None:
    (clone / "note").write_text("mine")
    with pytest.raises(ValueError, match="uncommitted changes"):
        fork(clone, "mine", "", drop_demo=False)
    (clone / "note").unlink()
    fork(clone, "mine", "Ada", drop_demo=False)
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "mine")
    with pytest.raises(ValueError, match=r"a fork already \(mine"):
        fork(clone, "other", "", drop_demo=False)


def test_a_later_engine_is_taken_whole_and_the_front_is_merged(template: Path, clone: Path) -> None:
    """By the very lines that `make fork` prints."""
    fork(clone, "mine", "Ada", drop_demo=False)
    (clone / "src" / "models" / "own.py").write_text("# mine\n")
    engine = clone / "src" / "engine" / "machine" / "pulse.py"
    engine.write_text(read(engine) + "# changed against advice\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "mine")
    newer = template / "src" / "engine" / "machine" / "newer.py"
    newer.write_text("# newer\n")
    (template / "src" / "engine" / "machine" / "pulse.py").write_text("# rewritten\n")
    objective = template / "src" / "training" / "objective.py"
    objective.write_text(read(objective) + "# a fix\n")
    git(template, "add", "-A")
    git(template, "commit", "-qm", "a fix")
    for line in PULLING.splitlines()[1:]:
        words = line.strip().replace("<url of the template>", str(template))
        words = "git -c user.name=Ada -c user.email=a@b.c commit -qm taken" if words == "git commit" else words
        words = words.replace("git merge", "git -c user.name=Ada -c user.email=a@b.c merge")
        done = subprocess.run(
            ["bash", "-c", words], cwd=clone, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0 or "merge" in words, done.stderr
    assert git(clone, "status", "--porcelain") == ""
    assert read(engine) == "# rewritten\n"
    assert (clone / "src" / "engine" / "machine" / "newer.py").exists()
    assert read(clone / "src" / "training" / "objective.py").endswith("# a fix\n")
    assert (clone / "src" / "models" / "own.py").exists()
    assert read(clone / "README.md").startswith("# mine\n")


def test_the_demo_can_be_dropped(clone: Path) -> None:
    fork(clone, "mine", "Ada", drop_demo=True)
    assert not [recipe for recipe in RECIPES if (clone / "conf" / "experiment" / f"{recipe}.yaml").exists()]
    assert (clone / "conf" / "experiment" / "compare.yaml").exists()
    pages = [*clone.glob("*.md"), *(clone / "docs").glob("*.md")]
    assert not [page for page in pages if page.name != "CHANGELOG.md" and any(r in read(page) for r in RECIPES)]
    assert not (clone / "docs" / "benchmarks.md").exists()


@pytest.mark.slow(seconds=80)
@pytest.mark.processes
def test_without_the_demo_the_fast_tests_stay_green(clone: Path) -> None:
    fork(clone, "mine", "Ada", drop_demo=True)
    named = [
        f"tests/test_{name}.py" for name in ("architecture", "readme", "makefile", "config_refusals", "schema_json")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not processes",
        *named,
    ]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
