"""Exit this process without code that may block."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from contextlib import suppress
from typing import NoReturn

from timm_parallel.machine.lock import remove_lock_files

# True after a tracker has failed. The exit handlers of its library may then wait for a server that
# does not respond.
exit_handlers_may_block = False


def exit_process(code: int) -> NoReturn:
    """Exit with a code. After a failure in a process group, skip the destructors of NCCL and CUDA,
    which may wait for other ranks forever. The shutdown of the interpreter is then skipped too,
    because it aborts if a thread is inside torch's store.
    """
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    if exit_handlers_may_block or (code and has_group):
        if not exit_handlers_may_block:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """Exit with a code, without `finally` blocks and exit handlers, which may block. Lock files and
    temporary folders are deleted first.
    """
    remove_lock_files()
    # Delete the temporary folder of multiprocessing, in which loader workers have their sockets.
    # The module is not imported here, because any thread may call this function at any time.
    util = sys.modules.get("multiprocessing.util")
    # Keep the folder in a process that multiprocessing has started, because the folder belongs to
    # its parent.
    if util is not None and sys.modules["multiprocessing"].parent_process() is None:
        # Ignore an error, because get_temp_dir cannot create the folder on a full disk.
        with suppress(OSError):
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)
