"""Measure train.py against a hand-written loop on the CPU of this machine: `make bench`.

The script prints the median of the rounds, with the lowest and the highest. Exit code: 1 if
train.py is slower than it must be.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.bench_speed import CPU_WORKLOADS, in_turns
from scripts.maintain.gpu_check import check
from scripts.maintain.gpu_rows import Part


def main() -> int:
    parts = [Part(name, 300, in_turns(name, "cpu"), alone=True) for name in CPU_WORKLOADS]
    done = check(parts)
    return int(any(row.wrong for rows in done.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
