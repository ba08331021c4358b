"""A script that starts itself again as ranks: for commands beside train.py, which leave no run folder."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from src.engine.machine import hardware


def start_again_as_ranks(devices: int | str, script: str, arguments: list[str]) -> NoReturn:
    """Become torchrun on `script arguments`, with one rank per device (auto: all CUDA devices, else 2 where there are cores)."""
    count = len(hardware.visible_cuda_devices()) or min(2, hardware.cores()) if devices == "auto" else int(devices)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # until the strategy sets it; torchrun would warn of it
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    os.execv(sys.executable, [sys.executable, *torchrun, script, *arguments])
