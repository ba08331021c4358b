"""Copy the code of a Git commit to a plain folder. The repository itself does not change."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path


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
