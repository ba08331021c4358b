"""Print a hash of the names and contents of all files in timm_parallel, without files that git
ignores.

`make test` in a fork compares this hash with the one in .template.json. If they are equal, the
library is that of the template, and its tests are skipped.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

LIBRARY = ("timm_parallel",)


def library_hash(root: Path) -> str:
    """Compute the hash of the library in the working tree of a repository, including changes that
    are not committed.
    """
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *LIBRARY,
    ]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    digest = hashlib.sha256()
    for name in sorted({*names} - {""}):
        if (root / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()


if __name__ == "__main__":
    print(library_hash(Path(__file__).resolve().parents[1]))
