"""Segments of a run: its attempts, each with its command and the settings changed by a resume."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from timm_parallel.machine.process import started_at
from timm_parallel.machine.text import change_text
from timm_parallel.record.environment import read_environment
from timm_parallel.state.parts import RunParts


def describe_segments(segments: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per segment with its first step, command and changes; none if no resume changed
    a setting.
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
    """Return the segment that starts now, for result.json: first step, command, changed settings,
    time and devices.
    """
    return {
        "first_step": parts.progress.step,
        "command": read_environment(folder).get("command"),
        "changed": changed,
        "started": datetime.fromtimestamp(started_at()).astimezone().isoformat(timespec="seconds"),
        "devices": parts.config.parallel.devices,
    }
