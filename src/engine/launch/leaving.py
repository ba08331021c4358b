"""The end of a process that may be a rank. No torch: the command line ends here too."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process. Whatever it had to write down is written.

    A rank of NCCL's that has failed, or was stopped, goes at once after Python's own exit handlers: the destructors of its
    communicators and of CUDA may wait for ranks that never answer, where no watchdog looks any more. Gloo's do not wait,
    and ranks that end well have left their group before.
    """
    if code and _is_in_group_of("nccl"):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_in_group_of(backend: str) -> bool:
    """Whether this process is in a process group of torch's; one that never imported it is in none."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and backend in dist.get_backend()
