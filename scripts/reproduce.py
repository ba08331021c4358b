"""Repeat a run and compare it bit for bit: `python scripts/reproduce.py run=<run folder>
[steps=50]`.

The script trains the recorded commit, changed by code.diff, with the saved config on the same
number of devices, in `<run>/reproduced`. It compares losses, metrics and the hash of the weights,
and writes `<run>/certificate.json`. Exit code: 0 reproduced, 3 not reproduced, 2 refused by this
script or by train.py, 1 the repeated run failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line, number_argument
from timm_parallel.lab import reproduce_run


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument(
        "--steps",
        type=number_argument(int, least=1),
        default=50,
        help="steps to repeat (default: 50)",
    )
    arguments = parser.parse_intermixed_args(argv)
    return reproduce_run(arguments.run, arguments.steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
