"""What a run leaves in its folder, written whole or not at all, and read back by everything downstream.

Nothing here imports torch: sweeps, reports and the command line read records in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.engine.machine.files import finite, read_json, write_json, write_text

FORMAT = 1
STATUSES = ("done", "failed", "out_of_memory", "not_finite", "skipped", "interrupted", "pruned")


@dataclass
class Result:
    """`result.json`: the one interface between a job and whoever asked for it.

    Times are seconds unless their name ends in `_ms`, memory is bytes; what is not known is null. All that is timed is
    of one window of this process: from the end of the warm-up (10 steps, of a short run a quarter) to the end of the
    last step, waiting for data and logging in it, evaluation and saving out of it. A step is one optimizer step.

    - `throughput`: `images_per_sec` = images of all devices over seconds of the window; `step_ms` (median) and
      `step_ms_p95` over the steps; `steps_timed`, `seconds_timed`; `halves`: images_per_sec of the first half of the
      steps and of the second.
    - `step`: what a mean step of rank 0 is made of. `data_ms` waiting for a batch (on a GPU: while it had nothing to
      do), `communication_ms` waiting for gradients and buffers of other ranks, `other_ms` between two steps (logging),
      `compute_ms` all else. They add up to seconds_timed / steps_timed.
    - `ranks`, one entry per rank: `rank`, `host`, `device`, `data_ms`, `compute_ms` (without waiting for other ranks, as
      far as that can be told), `step_ms`.
    - `communication`, per step: `bytes_per_step` (dp: all that moves; ddp: the gradients that are
      all-reduced), `bytes_busiest_link` over the busiest link in its
      busier direction (dp: its first device's; ddp: a link of the ring); `ms_per_step` from the first bucket's start to
      the last one's end, broadcast of buffers included, and `exposed_ms_per_step` the part of it that no computing
      hides, of the rank that waited least; `method` names where the times come from. 0 on one device.
    - `cpu`: `seconds_per_second`, processor seconds of all ranks and their loader workers per second of the window.
    - `guard`: `load` processors that other programs kept busy on rank 0's host, on average (not the load average,
      which still holds the job before); `own` those that this run did; `cores` that it may use; `steal` share of all
      processors' time that a hypervisor gave to others; `cpu_per_thread` processor seconds per second in which a thread
      was ready to run, of the rank that got least; `halves_ratio` second half over first; `temperature` (Celsius, the
      highest) and `clocks` (`sm_mhz` the lowest, `sm_mhz_max`, `slowed_by`), an entry per GPU.
    - `profile`, with train.profile_steps: per rank `parts` of a mean step of the window (`data_ms`, `forward_ms`,
      `backward_ms`, `optimizer_ms`, `other_ms`; dp: also `scatter_ms`, `replicate_ms`, `gather_ms`), `operations` with the
      most time of their own in the recorded steps before it (`name`, `calls`, `ms` per step), and the `trace`.
    - `flags`: why its figures may be disturbed, a short sentence each.
    """

    status: str
    reason: str = ""
    format: int = FORMAT
    strategy: str = ""
    accelerator: str = ""
    devices: int = 0  # asked
    threads_per_device: int | None = None
    world_size: int | None = None  # measured by an all-reduce of ones
    processes: int | None = None
    nodes: int = 1
    hosts: list[str] = field(default_factory=list)  # one per node, node 0's first
    backend: str | None = None
    tags: list[str] = field(default_factory=list)  # whatever the user calls this run
    model: str = ""
    parameters: int | None = None
    batch_size: int | None = None  # global
    steps: int = 0
    epochs: float = 0
    samples_seen: int = 0
    dropped_per_epoch: int | None = None  # tail of the shuffled epoch that fills no optimizer step
    skipped: dict[str, int] = field(default_factory=dict)  # unreadable images by split, with data.on_error=skip
    train: dict[str, Any] = field(default_factory=dict)
    val: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    cpu: dict[str, Any] = field(default_factory=dict)
    data_wait: float | None = None  # share of the window spent waiting for data
    step: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    communication: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    neighbours: int = 0  # other jobs that ran beside it on this machine; then its speed says little
    started: str | None = None  # ISO time of the command
    commit: str | None = None  # of the code
    profile: list[dict[str, Any]] = field(default_factory=list)  # with train.profile_steps, an entry per rank
    seconds: dict[str, Any] = field(default_factory=dict)
    objective: float | None = None
    parameters_hash: str | None = None
    checkpoint: str | None = None
    proof: dict[str, Any] = field(default_factory=dict)  # what was counted: indices seen, chunks, optimizers, files
    failure: dict[str, Any] | None = None  # rank, exception, traceback, log of the first rank that failed


def write_result(folder: Path, result: Result) -> None:
    assert result.status in STATUSES, result.status
    write_json(folder / "result.json", dataclasses.asdict(result))


def read_result(folder: Path) -> Result:
    """Read `folder/result.json`, of this version or an older one."""
    path = folder / "result.json"
    values = read_json(path, FORMAT, "is this a run folder, and has the run ended?")
    if values.get("status") not in STATUSES:
        raise ValueError(f"{path}: not of this project (status {values.get('status')!r}, not {', '.join(STATUSES)})")
    known = {f.name for f in dataclasses.fields(Result)}
    return Result(**{key: value for key, value in values.items() if key in known})


def read_status(folder: Path) -> str | None:
    """How the run in `folder` has ended; None while it has not, or where its result cannot be read."""
    try:
        return read_result(folder).status
    except ValueError:
        return None


class MetricsLog:
    """`metrics.jsonl`: one line per logging step and per evaluation; only rank 0 has one."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """With `resume_step`, lines past that step are dropped: the steps are about to be run again."""
        if resume_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # one write per line, so a crash loses none

    def write(self, step: int, **values: Any) -> None:
        self._file.write(json.dumps(finite({"step": step, **values}), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut off by a crash is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return
