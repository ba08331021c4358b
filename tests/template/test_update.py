"""`make update` merges a newer template into a fork, or leaves the fork as it was."""

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
from pages import read

from scripts.install import out_of_step
from scripts.maintain.fork import main as make_fork
from scripts.update import main
from tests.template.repositories import NEEDS_GIT, git
from tests.template.runs import ROOT, files_below

pytestmark = NEEDS_GIT
# Script `make fork` of a small template: it renames the README, which names the commit, deletes
# scripts/maintain and records its options. With --library=wheel, a file in vendor/ takes the place
# of the library's folder.
SMALL_FORK = """
import argparse, json, shutil, subprocess, sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--holder")
parser.add_argument("--drop-demo", action="store_true")
parser.add_argument("--library")
parser.add_argument("--wheel", type=Path)
options, _ = parser.parse_known_args()
commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
readme = Path("README.md").read_text()
Path("README.md").write_text(readme.replace("template", options.name).replace("COMMIT", commit))
shutil.rmtree("scripts/maintain")
if options.drop_demo:
    Path("demo.txt").unlink()
if options.library == "wheel":
    wheel = Path("vendor", options.wheel.name if options.wheel else f"{commit}.whl")
    wheel.parent.mkdir()
    if options.wheel:
        shutil.copy(options.wheel, wheel)
    else:
        wheel.write_text(Path("timm_parallel/core.py").read_text())
    shutil.rmtree("timm_parallel")
    Path("requirements.txt").write_text(f"# packages\\n./{wheel}\\ntorch\\n")
given = [word for word in sys.argv[1:] if not word.startswith("--wheel")]
Path(".template.json").write_text(json.dumps({"options": given, "template_commit": commit}))
"""
SMALL = {
    "README.md": "# template\n\nOne.\n\nTwo.\n\nThree.\n\nCOMMIT\n",
    "requirements.txt": "# packages\ntorch\n",
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
    "README.md": "# template\n\nOne.\n\nTwo.\n\nThree, and more.\n\nCOMMIT\n",
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
SOURCE = ("my_project", "--holder=Ada", "--drop-demo")
OWN = {
    "src/front.py": "first = 10\n\nsecond = 2\n\nthird = 3\n",
    "src/own.py": "# mine\n",
    "src/example.py": None,
}


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
    """Create a fork of the small template with a commit of its own. Its library is a folder."""
    folder = copy_of(template, tmp_path / "mine", getattr(request, "param", True))
    return make_small_fork(folder, *SOURCE)


@pytest.fixture
def with_wheel(request: pytest.FixtureRequest, template: Path, tmp_path: Path) -> Path:
    """Create a fork of the small template whose library is a wheel."""
    folder = copy_of(template, tmp_path / "mine", getattr(request, "param", True))
    return make_small_fork(folder, "my_project", "--holder=Ada", "--library=wheel")


def make_small_fork(folder: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "scripts/maintain/fork.py", *options], cwd=folder, check=True)
    commit(folder, {})
    readme = read(folder / "README.md").replace("One.", "My own one.")
    commit(folder, {**OWN, "README.md": readme})
    write(folder, {"local/mine": "mine"})
    return folder


def state(folder: Path) -> tuple[str, str, dict[str, bytes]]:
    """Return HEAD, git's status with ignored files, and the contents of all files outside .git."""
    status = git(folder, "status", "--porcelain", "--ignored")
    return git(folder, "rev-parse", "HEAD"), status, files_below(folder)


def update(folder: Path, *arguments: str, test: str = "true") -> int:
    return main([*arguments, "--test", test, "--root", str(folder)])


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "mine", [True, False], ids=["common history", "no common history"], indirect=True
)
def test_make_update_replaces_the_library_and_merges_what_changed_since_the_last_update(
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
    # The README names the commit whose pages it links to.
    assert read(mine / "README.md") == (
        f"# my_project\n\nMy own one.\n\nTwo.\n\nThree, and more.\n\n{newest}\n"
    )
    assert (mine / "src/own.py").exists() and (mine / "src/added.py").exists()
    assert (mine / "image.png").read_bytes() == b"\x89PNG\0\xff"
    assert (mine / "run.sh").stat().st_mode & 0o111
    # Files that the template, make fork or the fork deleted do not exist.
    deleted = ("src/unused.py", "scripts/maintain", "demo.txt", "src/example.py")
    assert [name for name in deleted if (mine / name).exists()] == []
    record = {"options": [*SOURCE], "template_commit": newest}
    assert json.loads(read(mine / ".template.json")) == record
    # All changes are staged, and no commit was made.
    assert git(mine, "rev-parse", "HEAD") == head
    assert (
        git(mine, "diff", "--name-only") == ""
        and git(mine, "ls-files", "--others", "--exclude-standard") == ""
    )
    assert git(mine, "worktree", "list").count("\n") == 0
    assert read(mine / "local/mine") == "mine"
    # The next update starts from the commit of this one.
    commit(mine, {})
    assert update(mine) == 2
    changed = {"src/added.py": "# added and changed\n", "src/example.py": "# the best example\n"}
    newest = commit(template, changed)
    assert update(mine) == 0
    staged = git(mine, "diff", "--cached", "--name-only").split()
    assert staged == [".template.json", "README.md", "src/added.py"]
    assert json.loads(read(mine / ".template.json"))["template_commit"] == newest


@pytest.mark.slow(seconds=2)
def test_make_update_names_conflicting_files_and_changes_nothing_unless_keep_lists_the_files(
    template: Path, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "image.png").write_bytes(b"\0mine")
    commit(mine, {"src/unused.py": "# used by me\n"})
    (template / "image.png").write_bytes(b"\0theirs")
    # The file that the fork changed has moved into the library.
    newer = {**NEWER, "timm_parallel/unused.py": SMALL["src/unused.py"]}
    commit(template, {**newer, "src/front.py": "first = 100\n\nsecond = 2\n\nthird = 30\n"})
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


@pytest.mark.slow(seconds=1)
def test_make_update_restores_the_fork_when_a_test_fails_but_overwrites_no_file_edited_meanwhile(
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
    ("reason", "expected"),
    [
        ("no fork", ".template.json"),
        ("uncommitted", "uncommitted"),
        ("no remote", "FROM="),
        ("not the template", "FROM="),
        ("unknown base", "template_commit="),
        ("ignored", "local/mine"),
    ],
)
def test_make_update_refuses_an_unsuitable_fork_or_source_and_changes_nothing(
    reason: str, expected: str, template: Path, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = {"no remote": mine / "nowhere", "not the template": mine}.get(reason, template)
    if reason == "no fork":
        commit(mine, {".template.json": None})
    elif reason == "uncommitted":
        write(mine, {"note": "mine"})
    elif reason == "unknown base":
        commit(mine, {".template.json": json.dumps({"options": [], "template_commit": "1" * 40})})
    elif reason == "ignored":
        write(template, {"local/mine": "the template's"})
        git(template, "add", "--force", "local/mine")
    commit(template, NEWER)
    before = state(mine)
    assert update(mine, "--from", str(source)) == 2
    error = capfd.readouterr().err
    assert error.startswith("update: ") and expected in error and error.count("\n") == 1
    assert state(mine) == before


@pytest.mark.parametrize(
    "with_wheel", [True, False], ids=["common history", "no common history"], indirect=True
)
@pytest.mark.slow(seconds=2)
def test_make_update_replaces_the_wheel_and_own_library_then_replaces_it_by_the_folder(
    template: Path, with_wheel: Path
) -> None:
    # The fork adds a requirement of its own, and its wheel has other bytes than a second build.
    requirements = read(with_wheel / "requirements.txt")
    (old_wheel,) = (with_wheel / "vendor").iterdir()
    commit(with_wheel, {"requirements.txt": f"{requirements}mine\n"})
    newest = commit(template, NEWER)
    assert update(with_wheel) == 0
    assert [path.name for path in (with_wheel / "vendor").iterdir()] == [f"{newest}.whl"]
    assert read(with_wheel / "vendor" / f"{newest}.whl") == "VERSION = 2\n"
    expected = requirements.replace(old_wheel.name, f"{newest}.whl")
    assert read(with_wheel / "requirements.txt") == f"{expected}mine\n"
    assert read(with_wheel / "src/front.py") == "first = 10\n\nsecond = 2\n\nthird = 30\n"
    assert not (with_wheel / "timm_parallel").exists()
    assert read(with_wheel / "README.md").endswith(f"\n{newest}\n")
    # The folder of the library has the version of the wheel that it replaces.
    commit(with_wheel, {})
    commit(template, {"timm_parallel/core.py": "VERSION = 3\n"})
    assert update(with_wheel, "--library", "source") == 0
    assert not (with_wheel / "vendor").exists()
    assert read(with_wheel / "timm_parallel/core.py") == "VERSION = 2\n"
    assert read(with_wheel / "requirements.txt") == "# packages\ntorch\nmine\n"
    assert "--library=source" in json.loads(read(with_wheel / ".template.json"))["options"]
    commit(with_wheel, {})
    assert update(with_wheel, "--library", "source") == 2
    # The next update replaces the folder.
    assert update(with_wheel) == 0
    assert read(with_wheel / "timm_parallel/core.py") == "VERSION = 3\n"
    assert not (with_wheel / "vendor").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.slow(seconds=1)
def test_make_update_installs_the_old_wheel_again_when_a_test_fails(
    template: Path, with_wheel: Path
) -> None:
    install = "install:\n\t@cp requirements.txt local/installed\n"
    commit(with_wheel, {"Makefile": install})
    newest = commit(template, NEWER)
    before = state(with_wheel)
    assert update(with_wheel, test=f"sh -c '! grep {newest} requirements.txt'") == 1
    installed = with_wheel / "local" / "installed"
    assert read(installed) == read(with_wheel / "requirements.txt")
    installed.unlink()
    assert state(with_wheel) == before


@pytest.mark.parametrize("shared", [True, False], ids=["common history", "no common history"])
@pytest.mark.slow(seconds=4)
@pytest.mark.sample(2)
def test_make_update_merges_a_newer_template_into_a_fork_of_this_project(
    shared: bool,
    whole_template: Path,
    wheel: Path,
    tmp_path: Path,
) -> None:
    git(tmp_path, "clone", "--quiet", str(whole_template), "template")
    template = tmp_path / "template"
    mine = copy_of(template, tmp_path / "mine", shared)
    make_fork(["my_project", "--holder=Ada", f"--wheel={wheel}", f"--root={mine}"])
    losses = read(mine / "src/tasks/multilabel.py")
    entry = read(mine / "train.py")
    commit(mine, {"src/tasks/multilabel.py": losses + "\n# mine\n", "examples/gan.py": None})
    gan, vit = "examples/gan.py", "conf/experiment/digits_vit.yaml"
    newer = {
        "timm_parallel/machine/newer.py": "# newer\n",
        "scripts/maintain/bench.py": "# changed\n",
        "docs/new_page.md": "# New\n",
        "tests/template/test_new.py": "def test_new(): pass\n",
        gan: read(template / gan) + "\n# more\n",
        vit: read(template / vit) + "# changed\n",
        "train.py": entry + "# a fix\n",
        "scripts/predict.py": None,
    }
    newest = commit(template, newer)
    assert update(mine) == 0
    changes = dict(
        line.split()[::-1]
        for line in git(mine, "diff", "--cached", "--no-renames", "--name-status").splitlines()
    )
    (newer_wheel,) = (mine / "vendor").iterdir()
    assert newest[:10] in newer_wheel.name
    assert changes == {
        ".template.json": "M",
        "README.md": "M",
        "requirements.lock": "M",
        "requirements.txt": "M",
        "train.py": "M",
        "scripts/predict.py": "D",
        f"vendor/{wheel.name}": "D",
        f"vendor/{newer_wheel.name}": "A",
    }
    with zipfile.ZipFile(newer_wheel) as archive:
        assert archive.read("timm_parallel/machine/newer.py") == b"# newer\n"
    assert out_of_step(read(mine / "requirements.txt"), read(mine / "requirements.lock")) == []
    assert f"/tree/{newest}/docs" in read(mine / "README.md")
    assert json.loads(read(mine / ".template.json"))["template_commit"] == newest
