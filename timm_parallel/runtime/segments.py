"""Contents of checkpoints, and resuming a run: check its data, record changed settings. A segment
is one attempt of a run.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import Any

from timm_parallel.config.compose import save_config
from timm_parallel.keys import leaves
from timm_parallel.machine.process import started_at
from timm_parallel.machine.secrets import hide_in
from timm_parallel.machine.text import yaml_text
from timm_parallel.record.environment import read_environment
from timm_parallel.runtime import checkpoint
from timm_parallel.runtime.interfaces import BuiltRun

log = logging.getLogger(__name__)
NOT_ANNOUNCED = ("resume", "print_config")


def first_segment(run: BuiltRun, folder: Path) -> list[dict[str, Any]]:
    """Return the list with the only segment of a new run."""
    return [_segment(run, folder, {})]


def checkpoint_of(run: BuiltRun) -> dict[str, Any]:
    """Return the contents of a checkpoint: training state, data fingerprint, config and segments.
    Collective.
    """
    return {
        **checkpoint.snapshot(run.state, run.strategy),
        "classes": list(run.dataset.class_names),
        "preprocessing": dataclasses.asdict(run.preprocessing),
        "made_by": {
            "strategy": run.strategy.kind,
            "devices": run.config.parallel.devices,
            # model.weights loads the set of weights (raw or averaged) that this metric evaluates.
            "metric": run.config.checkpoint.metric,
        },
        "trained_on": _data_of_a_step(run),
        "config": _plain_config(run),
        "segments": run.segments,
    }


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


def continue_from(run: BuiltRun, contents: dict[str, Any], folder: Path) -> None:
    """Load the contents of a checkpoint into a new `run` and log changed settings. Raises
    ValueError if they do not fit.
    """
    announcements = _check_data(run, contents)
    checkpoint.restore(run.state, run.strategy, contents)
    progress, train = run.state.progress, run.config.train
    run.state.schedule.step_update(progress.schedule_step(run.steps_per_epoch))
    # Counted from the checkpoint, because earlier epochs may have had a different number of steps.
    left = (train.epochs - progress.epoch) * run.steps_per_epoch - progress.step_in_epoch
    run.total_steps = min(progress.step + left, train.max_steps or sys.maxsize)
    if run.total_steps < progress.step:
        limit = f"train.epochs={train.epochs}" if left < 0 else f"train.max_steps={train.max_steps}"
        raise ValueError(
            f"resume: {limit} is reached: the checkpoint is at step {progress.step}, "
            f"{progress.step_in_epoch} steps into epoch {progress.epoch + 1}; give a larger value "
            "to continue"
        )
    if run.mixing is not None:
        run.mixing.batch = progress.step * train.accumulate
    run.hooks.meter.expect(run.total_steps - progress.step)
    now = _plain_config(run)
    changed = {
        key: [before, now[key]]
        for key, before in contents["config"].items()
        if key in now and now[key] != before and not key.startswith(NOT_ANNOUNCED)
    }
    announcements += [_change_text(key, *values) for key, values in changed.items()]
    metric = run.config.checkpoint.metric
    if progress.start_new_best(metric.removeprefix("val/")):
        announcements.append(
            f"best.pt and train.early_stop start again, by checkpoint.metric={metric}"
        )
    for line in announcements:
        log.info("resume: %s", line)
    run.segments = [*contents["segments"], _segment(run, folder, changed)]
    if run.strategy.is_first and (parts := describe_segments(run)):
        save_config(run.config, folder, parts)


def describe_segments(run: BuiltRun) -> list[str]:
    """Return a line per segment with its first step, command and changes; none if no resume changed
    a setting.
    """
    if not any(segment["changed"] for segment in run.segments):
        return []
    lines = []
    for segment in run.segments:
        changes = ", ".join(
            _change_text(key, *values) for key, values in segment["changed"].items()
        )
        lines.append(
            f"step {segment['first_step']}: {segment['command']}"
            + (f"  ({changes})" if changes else "")
        )
    return lines


def _change_text(key: str, before: Any, now: Any) -> str:
    return f"{key}: {yaml_text(before)} -> {yaml_text(now)}"


def _check_data(run: BuiltRun, contents: dict[str, Any]) -> list[str]:
    """Return how the training data changed, [] if not. Raises ValueError for changed classes or a
    change in mid-epoch.
    """
    _check_classes(contents["classes"], list(run.dataset.class_names))
    step = contents["progress"]["step_in_epoch"]
    remedy = "start a new run with model.weights=<folder>/checkpoints/last.pt"
    # Older checkpoints have `balance` only in their config.
    before = {"balance": contents["config"].get("data.balance", 0.0), **contents["trained_on"]}
    now = _data_of_a_step(run)
    differences = [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if differences and step:
        raise ValueError(
            f"resume: the training data changed in mid-epoch (step {step} of "
            f"{before['steps_per_epoch']}): {', '.join(differences)}; the rest of the epoch would "
            f"read other images: restore the data and keys, or {remedy}"
        )
    return [f"training data: {', '.join(differences)}"] if differences else []


def _check_classes(before: list[str], now: list[str]) -> None:
    if before == now:
        return
    removed = (
        shorten(", ".join(name for name in before if name not in now), 100, placeholder=" …")
        or "none"
    )
    added = (
        shorten(", ".join(name for name in now if name not in before), 100, placeholder=" …")
        or "none"
    )
    raise ValueError(
        "resume: the data's class names are not those of the checkpoint: only in the checkpoint: "
        f"{removed}; only in the data: {added}; labels would mean other classes: rename the "
        "folders back, or start a new run"
    )


def _data_of_a_step(run: BuiltRun) -> dict[str, Any]:
    """Return all settings that decide which images a step reads; the number of devices is not one
    of them.
    """
    config = run.config
    return {
        "images": run.train.sampler.num_images,
        "listing": run.listing,
        "steps_per_epoch": run.steps_per_epoch,
        "images_per_step": config.global_batch * config.train.accumulate,
        "seed": config.seed,
        **config.data.sampling,
    }


def _plain_config(run: BuiltRun) -> dict[str, Any]:
    """Return the config of a run as dotted key -> value, with secrets replaced."""
    return dict(hide_in({key: value for key, value, _ in leaves(run.config)}))


def _segment(run: BuiltRun, folder: Path, changed: dict[str, list[Any]]) -> dict[str, Any]:
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
