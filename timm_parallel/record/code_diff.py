"""Write `code.diff` of a run: uncommitted changes of tracked files, and the names of untracked
files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from timm_parallel.app import root
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import mask_code
from timm_parallel.record.environment import output_of

CODE_DIFF = "code.diff"
# Limits of code.diff: bytes to keep, and seconds that git may take. The diff of a changed notebook
# or data file can have any size.
LARGEST, SECONDS = 1_000_000, 5
# If a diff is incomplete, its last line starts with this text.
CUT = "cut: "
# These options override the git settings of the user, which may add colors or run other programs.
# `git apply` needs the prefixes a/ and b/.
DIFF = (
    "diff",
    "HEAD",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
UNTRACKED = ("ls-files", "--others", "--exclude-standard", "--directory")


def write_code_diff(folder: Path, dirty: bool | None, project: Path | None = None) -> None:
    """Write `code.diff` into a run folder if the code has uncommitted changes, else delete an older
    one.

    Secrets are masked. A diff of more than LARGEST bytes is cut, and its last line says so.
    `dirty`: whether there are uncommitted changes.
    """
    path = folder / CODE_DIFF
    path.unlink(missing_ok=True)
    if dirty:
        # Put the names of untracked files first, because `git apply` ignores lines before the first
        # diff.
        project = project or root()
        names = output_of("git", "-C", str(project), *UNTRACKED) or ""
        untracked = "".join(f"untracked: {name}\n" for name in names.splitlines())
        write_text(path, mask_code(untracked + _diff(project)))


def _diff(root: Path) -> str:
    """Return the output of `git diff HEAD`, cut to LARGEST bytes and ended by a line that
    says so.
    """
    command = ("git", "-C", str(root), *DIFF)
    try:
        output = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout
        if len(output) <= LARGEST:
            return output.decode(errors="replace")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = error.stdout or b""
    # Drop the incomplete last line, because a secret that is cut in two would not be masked.
    lines = output[: output.rfind(b"\n", 0, LARGEST) + 1].decode(errors="replace")
    return f"{lines}{CUT}larger than {LARGEST:,} bytes, or git failed\n"
