"""One rank of a run: `python -m src.train <run folder>`. The engine prepares the folder and starts
the ranks.

`python -m src.train --serve <file descriptor>` forks the jobs of a sweep, so that they need not
import torch and timm again.
"""

import sys
from pathlib import Path

from src.train import preload, run_training
from timm_parallel.launch.fork_server import serve
from timm_parallel.launch.rank import main
from timm_parallel.machine.process import exit_process, keep_running_without_stdout

if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]), run_training, preload)
        sys.exit()
    keep_running_without_stdout()
    exit_process(main(Path(sys.argv[1]), run_training))
