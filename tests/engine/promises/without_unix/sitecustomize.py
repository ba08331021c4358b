"""Hide names that Windows lacks from this project, in every Python process with this folder on PYTHONPATH.

Modules are hidden from src/ only, because torch and psutil on Linux need them.
"""

import builtins
import os
import signal
import time

HIDDEN = ("fcntl", "resource", "pwd", "grp", "termios")
whole_import = builtins.__import__


def import_on_windows(name, globals=None, *rest, **named):
    asking = (globals or {}).get("__name__", "")
    asked_by = (globals or {}).get("__file__") or ""
    if name in HIDDEN and (asking.startswith("src.") or asked_by.endswith(("train.py", "evaluate.py"))):
        raise ImportError(f"{name}: hidden")
    return whole_import(name, globals, *rest, **named)


builtins.__import__ = import_on_windows
for place, names in (
    (signal, ("SIGHUP", "SIGUSR1", "SIGUSR2")),
    (os, ("sched_getaffinity", "killpg", "getpgid", "pread", "geteuid")),
    (time, ("clock_gettime_ns",)),
):
    for name in names:
        delattr(place, name)
