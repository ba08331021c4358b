"""The comparison report again: `python scripts/report.py <sweep folder> [more folders]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, refused_in_a_line
from src.engine.report.report import write_report


@refused_in_a_line
def main(words: list[str]) -> int:
    parser = CommandLine("Write report.html, .md, .csv and .json from sweep or run folders.")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="sweep folders, finished or not, or folders of ended runs"
    )
    parser.add_argument("--out", type=Path, help="folder for the four files (default: the first folder)")
    arguments = parser.read(words)
    print(write_report(arguments.folders, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
