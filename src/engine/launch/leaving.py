"""The end of a process that may be a rank. No torch: the command line ends here too."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process. Whatever it had to write down is written.

    A rank that has failed, or was stopped, is still in its process group, and goes at once after Python's own exit
    handlers. The destructors of NCCL's communicators and of CUDA may wait for ranks that never answer, where no watchdog
    looks any more; and a thread that is inside torch's store while the interpreter shuts down would abort the process.
    """
    if code and _is_in_group():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_in_group() -> bool:
    """True if this process is in a process group of torch's; one that never imported torch is in none."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
