"""Makes a clone of this project your own: `make fork NAME=my_project [HOLDER="Ada Example"] [DROP_DEMO=1]`.

Puts your name into README, licence, config, container and CI, and the template's commit into .template.json. DROP_DEMO=1
removes the recipes and the figures of the template's machines. Nothing is committed: look at `git diff`, then commit.
"""

from __future__ import annotations

import argparse
import json
import keyword
import re
import subprocess
import sys
from pathlib import Path

RECIPES = ("cifar10_resnet18", "digits_resnet10t", "digits_vit", "imagenet_resnet50_a3", "imagenet_vit_small")
FIGURES = ("docs/benchmarks.md", "docs/figures/report.svg")
OLD_NAME = "timm-parallel"
NAMED = (
    "Dockerfile",
    ".devcontainer/devcontainer.json",
    ".github/workflows/ci.yml",
    "docs/container.md",
)  # where OLD_NAME stands
PULLING = """\
Later fixes of the template, the front merged and the engine taken whole:
  git fetch <url of the template> main
  git merge --no-commit FETCH_HEAD
  git rm -rq --cached src/engine && rm -r src/engine && git checkout FETCH_HEAD -- src/engine
  git commit"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--holder", default="", help="of the licence; default: git's user.name")
    parser.add_argument("--drop-demo", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args(arguments)
    try:
        fork(options.root, options.name, options.holder, options.drop_demo)
    except ValueError as error:
        print(f"fork: {error}", file=sys.stderr)
        return 2
    print(f"This is {options.name} now. Look at git diff, run make test, and commit.\n\n{PULLING}")
    return 0


def fork(root: Path, name: str, holder: str, drop_demo: bool) -> None:
    """Rename the clone in `root`. Errors: ValueError for a bad name, a dirty tree, or a second fork."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME={name}: no package name; use small letters, digits and _, e.g. my_project")
    if (root / ".template.json").exists():
        before = json.loads((root / ".template.json").read_text(encoding="utf-8"))["name"]
        raise ValueError(f"NAME={name}: this is a fork already ({before}, see .template.json)")
    if _git(root, "status", "--porcelain"):
        raise ValueError(f"NAME={name}: there are uncommitted changes; commit them first (git status)")
    commit = _git(root, "rev-parse", "HEAD")
    holder = holder or _git(root, "config", "user.name") or name
    for path in NAMED:
        _edit(root / path, re.escape(OLD_NAME), name)
    _edit(root / "README.md", r"\A# .*", f"# {name}")
    if (root / "README.zh-CN.md").exists():
        _edit(root / "README.zh-CN.md", r"\A# .*", f"# {name}")
    _edit(root / "LICENSE", r"(Copyright \(c\) \d+) .*", rf"\1 {holder}")
    _edit(root / "conf" / "train.yaml", r"(?m)^task_name: .*$", f"task_name: {name}")
    _edit(root / "scripts" / "maintain" / "fork.py", rf'OLD_NAME = "{OLD_NAME}"', f'OLD_NAME = "{name}"')
    if drop_demo:
        _drop_demo(root)
    record = {"name": name, "template_commit": commit}
    (root / ".template.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _drop_demo(root: Path) -> None:
    """The recipes' files and the figures, and the lines of documentation that speak of them."""
    for recipe in RECIPES:
        (root / "conf" / "experiment" / f"{recipe}.yaml").unlink()
    for path in FIGURES:
        if (root / path).exists():
            _git(root, "rm", "-rq", path)
    gone = re.compile("|".join([*RECIPES, *(re.escape(path.removeprefix("docs/")) for path in FIGURES)]))
    for page in [*root.glob("README*.md"), *(root / "docs").glob("*.md"), root / "CONTRIBUTING.md"]:
        lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
        page.write_text("".join(line for line in lines if not gone.search(line)), encoding="utf-8")


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed = re.sub(old, new, text)
    assert changed != text, f"{path}: nothing there matches {old}"
    path.write_text(changed, encoding="utf-8")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0 and words[0] != "config":
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip().splitlines()[-1:] or 'failed'}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
