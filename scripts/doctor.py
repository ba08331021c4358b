"""Check this machine and print the command to start with, or what to fix: `python scripts/doctor.py
[--json]`.

It tries a step with every strategy that can run here, and needs neither network nor GPU. Exit code
1 if training could not start.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python adds the folder of a script, not the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    # This script may be started with any Python.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"Python {sys.version.split()[0]}: too old; make PYTHON=python3.12 VENV=.venv312 "
            "doctor",
            file=sys.stderr,
        )
        return 1
    try:
        from timm_parallel import CommandLine
        from timm_parallel.lab import examine
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed: make doctor, or pip install -r requirements.txt",
            file=sys.stderr,
        )
        return 1
    parser = CommandLine(__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return CommandLine.errors_in_one_line(
        lambda argv: examine(parser.parse_intermixed_args(argv).json)
    )(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
