"""List the runs of outputs/: `python scripts/runs.py [metric=val/acc] [where=model.name=resnet18]`
prints a line for each, the newest first, or with metric= the best first. A number of result.json
that is no metric of the task, such as seconds/total, is sorted from large to small.

The columns are the folder, the status, the metric (by default the objective of the run), images per
second, the minutes of the last attempt, and the overrides with which the run was started. where=
may be given several times. csv=true prints CSV.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timm_parallel import command_line, errors_in_one_line
from timm_parallel.lab import show_runs


@errors_in_one_line
def main(argv: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--metric", help="sort by this number of result.json, e.g. val/acc")
    parser.add_argument(
        "--where", action="append", default=[], help="<key>=<value> in the config of a run"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)"
    )
    arguments = parser.parse_intermixed_args(argv)
    show_runs(arguments.folder, arguments.metric, arguments.where, arguments.csv)
    return 0


if __name__ == "__main__":
    # End without a message when `head` closes the pipe.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
