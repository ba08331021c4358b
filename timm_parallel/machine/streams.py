"""Standard streams that are closed, or whose reader has exited."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device if they are closed, as in `python train.py
    >&-`. Another file would otherwise get the number of a stream, and its content.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere == number:
                os.set_inheritable(number, True)
            else:
                os.close(nowhere)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def keep_running_without_stdout() -> None:
    """Discard output after the reader of stdout has exited, as in `python train.py | head -n 2`, on
    a full disk, and if stdout is closed. The run would otherwise fail. The same is true of stderr.
    """
    open_closed_streams()
    for name in ("stdout", "stderr"):
        out = getattr(sys, name)
        if isinstance(out, io.TextIOWrapper) and not out.isatty():
            buffer = io.BufferedWriter(_Pipe(out.fileno(), "w", closefd=False))
            wrapped = io.TextIOWrapper(
                buffer, out.encoding, out.errors, line_buffering=out.line_buffering
            )
            setattr(sys, name, wrapped)


class _Pipe(io.FileIO):
    """File that discards what cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        # Discard this output only, because the disk may have space again later.
        except OSError:
            pass
        return len(data)
