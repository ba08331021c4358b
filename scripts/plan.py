"""Before any device: `python scripts/plan.py key=value … parallel.devices=1,8,64` plans a run on hardware that is not here.

A table with shards, steps, learning rate, FLOPs and tensor bytes per device; `--json` gives everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src.engine.machine.secrets import mask


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py; parallel.devices=1,2,4")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    try:
        overrides, counts = split_counts(arguments.overrides)

        from src.run.plan import plan

        plans = plan(overrides, counts)
    except ValueError as error:
        print(f"plan.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([one.as_json() for one in plans], indent=2))
    else:
        from src.run.plan_table import show

        show(plans)
    return 0


def split_counts(words: list[str]) -> tuple[list[str], list[int]]:
    """(other overrides, device counts). Errors: ValueError for a count that is no number above 0."""
    key = "parallel.devices="
    texts = [text for word in words if word.startswith(key) for text in word.removeprefix(key).split(",")] or ["1"]
    for text in texts:
        if not text.isdigit() or int(text) == 0:
            raise ValueError(f"parallel.devices={text}: give whole numbers from 1, e.g. parallel.devices=1,8,64")
    return [word for word in words if not word.startswith(key)], [int(text) for text in texts]


if __name__ == "__main__":
    sys.exit(main())
