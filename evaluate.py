"""The metrics of a finished run again, from its checkpoint: `python evaluate.py run=<run folder> [split=val|test|all]`.

Also `checkpoint=best|last|<file>` (default: what result.json names, the newest good one where there is none).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from src.engine.config.words import one_of, parse_words
from src.engine.machine.secrets import mask

OPTIONS = {"run": None, "split": "all", "checkpoint": None}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 refused. Prints one JSON line per split, and another for averaged weights."""
    try:
        options = parse_words(arguments, OPTIONS, ("run",), str(__doc__))
        one_of(options, "split", "val", "test", "all")
        from src.run.evaluate import evaluate_run

        for split, numbers in evaluate_run(Path(options["run"]), options["split"], options.get("checkpoint")):
            print(json.dumps({"split": split, **numbers}))
    except ValueError as error:
        print(f"evaluate.py: {' '.join(mask(str(error)).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
