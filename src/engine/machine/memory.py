"""Memory of this machine: what can still be taken, and what a process and its children hold."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be taken without swapping: what /proc/meminfo says, or less where a container or job has a limit."""
    return min(int(psutil.virtual_memory().available), *_left_in_cgroups())


def _left_in_cgroups() -> list[int]:
    """Of this process's cgroup and those above it (version 2). Cached files count as free: the kernel drops them first."""
    left = [2**63]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = CGROUP / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(CGROUP):
                break
            with suppress(OSError, ValueError):  # `max`: no limit here
                limit = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                files = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                left.append(max(0, limit - used + (int(files.group(1)) if files else 0)))
    return left


def held_by(pid: int) -> int:
    """Bytes that a process and all below it hold, without the libraries that they share; 0 when it has ended."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += _own_bytes(one)
    return total


def _own_bytes(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:  # no Linux, or it has just ended
        return int(process.memory_info().rss)
    return 1024 * sum(int(size) for size in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB$", text, re.MULTILINE))
