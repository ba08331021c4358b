"""Contents of a report, before they are rendered as HTML and Markdown. `plain` converts them to
those of report.json, and `row` converts a run to a row of report.csv.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from timm_parallel.lab.analysis.findings import Finding, finding
from timm_parallel.lab.analysis.groups import Configuration, Group, values, varied
from timm_parallel.lab.analysis.headline import Recommendation
from timm_parallel.lab.analysis.runs import MEASURES, RunRecord
from timm_parallel.lab.analysis.statistics import Contrast, Summary
from timm_parallel.lab.analysis.strategies import efficiency, warnings
from timm_parallel.lab.analysis.verdict import Verdict
from timm_parallel.lab.report import tables
from timm_parallel.lab.report.claims import ClaimResult
from timm_parallel.lab.report.sentences import sentence, sentences
from timm_parallel.record.result import UNFINISHED, Jobs

# Version of the format of report.json, which docs/dev/report_method.md describes.
FORMAT = 7
_SETTINGS_OF_A_RUN = ("train.precision", "data.batch_size_per_device", "data.workers", "seed")


@dataclass(frozen=True)
class Report:
    """Contents of report.html and of the files next to it, before they are rendered."""

    sweeps: list[Jobs]
    runs: list[RunRecord]
    # Numbers of jobs by status, such as `7 of 9 jobs done, 1 skipped, 1 running`.
    counts: str
    smallest_difference: float
    # Headline result of each group of configurations.
    recommendations: list[Recommendation]
    groups: list[Group]
    # Groups of settings that are compared by a metric. Empty on a page about speed.
    settings: list[Group]
    # Hardware -> results of the claims about DP and DDP.
    claims: dict[str, list[ClaimResult]]
    # Verdict on a change of the code. None on any other page.
    verdict: Verdict | None = None

    @property
    def title(self) -> str:
        if not self.settings:
            return "Comparison of strategies and device counts"
        keys = list(dict.fromkeys(key for group in self.settings for key in group.keys))
        return f"Sweep over {', '.join(keys)}" if keys else "Repeats of one configuration"

    @property
    def notes(self) -> list[Finding]:
        """Findings on the jobs that a reader must know to rely on the report."""
        notes = []
        left = sum(job.status in UNFINISHED for sweep in self.sweeps for job in sweep.jobs)
        if left:
            jobs = sum(len(sweep.jobs) for sweep in self.sweeps)
            notes.append(finding("sweep_not_ended", count=left, jobs=jobs))
        unknown = [
            run.name for run in self.runs if run.metric_value is not None and run.metric_is is None
        ]
        if unknown:
            notes.append(finding("unknown_direction", runs=unknown))
        # The runs outside of a sweep may have any code.
        for sweep in dict.fromkeys(run.sweep for run in self.runs if run.sweep):
            of_sweep = [run for run in self.runs if run.sweep == sweep and run.commit]
            commits = list(dict.fromkeys(run.commit for run in of_sweep))
            if len(commits) > 1:
                notes.append(finding("code_changed", commits=commits))
        return notes


def plain(report: Report, out: Path) -> dict[str, Any]:
    """Convert a report to the contents of report.json, which are plain dictionaries and lists."""
    questions: list[Group] = [*report.settings, *report.groups]
    leads = [
        {
            **_place(lead.group),
            **_pick(
                lead,
                "command",
                "point",
                "value",
                "value_interval",
            ),
            "sentence": sentences(lead.findings),
            "notes": [sentence(note) for note in lead.notes],
            "findings": [
                {"kind": finding.kind, **finding.numbers}
                for finding in (*lead.findings, *lead.notes)
            ],
            "contrast": _fields(lead.contrast),
        }
        for lead in report.recommendations
    ]
    return {
        "format": FORMAT,
        "question": "metric" if report.settings else "speed",
        "sweeps": [
            {"folder": relative(sweep.folder, out), **_pick(sweep, "command", "created", "status")}
            for sweep in report.sweeps
        ],
        "counts": report.counts,
        "notes": [sentence(note) for note in report.notes],
        "smallest_difference": report.smallest_difference,
        "lead": leads[0] if leads else None,
        "leads": leads,
        "groups": [
            {
                "title": group.title,
                **_pick(group, "hardware", "settings", "disturbed"),
                "accelerator": group.runs[0].accelerator,
                "model": group.runs[0].result.get("model"),
                **dict(zip(("kind", "batch"), group.runs[0].batch, strict=True)),
                "warnings": [sentence(warning) for warning in warnings(group)],
                "points": [point.label for point in group.members],
            }
            for group in report.groups
        ],
        "points": [
            _plain_point(group, point) for group in report.groups for point in group.members
        ],
        "contrasts": [
            {**_place(group), "measure": measure, **contrast.fields}
            for group in [*report.groups, *report.settings]
            for measure, contrasts in group.by_measure.items()
            for contrast in contrasts
        ],
        "settings": [_plain_settings(group) for group in report.settings],
        "table": list(tables.results_table(questions[0]).rows) if questions else [],
        "claims": [
            {"hardware": hardware, **_pick(claim, "number", "text", "figure", "verdict", "reason")}
            | {"runs": [run.name for run in claim.runs]}
            for hardware, claims in report.claims.items()
            for claim in claims
        ],
        "flags": [{"run": run.name, "flags": run.flags} for run in report.runs if run.flags],
        "shared": {
            key: seen[0]
            for key, seen in values(run.config for run in report.runs).items()
            if len(seen) == 1
        },
        "varied": varied(report.runs),
        "runs": [row(run, out) for run in report.runs],
    }


def relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out)).as_posix()


def row(run: RunRecord, out: Path) -> dict[str, Any]:
    """Convert a run to a row of report.csv. A value that was not recorded is None, which the file
    shows as an empty cell.
    """
    return {
        "run": run.name,
        "folder": relative(run.folder, out),
        "reason": run.doubt or run.reason,
        "compared": run.comparable,
        "hardware": run.hardware if run.environment else "",
        "host": " ".join(run.hosts),
        **_pick(run, "status", "commit", "accelerator", "strategy", "devices", "nodes"),
        **_pick(run, "block", "position", "neighbours"),
        **{name: run.integer(name) for name in ("world_size", "batch_size", "threads_per_device")},
        **{key.rpartition(".")[2]: run.config.get(key) for key in _SETTINGS_OF_A_RUN},
        "started": run.result.get("started") or run.environment.get("time"),
        "model": run.result.get("model"),
        "scaling": run.batch[0],
        "stand_in_for_devices": "threads on CPU" if run.is_simulated else "",
        **{name: run.measure(name) for name in MEASURES},
        **_pick(run, "metric", "metric_value"),
        **(run.step_parts or {}),
        "peak_bytes": " ".join(f"{peak:.0f}" for peak in run.peak_bytes),
        "val_loss": run.number("val.loss"),
        "total_seconds": run.number("seconds.total"),
        "flags": "; ".join(run.flags),
        "overrides": " ".join(run.overrides),
    }


def _plain_point(group: Group, point: Configuration) -> dict[str, Any]:
    return {
        **_place(group),
        **_pick(point, "label", "options", "needless_threads", "flagged"),
        **_pick(point.first, "strategy", "devices", "nodes"),
        "stand_in": point.is_simulated,
        "runs": [run.name for run in point.runs],
        "over_single": _fields(group.over_baseline(point)),
        "efficiency": efficiency(group, point),
        **{name: _fields(point.measure(name)) for name in MEASURES},
        "metrics": {name: _fields(metric) for name, metric in point.metrics.items()},
        "peak_bytes": [_fields(peak) for peak in point.peak_bytes],
    }


def _plain_settings(group: Group) -> dict[str, Any]:
    settings = [
        {
            **_pick(setting, "label", "settings", "mean", "deviation"),
            "values": list(setting.values.values()),
            "may_be_best": setting.label in group.may_be_best,
            "lost": [run.name for run in setting.lost],
            "runs": [run.name for run in setting.runs],
            "images_per_sec": _fields(setting.speed),
            "peak_bytes": [_fields(peak) for peak in setting.peak_bytes],
        }
        for setting in group.members
    ]
    return {
        **_place(group),
        **_pick(group, "metric", "unit_of_repeats", "blocks", "keys", "missing_baseline"),
        "scale": group.scale.name,
        "baseline": group.baseline,
        "settings": settings,
    }


def _place(group: Group) -> dict[str, Any]:
    return {"group": group.title, "hardware": group.hardware}


def _pick(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _fields(value: Contrast | Summary | None) -> dict[str, Any] | None:
    if isinstance(value, Contrast):
        return value.fields
    return asdict(value) if value else None
