"""`make update` merges a newer template into a fork, or leaves the fork as it was. Tested with
small repositories and with this project.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_fork import make_template

from scripts.maintain.fork import fork as make_fork
from scripts.update import main

ROOT = Path(__file__).resolve().parents[2]
WITH_AND_WITHOUT_COMMON_HISTORY = pytest.mark.parametrize(
    "mine", [True, False], ids=["common history", "no common history"], indirect=True
)
pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
)
# Script `make fork` of a small template: it renames the README, deletes scripts/maintain and
# records the commit.
SMALL_FORK = """
import argparse, json, shutil, subprocess
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--holder")
parser.add_argument("--drop-demo", action="store_true")
options = parser.parse_args()
readme = Path("README.md").read_text()
Path("README.md").write_text(readme.replace("template", options.name))
shutil.rmtree("scripts/maintain")
if options.drop_demo:
    Path("demo.txt").unlink()
commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
record = {"name": options.name, "holder": options.holder, "drop_demo": options.drop_demo, "template_commit": commit}
Path(".template.json").write_text(json.dumps(record))
"""  # noqa: E501
SMALL = {
    "README.md": "# template\n\nOne.\n\nTwo.\n\nThree.\n",
    "demo.txt": "a recipe\n",
    "timm_parallel/core.py": "VERSION = 1\n",
    "timm_parallel/old.py": "# unused\n",
    "timm_parallel/tests/test_core.py": "def test_core(): pass\n",
    "src/front.py": "first = 1\n\nsecond = 2\n\nthird = 3\n",
    "src/example.py": "# an example\n",
    "src/unused.py": "# unused\n",
    "run.sh": "echo run\n",
    "scripts/maintain/fork.py": SMALL_FORK,
    "scripts/maintain/bench.py": "# version 1\n",
    ".gitignore": "/local/\n__pycache__/\n",
}
NEWER = {
    "README.md": "# template\n\nOne.\n\nTwo.\n\nThree, and more.\n",
    "demo.txt": "a better recipe\n",
    "timm_parallel/core.py": "VERSION = 2\n",
    "timm_parallel/new.py": "# new\n",
    "timm_parallel/old.py": None,
    "timm_parallel/tests/test_core.py": "def test_newer_core(): pass\n",
    "src/front.py": "first = 1\n\nsecond = 2\n\nthird = 30\n",
    "src/example.py": "# a better example\n",
    "src/added.py": "# added\n",
    "src/unused.py": None,
    "scripts/maintain/bench.py": "# version 2\n",
    "scripts/maintain/new.py": "# new\n",
}
OWN = {
    "README.md": "# my_project\n\nMy own one.\n\nTwo.\n\nThree.\n",
    "src/front.py": "first = 10\n\nsecond = 2\n\nthird = 3\n",
    "src/own.py": "# mine\n",
    "src/example.py": None,
}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(folder: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        path = folder / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def commit(folder: Path, files: Mapping[str, str | None]) -> str:
    write(folder, files)
    git(folder, "add", "--all")
    # Use different messages, because two repositories with equal messages could start with the same
    # commit hash.
    git(folder, "commit", "--quiet", "--message", f"A change of {folder.name}")
    return git(folder, "rev-parse", "HEAD")


def start_repository(folder: Path, files: Mapping[str, str | None]) -> Path:
    folder.mkdir(exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit(folder, files)
    return folder


def copy_of(template: Path, folder: Path, shared: bool) -> Path:
    """Clone the template, or start a new history with its files, as "Use this template" does."""
    if shared:
        git(folder.parent, "clone", "--quiet", str(template), folder.name)
    else:
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns(".git"))
        start_repository(folder, {})
    git(folder, "remote", "add", "template", str(template))
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return start_repository(tmp_path / "template", SMALL)


@pytest.fixture
def mine(request: pytest.FixtureRequest, template: Path, tmp_path: Path) -> Path:
    """Create a fork of the small template with a commit of its own."""
    folder = copy_of(template, tmp_path / "mine", getattr(request, "param", True))
    command = [
        sys.executable,
        "scripts/maintain/fork.py",
        "my_project",
        "--holder=Ada",
        "--drop-demo",
    ]
    subprocess.run(command, cwd=folder, check=True)
    commit(folder, {})
    commit(folder, OWN)
    write(folder, {"local/mine": "mine"})
    return folder


def state(folder: Path) -> tuple[str, str, dict[str, bytes]]:
    """Return HEAD, git's status with ignored files, and the contents of all files outside .git."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }
    return (
        git(folder, "rev-parse", "HEAD"),
        git(folder, "status", "--porcelain", "--ignored"),
        files,
    )


def update(folder: Path, *arguments: str, test: str = "true") -> int:
    return main([*arguments, "--test", test, "--root", str(folder)])


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@WITH_AND_WITHOUT_COMMON_HISTORY
def test_make_update_replaces_the_library_and_merges_other_files(
    template: Path, mine: Path
) -> None:
    commit(
        mine, {"timm_parallel/core.py": "VERSION = 'mine'\n", "timm_parallel/mine.py": "# mine\n"}
    )
    write(template, NEWER)
    (template / "run.sh").chmod(0o755)
    (template / "image.png").write_bytes(b"\x89PNG\0\xff")
    newest = commit(template, {})
    head = git(mine, "rev-parse", "HEAD")
    assert update(mine) == 0
    # All files of the library and its tests are those of the template.
    assert read(mine / "timm_parallel/core.py") == "VERSION = 2\n"
    assert sorted(path.name for path in (mine / "timm_parallel").iterdir()) == [
        "core.py",
        "new.py",
        "tests",
    ]
    assert read(mine / "timm_parallel/tests/test_core.py") == "def test_newer_core(): pass\n"
    # Files have the changes of both sides, and new files of each side exist.
    assert read(mine / "src/front.py") == "first = 10\n\nsecond = 2\n\nthird = 30\n"
    assert read(mine / "README.md") == "# my_project\n\nMy own one.\n\nTwo.\n\nThree, and more.\n"
    assert (mine / "src/own.py").exists() and (mine / "src/added.py").exists()
    assert (mine / "image.png").read_bytes() == b"\x89PNG\0\xff"
    assert (mine / "run.sh").stat().st_mode & 0o111
    # Files that the template, make fork or the fork deleted do not exist.
    deleted = ("src/unused.py", "scripts/maintain", "demo.txt", "src/example.py")
    assert [name for name in deleted if (mine / name).exists()] == []
    record = {"name": "my_project", "holder": "Ada", "drop_demo": True, "template_commit": newest}
    assert json.loads(read(mine / ".template.json")) == record
    # All changes are staged, and no commit was made.
    assert git(mine, "rev-parse", "HEAD") == head
    assert (
        git(mine, "diff", "--name-only") == ""
        and git(mine, "ls-files", "--others", "--exclude-standard") == ""
    )
    assert git(mine, "worktree", "list").count("\n") == 0
    assert read(mine / "local/mine") == "mine"


@WITH_AND_WITHOUT_COMMON_HISTORY
@pytest.mark.slow(seconds=2)
def test_make_update_starts_from_the_template_commit_of_the_previous_update(
    template: Path, mine: Path
) -> None:
    commit(template, NEWER)
    assert update(mine) == 0
    commit(mine, {})
    assert update(mine) == 2
    newest = commit(
        template,
        {"src/added.py": "# added and changed\n", "src/example.py": "# the best example\n"},
    )
    assert update(mine) == 0
    assert git(mine, "diff", "--cached", "--name-only").split() == [
        ".template.json",
        "src/added.py",
    ]
    assert json.loads(read(mine / ".template.json"))["template_commit"] == newest


@pytest.mark.slow(seconds=2)
def test_make_update_names_conflicting_files_and_changes_nothing_unless_keep_lists_the_files(
    template: Path, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "image.png").write_bytes(b"\0mine")
    commit(mine, {"src/unused.py": "# used by me\n"})
    (template / "image.png").write_bytes(b"\0theirs")
    commit(template, {**NEWER, "src/front.py": "first = 100\n\nsecond = 2\n\nthird = 30\n"})
    before = state(mine)
    assert update(mine) == 1
    error = capfd.readouterr().err
    assert "conflict in image.png src/front.py src/unused.py" in error and error.count("\n") == 1
    assert state(mine) == before
    printed = re.findall(r"git (diff \w+ \w+) --", error)[0].split()
    assert "-first = 1\n" in git(mine, *printed, "--", "src/front.py")
    assert "+first = 100\n" in git(mine, *printed, "--", "src/front.py")
    assert update(mine, "--keep", "src", "image.png") == 0
    assert read(mine / "src/front.py") == OWN["src/front.py"]
    assert read(mine / "src/unused.py") == "# used by me\n"
    assert (mine / "image.png").read_bytes() == b"\0mine"
    assert read(mine / "timm_parallel/core.py") == "VERSION = 2\n"


def test_make_update_reports_a_conflict_when_a_file_changed_by_the_fork_moved_into_the_library(
    template: Path, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commit(template, {"timm_parallel/front.py": SMALL["src/front.py"], "src/front.py": None})
    before = state(mine)
    assert update(mine) == 1
    assert "conflict in src/front.py:" in capfd.readouterr().err
    assert state(mine) == before


def test_make_update_restores_the_fork_when_a_test_fails(
    template: Path, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commit(template, NEWER)
    before = state(mine)
    fails_with_the_merged_file = (
        "touch -t 202001010000 src/front.py; grep -q 'third = 3$' src/front.py || (echo FAILED "
        "test_third && exit 5)"
    )
    assert update(mine, test=f'sh -c "{fails_with_the_merged_file}"') == 1
    output = capfd.readouterr()
    assert "FAILED test_third" in output.out
    assert "exited with 5" in output.err and output.err.count("\n") == 1
    assert state(mine) == before


@pytest.mark.slow(seconds=1)
def test_failed_make_update_never_overwrites_a_file_edited_during_the_tests(
    template: Path, mine: Path
) -> None:
    commit(template, NEWER)
    assert update(mine, test="sh -c 'echo edited >> src/own.py; exit 1'") == 1
    assert read(mine / "src/own.py") == "# mine\nedited\n"
    assert git(mine, "status", "--porcelain") == "M src/own.py"
    git(mine, "checkout", "--quiet", ".")
    assert update(mine, test="sh -c 'echo edited >> src/front.py; exit 1'") == 2
    assert read(mine / "src/front.py").endswith("third = 30\nedited\n")


@pytest.mark.slow(seconds=1)
def test_git_reset_restores_a_fork_after_make_update_was_killed(template: Path, mine: Path) -> None:
    commit(template, NEWER)
    before = state(mine)
    command = [
        sys.executable,
        str(ROOT / "scripts" / "update.py"),
        "--root",
        str(mine),
        "--test",
        "sleep 60",
    ]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not (mine / "src/added.py").exists() or (mine / ".git/index.lock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", "--", f"-{process.pid}"], check=True)
    git(mine, "reset", "--quiet", "--hard")
    assert state(mine) == before
    assert update(mine) == 0


@pytest.mark.parametrize(
    "reason", ["no fork", "uncommitted", "no remote", "not the template", "unknown base", "ignored"]
)
def test_make_update_refuses_an_unsuitable_fork_or_source_and_changes_nothing(
    reason: str, template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(template, tmp_path / "mine", shared=True)
    source = str(template)
    expected = {
        "no fork": ".template.json",
        "uncommitted": "uncommitted",
        "no remote": "FROM=",
        "not the template": "FROM=",
        "unknown base": "template_commit=",
        "ignored": "local/own.yaml",
    }[reason]
    if reason != "no fork":
        subprocess.run(
            [sys.executable, "scripts/maintain/fork.py", "mine", "--holder=Ada"],
            cwd=folder,
            check=True,
        )
        commit(folder, {})
    if reason == "uncommitted":
        write(folder, {"note": "mine"})
    elif reason == "no remote":
        source = str(tmp_path / "nowhere")
    elif reason == "not the template":
        source = str(folder)
    elif reason == "unknown base":
        commit(folder, {".template.json": json.dumps({"template_commit": "1" * 40})})
    elif reason == "ignored":
        write(folder, {"local/own.yaml": "mine"})
        write(template, {"local/own.yaml": "the template's"})
        git(template, "add", "--force", "local/own.yaml")
    commit(template, NEWER)
    before = state(folder)
    assert update(folder, "--from", source) == 2
    error = capfd.readouterr().err
    assert error.startswith("update: ") and expected in error and error.count("\n") == 1
    assert state(folder) == before


@pytest.mark.parametrize("shared", [True, False], ids=["common history", "no common history"])
@pytest.mark.slow(seconds=4)
@pytest.mark.sample(2)
def test_make_update_merges_a_newer_template_into_a_fork_of_this_project(
    shared: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = make_template(tmp_path / "template")
    mine = copy_of(template, tmp_path / "mine", shared)
    make_fork(mine, "my_project", "Ada Example", drop_demo=True)
    losses = read(mine / "src/tasks/multilabel.py")
    entry = read(mine / "train.py")
    commit(
        mine, {"src/tasks/multilabel.py": losses + "\n# mine\n", "docs/dev/report_method.md": None}
    )
    readme = read(template / "README.md")
    newer = {
        "README.md": readme.replace("MIT license.", "The MIT license."),
        "timm_parallel/faults/liveness.py": "# rewritten\n",
        "timm_parallel/machine/newer.py": "# newer\n",
        "scripts/maintain/bench.py": "# changed\n",
        "docs/dev/report_method.md": read(template / "docs/dev/report_method.md") + "\nMore.\n",
        "conf/experiment/digits_vit.yaml": read(template / "conf/experiment/digits_vit.yaml")
        + "# changed\n",
        "train.py": entry + "# a fix\n",
        "scripts/predict.py": None,
    }
    newest = commit(template, newer)
    assert update(mine) == 0
    changes = dict(
        line.split()[::-1] for line in git(mine, "diff", "--cached", "--name-status").splitlines()
    )
    assert changes == {
        ".template.json": "M",
        "README.md": "M",
        "timm_parallel/faults/liveness.py": "M",
        "timm_parallel/machine/newer.py": "A",
        "timm_parallel/tests/project.zip": "M",
        "train.py": "M",
        "scripts/predict.py": "D",
    }
    with zipfile.ZipFile(mine / "timm_parallel/tests/project.zip") as project:
        assert project.read("train.py").endswith(b"# a fix\n")
        assert "scripts/predict.py" not in project.namelist()
    assert read(mine / "README.md").startswith("# my_project\n") and "The MIT license." in read(
        mine / "README.md"
    )
    assert json.loads(read(mine / ".template.json"))["template_commit"] == newest
    commit(mine, {})
    commit(template, {"src/tasks/multilabel.py": losses + "\n# the template's\n"})
    before = state(mine)
    assert update(mine) == 1
    assert "conflict in src/tasks/multilabel.py" in capfd.readouterr().err
    assert state(mine) == before
