"""Check this machine: `python scripts/doctor.py [quick=true] [json=true]` prints the command to
start with, or what to fix.

The script trains two steps with every strategy that this machine can run; quick=true leaves them
out, for example on a login node. It needs neither a network nor a GPU. Exit code: 1 if training
cannot start.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    # Check the version here, because the system's Python, which may be older, can start this
    # script.
    if sys.version_info < (3, 11):  # noqa: UP036
        print(
            f"Python {sys.version.split()[0]}: too old; make PYTHON=python3.12 VENV=.venv312 "
            "doctor",
            file=sys.stderr,
        )
        return 1
    try:
        from timm_parallel import command_line, errors_in_one_line
        from timm_parallel.lab import examine
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed: make doctor, or pip install -r requirements.txt",
            file=sys.stderr,
        )
        return 1
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="train no steps")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")

    @errors_in_one_line
    def run(argv: list[str]) -> int:
        given = parser.parse_intermixed_args(argv)
        return examine(given.json, given.quick)

    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
