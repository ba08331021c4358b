"""Fake sweep folders for tests of the report. They hold the files that a real sweep writes, with
measurements that the test chooses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.lab.report.report import write_report
from timm_parallel.record.result import Result

GIB = 2**30
SPEEDS = {("single", 1): 1000, ("dp", 2): 1500, ("dp", 4): 1750, ("ddp", 2): 1900, ("ddp", 4): 3600}


class Sweep:
    """Builder of a fake sweep folder. `add` writes the files of one job, and `write` writes
    jobs.json, without which no report can read the folder.
    """

    def __init__(
        self, folder: Path, accelerator: str = "cuda", cores: int = 16, host: str = "node1"
    ) -> None:
        self.folder, self.accelerator, self.cores, self.host = folder, accelerator, cores, host
        self.jobs: list[dict[str, Any]] = []
        folder.mkdir(parents=True)

    def add(
        self,
        strategy: str,
        devices: int,
        speed: float = 1000.0,
        per_device: int | None = None,
        config: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        block: int = 0,
        **changes: Any,
    ) -> Path:
        """Write the run folder of a finished job, list the job for jobs.json, and return the run
        folder.

        `speed` is in images per second, `per_device` is the number of images per device, and
        `block` is the number of the repeat. `changes` replaces fields of result.json. `environment`
        replaces fields of environment.json. `config` replaces keys of config.yaml, and `options`
        replaces keys of the section parallel in config.yaml.
        """
        folder = self.folder / str(len(self.jobs))
        batch = per_device * devices if per_device else 64
        result = result_of(strategy, devices, speed, batch, self.accelerator) | changes
        write(folder / "result.json", result)
        write(folder / "environment.json", self._environment() | (environment or {}))
        data = (
            {"batch_size": None, "batch_size_per_device": per_device}
            if per_device
            else {"batch_size": batch}
        )
        frozen = {
            "seed": 42 + block,
            "model": {"name": "resnet18", "kwargs": {}},
            "data": {"name": "digits", **data},
            "parallel": {
                "strategy": strategy,
                "devices": devices,
                "accelerator": self.accelerator,
                **(options or {}),
            },
            "optim": {"lr": 0.001},
            "checkpoint": {"metric": "val/acc"},
            **(config or {}),
        }
        (folder / "config.yaml").write_text(
            yaml.safe_dump({"defaults": ["schema", "_self_"], **frozen})
        )
        overrides = (f"parallel={strategy}", f"parallel.devices={devices}")
        self.row(*overrides, status=result["status"], reason=result["reason"], block=block)
        return folder

    def repeat(self, strategy: str, devices: int, speeds: Iterable[float], **changes: Any) -> None:
        """Write one finished job per repeat of a configuration. `speeds` are the images per second
        of the repeats.
        """
        for block, speed in enumerate(speeds):
            self.add(strategy, devices, speed, block=block, **changes)

    def row(
        self, *overrides: str, status: str, reason: str = "", block: int = 0, **fields: str
    ) -> None:
        """List a job for jobs.json without writing a run folder, as for a job that was skipped or
        never started.
        """
        number = len(self.jobs)
        self.jobs.append(
            {
                "id": number,
                "name": f"{number}_x",
                "folder": str(number),
                "overrides": overrides,
                "block": block,
            }
            | {"status": status, "reason": reason, "started": None, "ended": None}
            | fields
        )

    def write(self, status: str = "done") -> Path:
        command = "python train.py -m parallel=single,dp,ddp parallel.devices=1,2,4"
        record = {
            "format": 1,
            "command": command,
            "created": "2026-11-20T21:00:00",
            "status": status,
        }
        write(self.folder / "jobs.json", record | {"jobs": self.jobs})
        return self.folder

    def _environment(self) -> dict[str, Any]:
        device = {"name": "NVIDIA H200", "memory_bytes": 140 * GIB}
        return {
            "format": 1,
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "host": self.host,
            "commit": "0123abc",
            "dirty": False,
            "libraries": {"torch": "2.14.1", "timm": "1.0.31"},
            "cpu": {"model": "EPYC 9554", "cores": self.cores, "memory_bytes": 128 * GIB},
            "devices": [{"index": n, **device} for n in range(4)]
            if self.accelerator == "cuda"
            else [],
            "cuda": "13.0",
            "driver": "580.1",
        }


def result_of(
    strategy: str, devices: int, speed: float, batch: int, accelerator: str
) -> dict[str, Any]:
    """Build the contents of result.json for a fake run. Its measurements support every claim that a
    report can make.
    """
    has_ranks = strategy in ("ddp", "fsdp")
    ranks = devices if has_ranks else 1
    step_ms = 1000 * batch / speed
    peaks = [4 * GIB] * devices if strategy != "dp" else [6 * GIB] + [2 * GIB] * (devices - 1)
    shared = {"shared": True} if strategy == "dp" and accelerator == "cpu" else {}
    proof: dict[str, Any] = {"hashes_equal": True, "parameters_hash_start": "11"}
    if strategy == "dp":
        proof["chunk_sizes"] = [batch // devices] * devices
    result = Result(
        status="done",
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        threads_per_device=1,
        world_size=devices,
        processes=ranks,
        backend={"cuda": "nccl", "cpu": "gloo"}[accelerator] if has_ranks else None,
        model="resnet18",
        parameters=11_000_000,
        batch_size=batch,
        steps=300,
        epochs=12,
        metrics={
            "loss": {"lower_is_better": True, "is_proportion": False},
            "acc": {"lower_is_better": False, "is_proportion": True},
        },
        val={"loss": 0.1, "acc": 0.957},
        throughput={"images_per_sec": speed, "step_ms": step_ms, "step_ms_p95": 1.1 * step_ms}
        | {"steps_timed": 250, "seconds_timed": 0.25 * step_ms, "halves": [speed, speed]},
        memory=[
            {"device": n, "peak_bytes": peak, "utilisation": 0.4 if strategy == "dp" else 0.95}
            | shared
            for n, peak in enumerate(peaks)
        ],
        cpu={"seconds_per_second": 1.0 * ranks},
        data_wait=0.06,
        communication={"bytes_per_step": {"single": 0, "ddp": 4.4e7}.get(strategy)}
        | {
            "ms_per_step": step_ms * 0.3 * (ranks > 1),
            "exposed_ms_per_step": step_ms * 0.08 * (ranks > 1),
        },
        seconds={"start_to_first_step": 4.0 + 3 * (ranks > 1), "total": 80.0},
        proof=proof,
    )
    waits = 0.08 * (ranks > 1)
    parts = {
        "data_ms": 0.06,
        "compute_ms": 0.9 - waits,
        "communication_ms": waits,
        "other_ms": 0.04,
    }
    return dataclasses.asdict(result) | {
        "step": {name: share * step_ms for name, share in parts.items()},
        "ranks": [
            {"rank": r, "host": "node1", "data_ms": 1.0, "compute_ms": 9.0} for r in range(ranks)
        ],
        "flags": [],
        "nodes": 1,
        "hosts": [],
        "neighbours": 0,
    }


def full_sweep(
    folder: Path, speeds: dict[tuple[str, int], float] | None = None, **kwargs: Any
) -> Sweep:
    """Build a fake sweep with three repeats of every configuration. `speeds` maps (strategy, number
    of devices) to images per second. The speed of a repeat deviates from this value by -1, 0 or 1
    %.
    """
    sweep = Sweep(folder, **kwargs)
    for place, ((strategy, devices), speed) in enumerate(
        (SPEEDS if speeds is None else speeds).items()
    ):
        sweep.repeat(
            strategy,
            devices,
            [speed * (1 + 0.01 * ((place + block) % 3 - 1)) for block in range(3)],
        )
    return sweep


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def read(folder: Path, *more: Path) -> tuple[str, str, dict[str, Any]]:
    """Write the report on one or several sweep folders, and return it as HTML text, Markdown text
    and the contents of report.json.
    """
    html = write_report([folder, *more])
    markdown = html.with_suffix(".md").read_text(encoding="utf-8")
    return (
        html.read_text(encoding="utf-8"),
        markdown,
        json.loads(html.with_suffix(".json").read_text(encoding="utf-8")),
    )


def findings(lead: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the findings of a headline result of report.json, as a dictionary from kind to
    numbers.
    """
    return {
        finding["kind"]: {key: value for key, value in finding.items() if key != "kind"}
        for finding in lead["findings"]
    }


def verdicts(*folders: Path) -> dict[int, str]:
    """Write the report on sweep folders, and return the verdict on each claim, as a dictionary from
    claim number to verdict.
    """
    return {claim["number"]: claim["verdict"] for claim in read(*folders)[2]["claims"]}
