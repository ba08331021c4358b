"""The comparison report again: `python scripts/report.py <sweep folder> [more folders]`.

With `baseline=report.json`, which an earlier report left, every point that is in both is held against it. Exit code 1 where
the images/s of one fell by more than `max-drop` percent, and with repeats the interval bears that out; 2 for a baseline that
nothing can be held against: of other hardware or settings, or without a common point.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, number, refused_in_a_line
from src.engine.report.baseline import changes, read_report
from src.engine.report.report import write_report
from src.engine.report.statistics import FAILS


@refused_in_a_line
def main(argv: list[str]) -> int:
    parser = CommandLine("Write report.html, .md, .csv and .json from sweep or run folders.")
    parser.add_argument("folders", nargs="+", type=Path, help="of sweeps, finished or not, or of ended runs")
    parser.add_argument("--out", type=Path, help="folder for the four files (default: the first folder)")
    parser.add_argument("--baseline", type=Path, help="report.json of an earlier report, to hold this one against")
    parser.add_argument(
        "--max-drop", type=number(), default=5.0, help="percent that a point may be slower (default: 5)"
    )
    arguments = parser.read(argv)
    # Read first: it may be the file that is written anew.
    before = None if arguments.baseline is None else read_report(arguments.baseline)
    page = write_report(arguments.folders, arguments.out)
    print(page)
    if before is None:
        return 0
    found = changes(read_report(page.with_name("report.json")), before, arguments.max_drop / 100)
    for _, line in found:
        print(line)
    return 1 if any(verdict == FAILS for verdict, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
