"""The comparison report again: `python scripts/report.py <sweep folder> [more folders]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.machine.secrets import mask
from src.engine.report.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(description="Write report.html, .md, .csv and .json from sweep or run folders.")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="sweep folders, finished or not, or folders of ended runs"
    )
    parser.add_argument("--out", type=Path, help="folder for the four files (default: the first folder)")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.folders, arguments.out))
    except ValueError as error:
        print(f"report.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
