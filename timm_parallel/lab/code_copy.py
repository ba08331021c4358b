"""Copy of the code of a commit as a plain folder. The repository is only read."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path


def copy_commit(
    repository: Path, commit: str, folder: Path, largest: int | None = None
) -> list[str]:
    """Write the files of a commit to a new folder. Return the names of those that are left out,
    because they have more bytes than `largest`. Raises ValueError if git does not have the commit.
    """
    left_out = []
    with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", commit))) as archive:
        for member in archive:
            if largest is not None and member.size > largest:
                left_out.append(member.name)
            else:
                # A link to data outside of the repository stays a link.
                archive.extract(member, folder, filter="tar")
    return left_out


def apply_diff(folder: Path, diff: Path) -> None:
    """Apply what `git diff` has printed to a plain folder. Raises ValueError if it does not fit."""
    # Git refuses a file without changes, which code.diff is if only untracked files were there.
    if "\ndiff --git " in f"\n{diff.read_text(encoding='utf-8')}":
        git(folder, "apply", "--whitespace=nowarn", str(diff.resolve()), **no_repository(folder))


def no_repository(folder: Path) -> dict[str, str]:
    """Return environment variables with which git takes a folder inside a repository for a plain
    one. Otherwise `git apply` would skip files there without a word.
    """
    return {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "GIT_OPTIONAL_LOCKS": "0"}


def git(folder: Path, *arguments: str, **variables: str) -> bytes:
    """Run git in a folder and return its output. Raises ValueError with git's message."""
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder))
    # The filter of Git LFS would download large files into .git.
    environment = {**os.environ, "GIT_LFS_SKIP_SMUDGE": "1", **variables}
    done = subprocess.run(
        ["git", *options, *arguments], env=environment, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"git {arguments[0]}: {os.fsdecode(done.stderr).strip()}")
    return done.stdout
