"""Write the report of a sweep again, or of several sweeps: `python scripts/report.py <sweep folder>
[more folders]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line
from timm_parallel.lab import write_report


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line("Write report.html, .md, .csv and .json from sweep or run folders.")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="of sweeps, finished or not, or of ended runs"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the four files (default: the first folder)"
    )
    arguments = parser.parse_intermixed_args(argv)
    print(write_report(arguments.folders, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
