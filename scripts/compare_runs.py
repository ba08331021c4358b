"""Compare the training of two runs: `python scripts/compare_runs.py <run> <run> [--tolerance
1e-3]`.

The script compares the curves in metrics.jsonl of both runs, except time and memory. The tolerance
is relative to the larger value. For curves that differ, the script prints the first step of the
difference. Exit code: 0 if the curves agree within the tolerance, 1 if they differ, 2 if length,
data or batch of the runs differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line, number_argument
from timm_parallel.lab import compare_curves


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("runs", nargs=2, type=Path, help="run folders")
    parser.add_argument(
        "--tolerance",
        type=number_argument(),
        default=1e-3,
        help="largest relative difference (default: 1e-3)",
    )
    arguments = parser.parse_intermixed_args(argv)
    first, second = arguments.runs
    curves = compare_curves(first, second, arguments.tolerance)
    width = max(len(curve.name) for curve in curves)
    for curve in curves:
        verdict = "agree"
        if curve.differs_at is not None:
            verdict = (
                f"differ from step {curve.differs_at} on: {curve.values[0]:g} and "
                f"{curve.values[1]:g}"
            )
        print(
            f"{curve.name:<{width}}  {curve.points:>5} points  largest difference "
            f"{curve.largest:.2e}  {verdict}"
        )
    return 1 if any(curve.differs_at is not None for curve in curves) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
