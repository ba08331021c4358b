"""Turn a clone of this project into your own project: `make fork NAME=my_project [HOLDER="Ada
Example"] [LIBRARY=source] [DOCS=1] [FROM=<URL of the template>]`.

The script writes your name into README, config, container and CI, and adds it to the license. It
builds a wheel of the library for vendor/, or keeps its folder with LIBRARY=source. It removes what
only the template needs: its tests, most recipes, maintenance scripts, and the pages unless DOCS=1.
The options are recorded in .template.json, because `make update` turns newer commits of the
template into forks in the same way. The script stages the changes and does not commit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import keyword
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "timm_parallel"
# Files of the same paths replace those of the template.
FORK_FILES = "scripts/maintain/fork_files"
REMOVED = (
    *("scripts/maintain", "tests/template", ".ci", "mkdocs.yml", "requirements-docs.txt"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.zh-CN.md", "notebooks/digits.py"),
    *(f"conf/model/{name}.yaml" for name in ("few_large", "many_small", "sequencer")),
)
# `make` starts the experiments compare and tune.
KEPT_RECIPES = ("mine", "finetune", "segmentation", "compare", "tune")
OLD_NAME, PLACEHOLDER = "timm-parallel", "my_project"
# Files in which the new name of the project replaces the old one.
NAMED = ("Dockerfile", ".devcontainer/devcontainer.json", "pyproject.toml")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--holder", help="holder of the license; default: git's user.name")
    parser.add_argument("--library", choices=("wheel", "source"), default="wheel")
    parser.add_argument("--docs", action="store_true", help="keep the pages")
    parser.add_argument("--from", dest="source", help="URL of the template; default: git's remote")
    parser.add_argument("--wheel", type=Path, help="of the library, instead of building one")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args(arguments)
    root = options.root
    options.holder = options.holder or _git(root, "config", "user.name") or options.name
    template, origin = (_git(root, "config", f"remote.{of}.url") for of in ("template", "origin"))
    options.source = options.source or template or origin
    try:
        fork(root, options)
    except ValueError as error:
        print(f"fork: {error}", file=sys.stderr)
        return 2
    print(f"This is {options.name} now. Next:")
    print("  git diff --cached --stat HEAD")
    if not template:
        is_clone = origin == options.source
        command = "rename origin template" if is_clone else f"add template {options.source}"
        print(f"  git remote {command}")
    print("  make lint test")
    print(f'  git commit -m "Make {options.name} of {OLD_NAME}"')
    return 0


def fork(root: Path, options: argparse.Namespace) -> None:
    """Turn a clone into the project of `options`. Raises ValueError if the name is not valid,
    changes are not committed, the clone is already a fork, or the wheel cannot be built.
    """
    _check(root, options)
    name, commit = options.name, _git(root, "rev-parse", "HEAD")
    has_wheel = options.library == "wheel"
    if has_wheel:
        # Build the wheel first, because it may fail.
        wheel = options.wheel or build_wheel(root, commit)
        _require(root, wheel)
    for path in NAMED:
        _edit(root / path, re.escape(OLD_NAME), name)
    _edit(root / "pyproject.toml", r'(?m)^description = ".*"$', f'description = "{name}"')
    _edit(root / "pyproject.toml", r"(?m)^testpaths = .*$", 'testpaths = ["tests"]')
    _edit(root / "conf" / "train.yaml", r"(?m)^task_name: .*$", f"task_name: {name}")
    text = (root / "LICENSE").read_text(encoding="utf-8")
    (root / "LICENSE").write_text(add_holder(text, options.holder), encoding="utf-8")
    shutil.copytree(root / FORK_FILES, root, dirs_exist_ok=True)
    address = web_address(options.source)
    pages = "docs" if options.docs else f"{address}/tree/{commit}/docs"
    for old, new in ((PLACEHOLDER, name), ("TEMPLATE", address), ("PAGES", pages)):
        _edit(root / "README.md", old, new)
    _edit(root / ".github" / "workflows" / "ci.yml", PLACEHOLDER, name)
    recipes = (root / "conf" / "experiment").glob("*.yaml")
    removed = [
        *REMOVED,
        *(f"conf/experiment/{path.name}" for path in recipes if path.stem not in KEPT_RECIPES),
        *([LIBRARY] if has_wheel else [f"{LIBRARY}/tests", f"{LIBRARY}/pyproject.toml"]),
        *([] if options.docs else ["docs"]),
    ]
    _git(root, "rm", "-rqf", *removed)
    # What git ignores, such as __pycache__, would keep their folders.
    for path in removed:
        shutil.rmtree(root / path, ignore_errors=True)
    recorded = [name, f"--holder={options.holder}", f"--from={address}"]
    recorded += [f"--library={options.library}", *(["--docs"] if options.docs else [])]
    record = {"options": recorded, "template_commit": commit}
    (root / ".template.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _git(root, "add", "--all")


def _check(root: Path, options: argparse.Namespace) -> None:
    name = options.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"NAME={name}: expected a package name of lower-case letters, digits and _, e.g. "
            "my_project"
        )
    if (root / ".template.json").exists():
        raise ValueError(
            f"NAME={name}: this repository is a fork already, see .template.json; make fork runs "
            "once"
        )
    if _git(root, "status", "--porcelain"):
        raise ValueError(
            f"NAME={name}: the working tree has uncommitted changes; commit them first (git status)"
        )
    if not options.source:
        raise ValueError(
            "FROM=: git has no remote, so the README cannot link to the template; add FROM=<URL of "
            "the template>"
        )


def add_holder(text: str, holder: str) -> str:
    """Add a holder to a license, below the holders that it has. The MIT license requires their
    lines to stay.
    """
    # The year is that of the template's line, so two forks by `make update` always have the same.
    (*_, last) = re.finditer(r"(Copyright \(c\) \d+) .*\n", text)
    return f"{text[: last.end()]}{last[1]} {holder}\n{text[last.end() :]}"


def web_address(remote: str) -> str:
    """Convert the URL of a git remote to the address of its web page, without a user or token."""
    address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", remote)
    return re.sub(r"^(https?://)[^/@]*@", r"\1", address).removesuffix(".git")


def build_wheel(root: Path, commit: str) -> Path:
    """Build a wheel of the library in vendor/, and return its path. The commit is part of its
    version, so that pip replaces the wheel of an older commit. Raises ValueError if pip fails.
    """
    vendor = root / "vendor"
    settings = root / LIBRARY / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    _edit(settings, r'(?m)^(version = ".*)"$', rf'\1+g{commit[:10]}"')
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    # With the build backend in the environment, pip needs no network.
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")
    command += ["--no-deps", "--wheel-dir", str(vendor), str(root / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    settings.write_text(text, encoding="utf-8")
    if done.returncode != 0:
        raise ValueError(
            f"the wheel of {LIBRARY} could not be built by {sys.executable}: "
            f"{' '.join(done.stderr.split())[-300:]}; run make install first, or choose "
            "LIBRARY=source"
        )
    (wheel,) = vendor.glob("*.whl")
    return wheel


def _require(root: Path, wheel: Path) -> None:
    """Put a wheel into vendor/, and let requirements.txt, its lock and the Dockerfile install
    it.
    """
    (root / "vendor").mkdir(exist_ok=True)
    if wheel.parent != root / "vendor":
        shutil.copy(wheel, root / "vendor")
    line = f"./vendor/{wheel.name}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    # Lines where `make lock` would write them, and far from those that you add at the end.
    _edit(root / "requirements.txt", r"(?m)\A((?:#.*\n)*)", rf"\1{line}\n")
    locked = f"{line} \\\\\n    --hash=sha256:{digest}\n"
    _edit(root / "requirements.lock", r"(?m)^(?=torch==)", locked)
    _edit(root / "Dockerfile", r"(?m)^(?=COPY requirements\.lock)", "COPY vendor vendor\n")


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(old, new, text)
    assert count, f"{path}: does not contain {old}"
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
