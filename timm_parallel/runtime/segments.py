"""Segments of a run: its attempts, each with its command and the settings changed by a resume."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from timm_parallel.machine.process import started_at
from timm_parallel.machine.text import yaml_text
from timm_parallel.record.environment import read_environment
from timm_parallel.runtime.interfaces import BuiltRun

log = logging.getLogger(__name__)


def first_segment(run: BuiltRun, folder: Path) -> list[dict[str, Any]]:
    """Return the list with the only segment of a new run."""
    return [new_segment(run, folder, {})]


def describe_step(run: BuiltRun, folder: Path, step: int, steps_before_epoch: int) -> str:
    """Return a text with the images that a failed step read, and the last good checkpoint. Logs all
    image indices.
    """
    per_step = run.config.train.accumulate
    indices = run.train.global_batches((step - 1 - steps_before_epoch) * per_step, per_step)
    log.error("training images of step %d, by index: %s", step, indices)
    last = folder / "checkpoints" / "last.pt"
    good = f"the last good checkpoint is {last}" if last.exists() else "there is no checkpoint yet"
    return (
        f"it read the training images {', '.join(map(str, indices[:8]))} … (all in the log); {good}"
    )


def describe_segments(run: BuiltRun) -> list[str]:
    """Return a line per segment with its first step, command and changes; none if no resume changed
    a setting.
    """
    if not any(segment["changed"] for segment in run.segments):
        return []
    lines = []
    for segment in run.segments:
        changes = ", ".join(change_text(key, *values) for key, values in segment["changed"].items())
        lines.append(
            f"step {segment['first_step']}: {segment['command']}"
            + (f"  ({changes})" if changes else "")
        )
    return lines


def change_text(key: str, before: Any, now: Any) -> str:
    return f"{key}: {yaml_text(before)} -> {yaml_text(now)}"


def new_segment(run: BuiltRun, folder: Path, changed: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the segment that starts now, for result.json: first step, command, changed settings,
    time and devices.
    """
    return {
        "first_step": run.state.progress.step,
        "command": read_environment(folder).get("command"),
        "changed": changed,
        "started": datetime.fromtimestamp(started_at()).astimezone().isoformat(timespec="seconds"),
        "devices": run.config.parallel.devices,
    }
