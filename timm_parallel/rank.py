"""Process of one rank of a run: `python -m timm_parallel.rank <app> <run folder>`.

With `python -m timm_parallel.rank <app> --serve <file descriptor>` the process is a server instead.
It forks the jobs of a sweep, which saves each job the import of torch and timm.
"""

from __future__ import annotations

import sys
from pathlib import Path

from timm_parallel.app import find_app
from timm_parallel.launch.fork_server import serve
from timm_parallel.launch.rank import main
from timm_parallel.machine.signals import exit_process
from timm_parallel.machine.streams import keep_running_without_stdout

if __name__ == "__main__":
    find_app(sys.argv[1])
    if sys.argv[2] == "--serve":
        serve(int(sys.argv[3]))
        sys.exit()
    keep_running_without_stdout()
    exit_process(main(Path(sys.argv[2])))
