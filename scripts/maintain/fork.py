"""Turn a clone of this project into your own project: `make fork NAME=my_project [HOLDER="Ada
Example"] [DROP_DEMO=1]`.

The script writes your name into README, config, container and CI, and adds it to the license. It
writes .template.json with the template's commit and a hash of the library, so that `make test`
tests the library only after a change. It saves the template's project for these tests (see
scripts/test_library.py). It removes files that only the template needs: benchmarks and their page,
tests with random faults, tests of the pages, and this script. DROP_DEMO=1 also removes the recipes.
The script does not commit: look at `git diff`, then commit.
"""

from __future__ import annotations

import argparse
import json
import keyword
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.test_library import PROJECT, library_hash, save_project

RECIPES = (
    *(
        "cifar10_resnet18",
        "digits_resnet10t",
        "digits_vit",
        "imagenet_resnet50_a1",
        "imagenet_resnet50_a2",
    ),
    *("imagenet_resnet50_a3", "imagenet_vit_small", "finetune_convnext_tiny", "finetune_swin_tiny"),
)
# Files that a fork does not need, and a pattern for the commands in them. Lines of pages that match
# the pattern are removed, so such a line must be a whole sentence, list item, table row or line of
# code.
OF_THE_TEMPLATE = (
    "scripts/maintain",
    "tests/template",
    "docs/dev/benchmarks.md",
    "mkdocs.yml",
    "requirements-docs.txt",
)
TARGETS = r"make (bench|gpu-wheels|gpu-check|size|docs|fork)\b"
COMMANDS = rf"scripts/maintain|tests/template|benchmarks\.md|{TARGETS}"
DEMO = ("docs/figures/report.png",)
OLD_NAME = "timm-parallel"
# Files in which the new name of the project replaces the old one.
NAMED = (
    "Dockerfile",
    ".devcontainer/devcontainer.json",
    ".github/workflows/ci.yml",
    "pyproject.toml",
    "CITATION.cff",
)
# Pattern for a run folder in the pages, which contains the template's task_name.
RUN_FOLDER = r"(outputs/)train\b"
# The tests of the library run with the template's project, so mypy must not check them with yours.
LIBRARY_TESTS = """[[tool.mypy.overrides]]
module = ["timm_parallel.tests.*", "timm_parallel.testing.*"]
ignore_errors = true

"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument(
        "--holder", default="", help="holder of the license; default: git's user.name"
    )
    parser.add_argument("--drop-demo", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args(arguments)
    try:
        fork(options.root, options.name, options.holder, options.drop_demo)
    except ValueError as error:
        print(f"fork: {error}", file=sys.stderr)
        return 2
    print(f"This is {options.name} now. Look at git diff, run make check, and commit.")
    print(
        "Later, `make update` takes a newer template. It reads the git remote named template, "
        "which you add once:"
    )
    print("  git remote add template <URL of the template>")
    return 0


def fork(root: Path, name: str, holder: str, drop_demo: bool) -> None:
    """Rename the project in a clone, and remove the files of the template. Raises ValueError if the
    name is not valid, changes are not committed, or the clone is already a fork.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"NAME={name}: expected a package name of lower-case letters, digits and _, e.g. "
            "my_project"
        )
    if (root / ".template.json").exists():
        before = json.loads((root / ".template.json").read_text(encoding="utf-8"))["name"]
        raise ValueError(
            f"NAME={name}: this repository is a fork already ({before}, see .template.json); make "
            "fork runs once"
        )
    if _git(root, "status", "--porcelain"):
        raise ValueError(
            f"NAME={name}: the working tree has uncommitted changes; commit them first (git status)"
        )
    commit = _git(root, "rev-parse", "HEAD")
    # Save the template's project before its files are edited or removed.
    save_project(root)
    holder = holder or _git(root, "config", "user.name") or name
    for path in NAMED:
        _edit(root / path, re.escape(OLD_NAME), name)
    _edit(root / "pyproject.toml", r"(?=\[tool\.pytest)", LIBRARY_TESTS)
    for readme in root.glob("README*.md"):
        _edit(readme, re.escape(OLD_NAME), name)
    text = (root / "LICENSE").read_text(encoding="utf-8")
    (root / "LICENSE").write_text(add_holder(text, holder), encoding="utf-8")
    _edit(root / "conf" / "train.yaml", r"(?m)^task_name: .*$", f"task_name: {name}")
    _drop(root, OF_THE_TEMPLATE, COMMANDS)
    # Rename run folders in the pages, because a run is in outputs/<task_name>, and task_name was
    # changed above.
    for page in _pages(root):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(RUN_FOLDER, rf"\1{name}", text), encoding="utf-8")
    if drop_demo:
        recipes = [f"conf/experiment/{recipe}.yaml" for recipe in RECIPES]
        figures = [path for path in DEMO if (root / path).exists()]
        _drop(
            root,
            [*recipes, *figures],
            "|".join([*RECIPES, *(re.escape(Path(path).name) for path in figures)]),
        )
    # Record the options, because `make update` must turn newer commits of the template into forks
    # in the same way.
    record = {"name": name, "holder": holder, "drop_demo": drop_demo, "template_commit": commit}
    record["library_hash"] = library_hash(root)
    (root / ".template.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    # Add the new files, because `git commit -a` would not include them.
    _git(root, "add", ".template.json", PROJECT)


def add_holder(text: str, holder: str) -> str:
    """Add a holder to a license, below the holders that it has. The MIT license requires their
    lines to stay.
    """
    # The year is that of the template's line, so two forks by `make update` always have the same.
    (*_, last) = re.finditer(r"(Copyright \(c\) \d+) .*\n", text)
    return f"{text[: last.end()]}{last[1]} {holder}\n{text[last.end() :]}"


def _drop(root: Path, paths: Sequence[str], named: str) -> None:
    """Remove files with git, and remove the lines of documentation pages that match a pattern."""
    _git(root, "rm", "-rq", *paths)
    for page in _pages(root):
        lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
        page.write_text(
            "".join(line for line in lines if not re.search(named, line)), encoding="utf-8"
        )


def _pages(root: Path) -> list[Path]:
    return [*root.glob("README*.md"), *(root / "docs").rglob("*.md"), root / "CONTRIBUTING.md"]


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed = re.sub(old, new, text)
    assert changed != text, f"{path}: does not contain {old}"
    path.write_text(changed, encoding="utf-8")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and words[0] != "config":
        raise ValueError(f"git {' '.join(words)} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
