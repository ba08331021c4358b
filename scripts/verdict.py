"""Test if a change of the code is better: `python scripts/verdict.py base=<commit> [head=<commit>]
[key=value …]`.

The script trains the code of the commits `base` and `head` with the same seeds, and compares the
metric and images/s. It adds seeds until it can decide, at most sweep.max_repeats. Without head=, it
trains the working tree. It takes the keys of train.py; the same command again continues, and so
does `sweep.resume=<folder>`. Exit code: 0 head is better, 3 equal or no difference shown, 4 head is
worse, 2 a wrong argument, 1 jobs failed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--head", help="commit with the change (default: the working tree)")
    parser.add_argument("--on", choices=("metric", "speed"), default="metric", help="what decides")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    arguments = parser.parse_intermixed_args(argv)

    from timm_parallel.lab import resume_verdict, start_verdict

    # With --json, print progress and tables to stderr, so that stdout contains only JSON.
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        if arguments.base is None:
            code, values = resume_verdict(arguments.overrides)
        else:
            code, values = start_verdict(
                arguments.overrides, arguments.base, arguments.head, arguments.on
            )
    if arguments.json:
        print(json.dumps(values, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
