"""Compare the training of two runs: `python scripts/compare_runs.py <run> <run> [--tolerance 1e-3]`.

Compares the curves in their metrics.jsonl, without those of time or memory. Exit code 0 if they agree within the tolerance
(relative to the larger value); 1 if they part, with the first step at which each curve does; 2 for runs that cannot be
compared: of different length, data or batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, number, refused_in_a_line
from src.engine.record.curves import compare


@refused_in_a_line
def main(argv: list[str]) -> int:
    parser = CommandLine(__doc__)
    parser.add_argument("runs", nargs=2, type=Path, help="run folders")
    parser.add_argument("--tolerance", type=number(), default=1e-3, help="largest relative difference (default: 1e-3)")
    arguments = parser.read(argv)
    one, other = arguments.runs
    found = compare(one, other, arguments.tolerance)
    width = max(len(curve.name) for curve in found)
    for curve in found:
        verdict = "agree"
        if curve.parts_at is not None:
            verdict = f"part at step {curve.parts_at}: {curve.values[0]:g} against {curve.values[1]:g}"
        print(f"{curve.name:<{width}}  {curve.points:>5} points  largest difference {curve.largest:.2e}  {verdict}")
    return 1 if any(curve.parts_at is not None for curve in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
