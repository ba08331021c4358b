"""Print a hash of the library: the names and contents of timm_parallel, without files that git
ignores.

`make test` of a fork compares it with .template.json, and leaves the library's tests out if it is
the template's.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

LIBRARY = ("timm_parallel",)


def library_hash(root: Path) -> str:
    """Hash the library in the working tree of the repository `root`, with changes that are not
    committed.
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
