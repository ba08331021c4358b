"""Plan a run on hardware that this machine does not have: `python scripts/plan.py key=value …
parallel.devices=1,8,64`.

The script prints a table with shards, steps, learning rate, FLOPs, and memory per device.
`--json` prints all values as JSON. If this machine does not have the data, give its size:
`images=1281167 classes=1000`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, counts_argument, errors_in_one_line, number_argument


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument(
        "--parallel.devices",
        type=counts_argument,
        default=[1],
        dest="devices",
        help="e.g. 1,8,64",
    )
    parser.add_argument(
        "--images",
        type=number_argument(int, least=1),
        help="in the training split, instead of reading the data",
    )
    parser.add_argument("--classes", type=number_argument(int, least=2), help="of these images")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_intermixed_args(argv)
    images, classes = arguments.images, arguments.classes
    if images is None and classes is not None:
        raise ValueError(f"classes={classes}: needs images too, e.g. images=1281167")
    if images is not None and classes is None:
        raise ValueError(f"images={images}: needs classes too, e.g. classes=1000")

    from src.commands.plan import plan, show_plan

    plans = plan(
        arguments.overrides, arguments.devices, None if images is None else (images, classes)
    )
    if arguments.json:
        print(json.dumps([asdict(row) for row in plans], indent=2))
    else:
        show_plan(plans)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
