"""Versions of the code: a plain folder with the files of a commit, or of the working tree. `.git`
is only read.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.lab import code_copy
from timm_parallel.metric import Metric
from timm_parallel.project import root

LARGEST = 10 * 2**20  # bytes of a file; larger ones are no code, and are left out
LOCAL = "conf/local"  # settings of this machine, which git ignores


@dataclass(frozen=True)
class Version:
    """Copy of the code whose train.py is started, with its own library."""

    name: str
    folder: Path

    @property
    def train(self) -> list[str]:
        return [sys.executable, str(self.folder / "train.py")]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for commands of this version. Its runs find no repository, so they
        neither record the commit of the working tree nor write to its index.
        """
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, **code_copy.no_repository(self.folder), "PYTHONPATH": path}

    def compose(self, overrides: list[str]) -> dict[str, Any]:
        """Return the config that this version composes. Raises ValueError with its message if it
        refuses.
        """
        command = [*self.train, "--cfg", "job", "--resolve", *overrides]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise ValueError(f"{self.name} refuses the command line: {reason}")
        config: dict[str, Any] = yaml.safe_load(done.stdout)
        return config

    def read(self, name: str) -> bytes:
        """Return the contents of a file; empty if this version does not have it."""
        path = self.folder / name
        return path.read_bytes() if path.is_file() else b""

    def code_of(self, metric: Metric) -> list[str]:
        """Return the code of a metric: its functions and declarations, without layout and
        comments.
        """
        functions = [value for value in vars(metric).values() if hasattr(value, "__name__")]
        used = {function.__name__ for function in functions}
        parts: list[str] = []
        for name in sorted(
            {f"{function.__module__.replace('.', '/')}.py" for function in functions}
        ):
            nodes = ast.walk(ast.parse(self.read(name)))
            parts += [ast.unparse(node) for node in nodes if _is_of_metric(node, used)]
        return parts


def _is_of_metric(node: ast.AST, used: set[str]) -> bool:
    """Return True for a function in `used`, and for a `Metric(…)` of these functions only."""
    if isinstance(node, ast.FunctionDef):
        return node.name in used
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == Metric.__name__):
        return False
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {"Metric"} <= used


def find_commit(option: str, name: str) -> str:
    """Return the full name of a commit. Raises ValueError if there is none."""
    try:
        return (
            git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()
        )
    except ValueError as error:
        raise ValueError(
            f"{option}={name}: expected a commit of this repository ({error})"
        ) from None


def copy_commit(commit: str, folder: Path) -> list[str]:
    """Write the files of a commit, and the local settings, to a new folder. Return the names of the
    files left out.
    """
    left_out = code_copy.copy_commit(root(), commit, folder, LARGEST)
    _copy_local_settings(folder)
    return left_out


def copy_working_tree(folder: Path) -> list[str]:
    """Write the tracked, changed and untracked files to a new folder. Return the names of the
    files left out.
    """
    left_out = []
    for name in names("--cached", "--others"):
        path = root() / name
        # A link to data stays a link. Other repositories, such as submodules, are folders here.
        if path.is_symlink() or (path.is_file() and path.stat().st_size <= LARGEST):
            _copy(name, folder)
        elif path.exists():
            left_out.append(name)
    _copy_local_settings(folder)
    return left_out


def _copy_local_settings(folder: Path) -> None:
    for name in names("--others", "--ignored", "--", LOCAL):
        _copy(name, folder)


def _copy(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(root() / name, folder / name, follow_symlinks=False)


def names(*options: str) -> list[str]:
    """List files of the working tree below the project, as `git ls-files` does."""
    output = os.fsdecode(git("ls-files", "-z", "--exclude-standard", *options))
    return [name for name in output.split("\0") if name]


def git(*arguments: str) -> bytes:
    """Run git in the project and return its output. Raises ValueError with git's message."""
    return code_copy.git(root(), *arguments)
