"""One rank of a run: `python -m src.run <run folder>`, started by the engine on a folder that it has prepared."""

import sys
from pathlib import Path

from src.engine.launch.rank import main
from src.engine.machine.process import leave
from src.run import run

if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), run))
