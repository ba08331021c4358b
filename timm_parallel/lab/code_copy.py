"""Copy the code of a Git commit or of the working tree to a plain folder, for a verdict or for the
repetition of a run. The repository itself does not change.
"""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.app import root
from timm_parallel.metric import Metric

# Largest file in bytes that is copied. A larger file is hardly code.
LARGEST = 10 * 2**20
# Folder with the settings of this machine, which git ignores.
LOCAL = "conf/local"


def copy_commit(
    repository: Path, commit: str, folder: Path, largest: int | None = None
) -> list[str]:
    """Write the files of a Git commit to a new folder, except files of more than `largest` bytes.
    Return the names of the files that are left out.

    Raises ValueError if the repository does not have the commit.
    """
    left_out = []
    with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", commit))) as archive:
        for member in archive:
            if largest is not None and member.size > largest:
                left_out.append(member.name)
            else:
                # A symbolic link to data outside of the repository is copied as a link.
                archive.extract(member, folder, filter="tar")
    return left_out


def apply_diff(folder: Path, diff: Path) -> None:
    """Apply a file with the output of `git diff` to a plain folder. Raises ValueError if the
    changes do not fit the files of the folder.
    """
    # `git apply` fails on a diff without changes. The file code.diff of a run has none if only
    # untracked files were uncommitted.
    if "\ndiff --git " in f"\n{diff.read_text(encoding='utf-8')}":
        git(folder, "apply", "--whitespace=nowarn", str(diff.resolve()), **no_repository(folder))


def no_repository(folder: Path) -> dict[str, str]:
    """Return environment variables with which git treats a folder inside of a repository as a plain
    folder. Without these variables, `git apply` would skip its files and report no error.
    """
    return {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "GIT_OPTIONAL_LOCKS": "0"}


def git(folder: Path, *arguments: str, **variables: str) -> bytes:
    """Run a git command in a folder and return its output. Raises ValueError with git's message if
    the command fails.
    """
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder))
    # Do not let Git LFS download large files into .git.
    environment = {**os.environ, "GIT_LFS_SKIP_SMUDGE": "1", **variables}
    try:
        done = subprocess.run(
            ["git", *options, *arguments], env=environment, capture_output=True, check=False
        )
    except OSError as error:
        raise ValueError(
            f"git: cannot be run ({error.strerror}); install Git, or add its folder to PATH"
        ) from None
    if done.returncode != 0:
        raise ValueError(f"git {arguments[0]} failed: {os.fsdecode(done.stderr).strip()}")
    return done.stdout


@dataclass(frozen=True)
class Version:
    """Copy of one version of the code, with its own train.py and its own timm_parallel."""

    name: str
    folder: Path

    @property
    def train(self) -> list[str]:
        return [sys.executable, str(self.folder / "train.py")]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for commands of this version of the code. With them, a run finds no
        git repository, so it does not record the commit of the working tree by mistake.
        """
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, **no_repository(self.folder), "PYTHONPATH": path}

    def compose(self, overrides: list[str]) -> dict[str, Any]:
        """Compose the config with the train.py of this version of the code and return it. Raises
        ValueError with the message of train.py if it rejects the overrides.
        """
        command = [*self.train, "--cfg", "job", "--resolve", *overrides]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise ValueError(f"train.py of {self.name} rejects the command line: {reason}")
        config: dict[str, Any] = yaml.safe_load(done.stdout)
        return config

    def read(self, name: str) -> bytes:
        """Read the contents of a file of this version of the code. Return empty bytes if the
        version does not have the file.
        """
        path = self.folder / name
        return path.read_bytes() if path.is_file() else b""

    def code_of(self, metric: Metric) -> list[str]:
        """Return the source code that defines a metric in this version: its functions and its
        `Metric(…)` calls, without formatting and comments.
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
    """Return True if a node of a syntax tree belongs to a metric: it defines a function in `used`,
    or is a call of `Metric(…)` that uses only these functions.
    """
    if isinstance(node, ast.FunctionDef):
        return node.name in used
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == Metric.__name__):
        return False
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {"Metric"} <= used


def find_commit(option: str, name: str) -> str:
    """Return the full hash of a commit. Raises ValueError if the repository has no commit of that
    name.

    `option`: command-line option that named the commit, for the error message.
    """
    try:
        options = ("--verify", "--end-of-options", f"{name}^{{commit}}")
        return git(root(), "rev-parse", *options).decode().strip()
    except ValueError as error:
        raise ValueError(
            f"{option}={name}: expected a commit, branch or tag of this repository ({error})"
        ) from None


def copy_code(commit: str | None, folder: Path) -> list[str]:
    """Write the files of a commit, and this machine's settings in conf/local, to a new folder.
    Return the names of the files that are left out. `commit`: None for the working tree.
    """
    if commit is None:
        left_out = _copy_working_tree(folder)
    else:
        left_out = copy_commit(root(), commit, folder, LARGEST)
    for name in names("--others", "--ignored", "--", LOCAL):
        _copy(name, folder)
    return left_out


def _copy_working_tree(folder: Path) -> list[str]:
    """Copy the files of the working tree, also changed and untracked ones. Return the names of the
    files that are left out.
    """
    left_out = []
    for name in names("--cached", "--others"):
        path = root() / name
        # A symbolic link to data is copied as a link. Other git repositories, such as submodules,
        # are listed as folders and are left out.
        if path.is_symlink() or (path.is_file() and path.stat().st_size <= LARGEST):
            _copy(name, folder)
        elif path.exists():
            left_out.append(name)
    return left_out


def _copy(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(root() / name, folder / name, follow_symlinks=False)


def names(*options: str) -> list[str]:
    """List files of the working tree with `git ls-files`. `options`: options of that command, such
    as `--others` for untracked files.
    """
    output = os.fsdecode(git(root(), "ls-files", "-z", "--exclude-standard", *options))
    return [name for name in output.split("\0") if name]
