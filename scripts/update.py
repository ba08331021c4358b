"""Merge a newer template into a fork: `make update [FROM=<remote or URL>] [KEEP="README.md conf"]`.

The script replaces the library, a wheel or its folder, merges all other files with yours, runs the
tests and stages the result. It does not commit. After a conflict or a failed test, the fork is as
it was. `make own-library` replaces the wheel by the folder in the same way, at the fork's commit of
the template.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

RECORD = ".template.json"
# Folders of the library. An update replaces them without merging changes of the fork.
LIBRARY = ("timm_parallel", "vendor")
MAKE_FORK = "scripts/maintain/fork.py"


class Conflict(Exception):
    """Raised if the fork and the template changed the same files in different ways."""


def main(arguments: Sequence[str]) -> int:
    """Merge a newer template into a fork. Return the exit code: 0 if the template is staged or
    already there, 1 for a conflict or a failed test, 2 for a wrong argument.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--from",
        dest="source",
        default="template",
        help="remote or URL; default: the remote template",
    )
    parser.add_argument(
        "--keep", nargs="*", default=[], help="files and folders whose conflicts your version wins"
    )
    parser.add_argument(
        "--library",
        choices=("wheel", "source"),
        help="replace the library by this form of the same version, instead of taking a newer one",
    )
    parser.add_argument("--test", default="make test", help="command that must exit with 0")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="folder of the fork"
    )
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    try:
        newest = take(root, options.source, options.keep, options.test, options.library)
    except (Conflict, ValueError) as error:
        print(f"update: {error}", file=sys.stderr)
        return 1 if isinstance(error, Conflict) else 2
    except subprocess.CalledProcessError as error:
        print(
            f"update: {options.test} exited with {error.returncode}; everything is put back",
            file=sys.stderr,
        )
        return 1
    print(
        f"update: the template's {newest[:10]} is staged; look at git diff --cached, then git "
        "commit"
    )
    return 0


def take(
    root: Path, source: str, keep: Sequence[str], test: str, library: str | None = None
) -> str:
    """Stage the newest commit of the template, or another form of the library, and return the hash
    of the template's commit.

    Raises Conflict if both sides changed a file, ValueError if the update cannot start, and
    CalledProcessError if a test fails. After each of these errors, the fork is as it was.
    """
    record = read_record(root)
    newest = fetch(root, source)
    base = find_base(root, source, record["template_commit"], newest)
    options = list(record["options"])
    if library is not None:
        newest = base
        options = [word for word in options if not word.startswith("--library=")]
        options.append(f"--library={library}")
    if base == newest and sorted(options) == sorted(record["options"]):
        raise ValueError(f"the fork already has commit {newest[:10]} of {source} in this form")
    head = git(root, "rev-parse", "HEAD")
    result = merge(root, head, base, newest, record, options, keep)
    refuse_to_overwrite_ignored_files(root, head, result)
    print(f"update: {newest[:10]} of {source} is merged; running {test}", flush=True)
    git(root, "read-tree", "-m", "-u", head, result)
    passed = False
    try:
        subprocess.run(shlex.split(test), cwd=root, check=True)
        passed = True
    finally:
        # Undo the update in `finally`, so that Ctrl-C undoes it too.
        if not passed:
            put_back(root, result, head)
            if (root / "vendor").is_dir():
                # The tests have installed the newer wheel.
                subprocess.run(["make", "--silent", "install"], cwd=root, check=False)
    return newest


def put_back(root: Path, result: str, head: str) -> None:
    """Undo the changes of an update in the working tree. Raises ValueError if one of the changed
    files was edited during the tests.
    """
    git(root, "update-index", "-q", "--refresh")
    try:
        # Use read-tree, because git reset --hard would overwrite edited files.
        git(root, "read-tree", "-m", "-u", result, head)
    except ValueError as error:
        fix = "git reset --hard discards the update and your edits"
        raise ValueError(
            "the tests failed, but the update cannot be undone, because you edited a file while "
            f"they ran; {fix} ({error})"
        ) from None


def read_record(root: Path) -> dict[str, Any]:
    """Read .template.json, the record of a fork. Raises ValueError if the folder is not a fork, or
    has uncommitted changes.
    """
    if not (root / RECORD).is_file():
        raise ValueError(
            f"{RECORD} does not exist, so this is not a fork; run make fork NAME=my_project first"
        )
    if Path(git(root, "rev-parse", "--show-toplevel")).resolve() != root:
        raise ValueError(
            f"{root} is not the root of a git repository; run git init and commit there"
        )
    if git(root, "status", "--porcelain"):
        raise ValueError("the working tree has uncommitted changes; commit them first (git status)")
    record: dict[str, Any] = json.loads((root / RECORD).read_text(encoding="utf-8"))
    return record


def fetch(root: Path, source: str) -> str:
    """Fetch the default branch of the template, and return the hash of its newest commit."""
    try:
        git(root, "fetch", "--quiet", "--no-tags", source, "HEAD")
    except ValueError as error:
        hint = "git remote add template <URL of the template>, or make update FROM=<URL>"
        raise ValueError(f"FROM={source}: cannot be fetched; {hint} ({error})") from None
    return git(root, "rev-parse", "FETCH_HEAD")


def find_base(root: Path, source: str, recorded: str, newest: str) -> str:
    """Return the commit of the template from which the fork started. Commits are compared by their
    files, not by their hashes.

    On GitHub, "Use this template" starts a repository with a new commit, which the template does
    not have. The files of this commit are equal to those of a commit of the template.
    """
    commits: dict[str, str] = {}
    for line in git(root, "log", "--format=%H %T", newest).splitlines():
        commit, files = line.split()
        commits.setdefault(files, commit)
    try:
        own = git(root, "log", "--format=%T", recorded).splitlines()
    except ValueError:
        own = []
    for files in own:
        if files in commits:
            return commits[files]
    raise ValueError(
        f"template_commit={recorded} in {RECORD}: no commit of FROM={source} has the same files; "
        "write the commit of the template from which this fork started (in a shallow clone, run "
        "git fetch --unshallow first)"
    )


def merge(
    root: Path,
    head: str,
    base: str,
    newest: str,
    record: dict[str, Any],
    options: Sequence[str],
    keep: Sequence[str],
) -> str:
    """Merge the changes of the template between two commits into the fork. Return the hash of the
    merged git tree. `options`: those of `make fork` for the newer commit.

    Both commits are first turned into forks. So a name that `make fork` changes, or a file that it
    deletes, does not count as a change.
    """
    # The fork's own wheel, because a wheel that is built again may differ in its bytes.
    wheels = [f"--wheel={path}" for path in (root / "vendor").glob("*.whl")]
    recorded = record["template_commit"]
    with tempfile.TemporaryDirectory(prefix="update-") as folder:
        scratch = Path(folder) / "scratch"
        git(root, "worktree", "add", "--quiet", "--detach", str(scratch), base)
        try:
            old = commit_fork(scratch, base, [*record["options"], *wheels], recorded)
            new = commit_fork(scratch, newest, options, recorded, old)
            git(scratch, "checkout", "--quiet", "--detach", "--force", head)
            # The strategy resolve ignores renames. Otherwise git could move your change into a
            # renamed file of the library, which is replaced below.
            picked = run_git(scratch, "cherry-pick", "--no-commit", "--strategy=resolve", new)
            if picked.returncode > 1:
                raise ValueError(f"git cherry-pick failed: {picked.stderr.strip()}")
            # Without a path that neither side has, which git restore refuses.
            tracked = paths(git(scratch, "ls-files", "-z"))
            tracked += paths(git(scratch, "ls-tree", "-r", "--name-only", "-z", new))
            known = {PurePosixPath(name).parts[0] for name in tracked}
            replaced_paths = sorted({*LIBRARY, RECORD} & known)
            restore = ("restore", f"--source={new}", "--staged", "--worktree", "--")
            git(scratch, *restore, *replaced_paths)
            conflicts = settle(scratch, head, keep)
            if conflicts:
                names = " ".join(conflicts)
                raise Conflict(
                    f"conflict in {names}: both you and the template changed it. Your files are "
                    f"unchanged. See the template's change with git diff {old[:10]} {new[:10]} -- "
                    f"{names}; copy what you want of it into your files, commit, and run again "
                    f'with KEEP="{names}"'
                )
            replaced = paths(
                git(root, "diff", "--name-only", "--no-renames", "-z", old, head, "--", *LIBRARY)
            )
            if replaced:
                print(
                    "update: your changes are replaced by the template's files: "
                    f"{' '.join(replaced)}"
                )
            name_commit(scratch, recorded, newest)
            return git(scratch, "write-tree")
        finally:
            git(root, "worktree", "remove", "--force", str(scratch))


def commit_fork(
    scratch: Path, commit: str, options: Sequence[str], recorded: str, *parents: str
) -> str:
    """Run `make fork` with its options on a commit of the template. Return the hash of a commit of
    the result, whose README names the commit `recorded`, so that it does not differ from the
    fork's.
    """
    git(scratch, "checkout", "--quiet", "--detach", "--force", commit)
    if not (scratch / MAKE_FORK).is_file():
        raise ValueError(
            f"commit {commit[:10]} has no {MAKE_FORK}, so it is not a commit of the template; set "
            "FROM=<URL of the template>"
        )
    command = [sys.executable, MAKE_FORK, *options]
    done = subprocess.run(command, cwd=scratch, capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise ValueError(
            f"{MAKE_FORK} failed on the template's commit {commit[:10]}: {done.stderr.strip()}"
        )
    git(scratch, "add", "--all")
    name_commit(scratch, commit, recorded)
    parent_options = [option for parent in parents for option in ("-p", parent)]
    return git(
        scratch,
        "commit-tree",
        git(scratch, "write-tree"),
        *parent_options,
        "-m",
        f"A fork of {commit}",
    )


def name_commit(scratch: Path, old: str, new: str) -> None:
    """Replace a commit of the template, to whose pages the README links, by another one."""
    readme = scratch / "README.md"
    if readme.is_file():
        readme.write_text(readme.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        git(scratch, "add", "README.md")


def settle(scratch: Path, head: str, keep: Sequence[str]) -> list[str]:
    """Resolve merge conflicts: delete files that the fork deleted, and keep the fork's version of
    the paths that the user listed in KEEP. Return the paths of the other conflicts.
    """
    # git lists up to three stages of a file: 1 is the old template, 2 the fork, 3 the newer
    # template.
    stages: dict[str, str] = {}
    for entry in paths(git(scratch, "ls-files", "--unmerged", "-z")):
        description, path = entry.split("\t")
        stages[path] = stages.get(path, "") + description.split()[2]
    conflicts = []
    for path, present in stages.items():
        if present == "13":
            git(scratch, "rm", "--quiet", "--", path)
        elif any(PurePosixPath(path).is_relative_to(kept) for kept in keep):
            git(scratch, "checkout", "--quiet", head, "--", path)
        else:
            conflicts.append(path)
    return conflicts


def refuse_to_overwrite_ignored_files(root: Path, head: str, result: str) -> None:
    """Raise ValueError if the update would overwrite a file that git ignores in the fork. This
    happens if the newer template adds a file of the same name.
    """
    added = paths(
        git(root, "diff", "--name-only", "--no-renames", "--diff-filter=A", "-z", head, result)
    )
    here = [path for path in added if os.path.lexists(root / path)]
    if here:
        raise ValueError(
            f"{' '.join(here)}: the newer template adds this file, but git ignores your file of "
            "this name; rename or delete your file"
        )


def paths(output: str) -> list[str]:
    return [path for path in output.split("\0") if path]


def git(folder: Path, *arguments: str) -> str:
    """Run git and return its output. Raises ValueError with the error message of git if the command
    fails.
    """
    done = run_git(folder, *arguments)
    if done.returncode != 0:
        raise ValueError(f"git {arguments[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Turn off hooks and recorded conflict resolutions, and set an identity. The user's settings
    # must not change the temporary commits.
    options = (
        "--literal-pathspecs",
        "-c",
        f"core.hooksPath={os.devnull}",
        "-c",
        "rerere.enabled=false",
    )
    identity = ("-c", "user.name=make update", "-c", "user.email=update@localhost")
    command = ["git", "-C", str(folder), *options, *identity, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
