"""Test the library of a fork with the template's project: `python scripts/test_library.py [pytest
arguments]`.

The tests of timm_parallel train the template's models on its datasets, with its config. A fork may
change all of these, so `make fork` saves the template's project in PROJECT. This script unpacks the
project into a temporary folder, copies timm_parallel there and runs the tests. With --if-changed,
it does so only if the hash of timm_parallel differs from the one in .template.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "timm_parallel"
PROJECT = f"{LIBRARY}/tests/project.zip"
RECORD = ".template.json"
# Paths that the library's tests read or run, as pathspecs of git.
FILES = (
    *("src", "conf", "scripts", ":!scripts/maintain", "train.py", "evaluate.py"),
    *(".gitignore", "Makefile", "pyproject.toml", "requirements*.txt", "docs/dp_and_ddp.md"),
)


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the tests of the library in a fork, and return the exit code of pytest. The code is 0 if
    the tests need not run, and 2 if the folder is not a fork or PROJECT is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--if-changed", action="store_true")
    options, for_pytest = parser.parse_known_args(arguments)
    # A fork may install the library as a package and delete the folder.
    if not (root / LIBRARY).exists():
        return 0
    for path, fix in (
        (RECORD, "this is not a fork; run make test"),
        (PROJECT, "restore it from git, for example from the commit of make fork"),
    ):
        if not (root / path).exists():
            print(f"test_library: {path} does not exist: {fix}", file=sys.stderr)
            return 2
    recorded = json.loads((root / RECORD).read_text(encoding="utf-8"))["library_hash"]
    if options.if_changed and library_hash(root) == recorded:
        return 0
    with tempfile.TemporaryDirectory(prefix="test-library-") as name:
        folder = Path(name)
        unpack(root, folder)
        print(f"test_library: testing {LIBRARY} in {folder}", flush=True)
        if not any(argument.startswith(LIBRARY) for argument in for_pytest):
            for_pytest.append(f"{LIBRARY}/tests")
        command = [sys.executable, "-m", "pytest", *for_pytest]
        return subprocess.run(command, cwd=folder, check=False).returncode


def save_project(root: Path) -> None:
    """Write the template's files that the library's tests need to PROJECT, as a zip file.

    Equal files give equal bytes, so an update changes PROJECT only if it changes one of the files.
    The zip file is not compressed, so git can store the difference from the one before.
    """
    names = _git(root, "ls-files", "-z", "--", *FILES).split("\0")[:-1]
    with zipfile.ZipFile(root / PROJECT, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), (root / name).read_bytes())


def unpack(root: Path, folder: Path) -> None:
    """Create a repository in an empty folder, with the template's project and a copy of the
    library.
    """
    shutil.unpack_archive(root / PROJECT, folder)
    for path in library_files(root):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, folder / path)
    identity = ("-c", "user.name=test_library", "-c", "user.email=test_library@localhost")
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    _git(folder, *identity, "commit", "--quiet", "--no-verify", "--message=library tests")


def library_hash(root: Path) -> str:
    """Compute a hash of the names and contents of the library's files in the working tree of a
    repository, including changes that are not committed.
    """
    digest = hashlib.sha256()
    for name in library_files(root):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()


def library_files(root: Path) -> list[str]:
    """Return the sorted paths of the library's files that git tracks or would add."""
    listed = _git(
        root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", LIBRARY
    )
    return sorted(name for name in {*listed.split("\0")} - {""} if (root / name).is_file())


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
