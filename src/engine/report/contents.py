"""What a report holds: all that the runs bear out; and the same as plain values, for report.json and report.csv."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.engine.record.jobs import Jobs, read_jobs
from src.engine.report.claims import correct, weigh_claims
from src.engine.report.comparison import Group, MeasuredPoint, group_runs, values, varied
from src.engine.report.decisions import Lead, lead_of, with_contrasts
from src.engine.report.evidence import Evidence, Ruling
from src.engine.report.measured import MEASURES, RunRecord
from src.engine.report.statistics import SMALLEST_DIFFERENCE, Contrast, Summary

FORMAT = 2  # of report.json, which docs/report.md describes
_OF_A_GROUP = ("title", "hardware", "accelerator", "model", "kind", "batch", "settings", "disturbed", "warnings")


@dataclasses.dataclass(frozen=True)
class Report:
    sweeps: list[Jobs]
    runs: list[RunRecord]
    counts: str  # e.g. `7 of 9 jobs done, 1 skipped, 1 running`
    smallest_difference: float
    leads: list[Lead]
    groups: list[Group]
    rulings: dict[str, list[Ruling]]  # by hardware: on the claims, then on what is wrong whatever a machine measures


def compare(runs: list[RunRecord], folders: Sequence[Path]) -> Report:
    """What the runs bear out. `folders`: those of them that are sweeps are named in the report."""
    limits = {run.config.get("sweep.smallest_difference") for run in runs}  # of several sweeps the largest
    smallest = max((limit for limit in limits if isinstance(limit, float) and limit > 0), default=SMALLEST_DIFFERENCE)
    groups = with_contrasts(group_runs(runs), smallest)
    rulings = {}
    for name in dict.fromkeys(group.hardware for group in groups):
        # A job that never began has no record of its hardware: its refusal or failure counts as evidence everywhere.
        known = [run for run in runs if not run.accelerator or run.hardware == name]
        evidence = Evidence([group for group in groups if group.hardware == name], known)
        rulings[name] = weigh_claims(evidence) + correct(evidence)
    statuses = Counter(run.status.replace("_", " ") for run in runs)
    counts = [f"{statuses.pop('done', 0)} of {len(runs)} jobs done"]
    counts += [f"{count} {status}" for status, count in sorted(statuses.items())]
    sweeps = [read_jobs(folder) for folder in folders if (folder / "jobs.json").is_file()]
    return Report(sweeps, runs, ", ".join(counts), smallest, [lead_of(group) for group in groups], groups, rulings)


def plain(report: Report, out: Path) -> dict[str, Any]:
    leads: list[dict[str, Any]] = [
        {**_place(lead.group), **_pick(lead, "sentence", "command", "point"), "contrast": _fields(lead.contrast)}
        for lead in report.leads
    ]
    rulings = [(name, ruling) for name, of_machine in report.rulings.items() for ruling in of_machine]
    return {
        "format": FORMAT,
        "sweeps": [
            {"folder": relative(sweep.folder, out), **_pick(sweep, "command", "created", "status")}
            for sweep in report.sweeps
        ],
        "counts": report.counts,
        "smallest_difference": report.smallest_difference,
        "lead": leads[0] if leads else None,
        "leads": leads,
        "groups": [
            {**_pick(group, *_OF_A_GROUP), "points": [point.label for point in group.points]} for group in report.groups
        ],
        "points": [_plain_point(group, point) for group in report.groups for point in group.points],
        "contrasts": [
            {**_place(group), "measure": measure, **dataclasses.asdict(contrast)}
            for group in report.groups
            for measure, contrasts in group.contrasts.items()
            for contrast in contrasts
        ],
        "claims": [
            {"hardware": name, **_pick(ruling, "number", "text", "figure", "verdict", "reason")}
            | {"runs": [run.name for run in ruling.runs]}
            for name, ruling in rulings
            if ruling.number
        ],
        "corrections": [
            {"hardware": name, "statement": ruling.text, "truth": ruling.reason, "figure": ruling.figure}
            for name, ruling in rulings
            if not ruling.number
        ],
        "flags": [{"run": run.name, "flags": run.flags} for run in report.runs if run.flags],
        "shared": {key: seen[0] for key, seen in values(run.config for run in report.runs).items() if len(seen) == 1},
        "varied": varied(report.runs),
        "runs": [row(run, out) for run in report.runs],
    }


def relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out)).as_posix()


def row(run: RunRecord, out: Path) -> dict[str, Any]:
    """One of report.csv. An empty field was not recorded."""
    return {
        "run": run.name,
        "folder": relative(run.folder, out),
        "reason": run.doubt or run.reason,
        "compared": run.comparable,
        "hardware": run.hardware if run.environment else "",
        "host": " ".join(run.hosts),
        **_pick(
            run, "status", "commit", "accelerator", "strategy", "devices", "nodes", "block", "position", "neighbours"
        ),
        **{name: run.integer(name) for name in ("world_size", "batch_size", "threads_per_device")},
        "precision": run.config.get("train.precision"),
        "batch_size_per_device": run.config.get("data.batch_size_per_device"),
        "workers": run.config.get("data.workers"),
        "seed": run.config.get("seed"),
        "started": run.result.get("started") or run.environment.get("time"),
        "model": run.result.get("model"),
        "scaling": "weak" if run.config.get("data.batch_size_per_device") is not None else "strong",
        "stand_in_for_devices": "threads on CPU" if run.stand_in else "",
        **{name: run.measure(name) for name in MEASURES},
        **(run.step_parts or {}),
        "peak_bytes": " ".join(f"{peak:.0f}" for peak in run.peak_bytes),
        "val_loss": run.number("val.loss"),
        "total_seconds": run.number("seconds.total"),
        "flags": "; ".join(run.flags),
        "overrides": " ".join(run.overrides),
    }


def _plain_point(group: Group, point: MeasuredPoint) -> dict[str, Any]:
    return {
        **_place(group),
        **_pick(point, "label", "strategy", "devices", "nodes", "options", "stand_in", "needless_threads", "flagged"),
        "runs": [run.name for run in point.runs],
        "over_single": _fields(group.over_single(point)),
        "efficiency": group.efficiency(point),
        **{name: _fields(point.measure(name)) for name in MEASURES},
        "peak_bytes": [_fields(peak) for peak in point.peak_bytes],
        "parts_ms": {name: _fields(part) for name, part in point.parts.items()},
    }


def _place(group: Group) -> dict[str, Any]:
    return {"group": group.title, "hardware": group.hardware}


def _pick(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _fields(value: Contrast | Summary | None) -> dict[str, Any] | None:
    return dataclasses.asdict(value) if value else None
