"""Describe the segments of a run: its start and each resume, with the command and the changed
settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from timm_parallel.machine.process import started_at
from timm_parallel.machine.text import change_text
from timm_parallel.record.environment import read_environment
from timm_parallel.state.parts import RunParts


def describe_segments(segments: Sequence[dict[str, Any]]) -> list[str]:
    """Format one line per segment of a run, with its first step, command and changed settings.

    Returns no lines if no resume has changed a setting.
    """
    if not any(segment["changed"] for segment in segments):
        return []
    lines = []
    for segment in segments:
        changes = ", ".join(change_text(key, *values) for key, values in segment["changed"].items())
        lines.append(
            f"step {segment['first_step']}: {segment['command']}"
            + (f"  ({changes})" if changes else "")
        )
    return lines


def new_segment(parts: RunParts, folder: Path, changed: dict[str, list[Any]]) -> dict[str, Any]:
    """Build the entry in result.json for the segment of the run that starts now.

    `changed`: dictionary from each setting that a resume changed to its values before and now.
    """
    began = time.time() - (time.perf_counter() - started_at())
    return {
        "first_step": parts.progress.step,
        "command": read_environment(folder).get("command"),
        "changed": changed,
        "started": datetime.fromtimestamp(began).astimezone().isoformat(timespec="seconds"),
        "devices": parts.config.parallel.devices,
    }
