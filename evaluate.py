"""The metrics of a finished run again, from its checkpoint: `python evaluate.py run=<run folder> [split=val|test|all]`.

Also `checkpoint=best|last|<file>` (default: what result.json names, the newest good one where there is none).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from src.secrets import mask

KEYS = {"run": None, "split": "all", "checkpoint": None}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 refused. Prints one JSON line per split."""
    try:
        options = _parse(arguments)
        from src.evaluation import evaluate_run

        for split, numbers in evaluate_run(Path(str(options["run"])), str(options["split"]), options["checkpoint"]):
            print(json.dumps({"split": split, **numbers}))
    except ValueError as error:
        print(f"evaluate.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str]) -> dict[str, str | None]:
    from src.config.names import hint

    options: dict[str, str | None] = dict(KEYS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in ("-h", "--help"):
            print(__doc__)
            raise SystemExit(0)
        if key not in KEYS or not value:
            raise ValueError(f"{argument}: unknown option{hint(key, KEYS)}")
        options[key] = value
    if options["run"] is None:
        raise ValueError("run=…: give the run folder to evaluate")
    if options["split"] not in ("val", "test", "all"):
        raise ValueError(f"split={options['split']}: allowed: val, test, all")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
