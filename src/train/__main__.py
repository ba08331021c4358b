"""One rank of a run: `python -m src.train <run folder>`. The engine prepares the folder and starts the ranks."""

import sys
from pathlib import Path

from src.engine.launch.rank import main
from src.engine.machine.process import exit_process, keep_running_without_stdout
from src.train import run_training

if __name__ == "__main__":
    keep_running_without_stdout()
    exit_process(main(Path(sys.argv[1]), run_training))
