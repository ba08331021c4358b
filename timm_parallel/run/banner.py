"""Log the settings of a run before its first step, and its results after its last step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from timm_parallel.data.decode import decoder_of
from timm_parallel.keys import ResolvedConfig, is_out_of_time
from timm_parallel.machine import hardware
from timm_parallel.machine.text import change_text, plural
from timm_parallel.parallel.strategy import chunk_sizes, device_model
from timm_parallel.record.result import Result
from timm_parallel.run.meter import summary_lines
from timm_parallel.run.parts import RunParts, count_parameters

log = logging.getLogger(__name__)
# Share of the time for which devices may wait for data before the last lines of a run mention it.
WAIT = 0.1


def show_banner(parts: RunParts, folder: Path) -> None:
    """Log the model, data, strategy, batch sizes, steps, learning rate and folder of a run."""
    # Look for the decoder on every rank before its loader workers start. They inherit the result,
    # so none of them imports torchcodec again, or warns again that it is missing.
    decoder = decoder_of(parts.dataset.train)
    if not parts.strategy.group.is_first:
        return
    config, loader = parts.config, parts.train_loader
    sampler, workers = loader.sampler, loader.num_workers
    loading = (
        f"{plural(workers, 'loader process', 'es')} per rank"
        if workers
        else "read without loader processes"
    )
    if loader.replay is not None:
        loading += f", replays {plural(loader.replay, 'batch', 'es')}"
    steps = f"{parts.total_steps} = {config.train.epochs} epochs x {parts.steps_per_epoch}"
    if parts.total_steps == config.train.max_steps:
        steps = f"{parts.total_steps} (max_steps)"
    if config.train.max_minutes is not None:
        steps += f", at most {config.train.max_minutes:g} minutes"
    if parts.progress.step:
        steps += f", from {parts.progress.step}"
    facts = {
        "model": f"{config.model.name}, {count_parameters(parts.state.model):,} parameters, "
        f"{_formats(parts)}",
        "data": f"{config.data.name}, {sampler.num_images:,} training images, {sampler.dropped} "
        f"dropped per epoch, {loading}",
        "decoder": decoder,
        "outputs" if parts.task.target == "numbers" else "classes": _names(parts.task.names),
        "strategy": describe_strategy(parts),
        "batch": _batch(parts),
        "steps": steps,
        "lr": config.learning_rate_text,
        "folder": str(folder),
    }
    for name, fact in facts.items():
        if fact:
            log.info("%-11s  %s", name, fact)
    for note in parts.dataset.notes(parts.task.target):
        log.info("%-11s  %s", "data note", note)


def _formats(parts: RunParts) -> str:
    """Describe the number format and, if it is channels last, the memory format of a run."""
    # Only a project may have the key of the memory format.
    channels_last = getattr(parts.config.model, "channels_last", False) is True
    return parts.config.train.precision + (", channels last" if channels_last else "")


def _names(names: list[str]) -> str:
    """Format the number of outputs and the names of the first ones; "" if the dataset has no names.

    These names help a user to notice that the image folders were not read as intended.
    """
    if not names:
        return ""
    return f"{len(names)}: {shorten(', '.join(names), 80, placeholder=' …')}"


def describe_strategy(parts: RunParts) -> str:
    parallel, strategy = parts.config.parallel, parts.strategy
    text = f"{parallel.strategy} on {plural(parallel.devices, f'{parallel.accelerator} device')}"
    if parallel.accelerator == "cpu":
        text += f" of {plural(parallel.threads_per_device, 'thread')}"
    else:
        text += f", {device_model(strategy.device)}"
    return text + (f", {strategy.group.backend}" if strategy.group.backend else "")


def _batch(parts: RunParts) -> str:
    batch, accumulate = parts.config.global_batch, parts.config.train.accumulate
    chunks = chunk_sizes(batch, parts.config.parallel.devices)
    per_device = chunks[0] if len(set(chunks)) == 1 else chunks
    accumulated = f", x {accumulate} accumulated" if accumulate > 1 else ""
    return f"{batch} global, {per_device} per device{accumulated}"


def describe_wait(parts: RunParts, result: Result) -> str | None:
    """Describe how long the devices of a finished run waited for data, and name the keys that may
    help.

    Returns None if they waited for a tenth of the time or less. Returns None on CPUs too: there,
    loading and training share the cores, so that more workers slow down the training.
    """
    loader, speed = parts.train_loader, result.throughput.get("images_per_sec")
    without = result.images_per_sec_without_wait
    if parts.strategy.device.type == "cpu" or not speed or not without:
        return None
    share = 1 - speed / without
    if share <= WAIT:
        return None
    fetcher, fixes = loader.fetcher, []
    workers = hardware.cores() // parts.strategy.group.local_world_size
    if not fetcher.gathers:
        if loader.num_workers < workers:
            fixes.append(f"data.workers={workers}")
        if decoder_of(fetcher.split) == "PIL":
            fixes.append("pip install torchcodec")
        if fetcher.in_memory is None:
            fixes.append("smaller image files, or images in memory (data=)")
        else:
            fixes.append("less augmentation (data.augment)")
    advice = f"; to wait less: {', '.join(fixes)}" if fixes else ""
    return f"{share:.0%} of the time; without it {without:,.0f} images/s{advice}"


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


def show_end(parts: RunParts, folder: Path, result: Result, views: list[str]) -> None:
    """Log the results of a finished run, such as its folder, metrics and speed.

    `views`: commands or URLs that show the curves of the run.
    """
    config, train = parts.config, parts.config.train
    log.info("folder       %s", folder)
    log.info("metrics      %s", ", ".join(_metrics(config, result)))
    if speed := result.throughput.get("images_per_sec"):
        steps = plural(result.throughput.get("steps_timed") or 0, "timed step")
        log.info(
            "speed        %s images/s, mean of %s",
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
            steps,
        )
    if len(result.segments) > 1 and result.goodput is not None:
        share = f"{result.goodput:.0%} of the time of all segments"
        log.info("goodput      %s, in training steps that were kept", share)
    if (wait := describe_wait(parts, result)) is not None:
        log.info("data wait    %s", wait)
    # If a run ends before its other limits, train.early_stop has ended it.
    if is_out_of_time(train, result.seconds.get("training", 0.0)):
        log.info("time         %g minutes are over (train.max_minutes)", train.max_minutes)
    elif (
        train.early_stop
        and result.epochs < train.epochs
        and result.steps < (train.max_steps or math.inf)
    ):
        reason = f"no better {config.checkpoint.metric} in {train.early_stop} evaluations"
        log.info("early stop   %s (train.early_stop)", reason)
    if result.profile:
        for line in summary_lines(result.profile[0], result.seconds["start"], folder):
            log.info("%s", line)
    for number, segment in enumerate(describe_segments(result.segments)):
        log.info("%-12s %s", "" if number else "runs again", segment)
    for view in views:
        log.info("curves       %s", view)


def _metrics(config: ResolvedConfig, result: Result) -> list[str]:
    """Format the value of checkpoint.metric on each split, such as `val/loss 0.9 (best 0.9)`.

    If weights are averaged, the values of the averaged weights follow.
    """
    name = config.headline_metric
    shown = [
        f"val/{name} {_number(result.val.get(name))} (best "
        f"{_number(result.val.get(f'{name}_best'))})"
    ]
    if result.test:
        shown.append(f"test/{name} {_number(result.test.get(name))}")
    for split, numbers in (("val", result.val), ("test", result.test)):
        if f"{name}_ema" in numbers:
            shown.append(f"{split}/{name}_ema {_number(numbers[f'{name}_ema'])}")
    return shown


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.4f}"
