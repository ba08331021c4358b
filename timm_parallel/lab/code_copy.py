"""Copy of the code of a commit as a plain folder. The repository is only read."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path


def copy_commit(repository: Path, commit: str, folder: Path) -> None:
    """Write the files of a commit to a new folder. Raises ValueError if git does not have it."""
    archive = _git(repository, "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def apply_diff(folder: Path, diff: Path) -> None:
    """Apply what `git diff` has printed to a plain folder. Raises ValueError if it does not fit."""
    # Git refuses a file without changes, which code.diff is if only untracked files were there.
    if "\ndiff --git " in f"\n{diff.read_text(encoding='utf-8')}":
        _git(folder, "apply", "--whitespace=nowarn", str(diff.resolve()), **no_repository(folder))


def no_repository(folder: Path) -> dict[str, str]:
    """Return environment variables with which git takes a folder inside a repository for a plain
    one. Otherwise `git apply` would skip files there without a word.
    """
    return {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}


def _git(folder: Path, *arguments: str, **variables: str) -> bytes:
    """Run git in a folder and return its output. Raises ValueError with git's message."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"git {arguments[0]}: {os.fsdecode(done.stderr).strip()}")
    return done.stdout
