"""Before any device: `python scripts/plan.py key=value … parallel.devices=1,8,64` plans a run on hardware that is not here.

A table with shards, steps, learning rate, FLOPs and tensor bytes per device; `--json` gives everything as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.config.arguments import CommandLine, counts, refused_in_a_line


@refused_in_a_line
def main(argv: list[str]) -> int:
    parser = CommandLine(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--parallel.devices", type=counts, default=[1], dest="devices", help="e.g. 1,8,64")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.read(argv)

    from src.run.plan import plan, show

    plans = plan(arguments.overrides, arguments.devices)
    if arguments.json:
        print(json.dumps([one.as_json() for one in plans], indent=2))
    else:
        show(plans)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
