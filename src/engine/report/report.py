"""Comparison report of one or more sweeps: report.html, report.md, report.csv, report.json, and the plots as files."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd

from src.engine.analysis.contrasts import Recommendation, recommend, with_contrasts
from src.engine.analysis.groups import Group, MeasuredPoint, group_runs
from src.engine.analysis.runs import MEASURES, RunRecord, values, varied
from src.engine.analysis.statistics import SMALLEST_DIFFERENCE, Contrast, Summary
from src.engine.analysis.wording import percent
from src.engine.machine.files import write_json, write_text
from src.engine.record.jobs import Jobs, read_jobs
from src.engine.report import plots, tables
from src.engine.report.claims import evaluate_claims
from src.engine.report.collect import collect
from src.engine.report.evidence import ClaimResult, Evidence

ROOT = Path(__file__).resolve().parents[3]
# Bounds on report.html, which stays below 2 MB; report.csv and report.json always hold everything.
MOST_GROUPS_PLOTTED = 10
MOST_PLOT_BYTES = 1_000_000
MOST_GROUPS_SHOWN = 30
PLOTS = "report_plots"  # folder next to the report
FORMAT = 3  # of report.json, see docs/report.md
_OF_A_RUN = ("status", "commit", "accelerator", "strategy", "devices", "nodes", "block", "position", "neighbours")
_SETTINGS_OF_A_RUN = ("train.precision", "data.batch_size_per_device", "data.workers", "seed")
_OF_A_GROUP = ("title", "hardware", "accelerator", "model", "kind", "batch", "settings", "disturbed", "warnings")


@dataclasses.dataclass(frozen=True)
class Report:
    sweeps: list[Jobs]
    runs: list[RunRecord]
    counts: str  # e.g. `7 of 9 jobs done, 1 skipped, 1 running`
    smallest_difference: float
    recommendations: list[Recommendation]  # one per group
    groups: list[Group]
    claims: dict[str, list[ClaimResult]]  # by hardware


def compare(runs: list[RunRecord], folders: Sequence[Path]) -> Report:
    """Group and compare the runs, and return the report. It names the sweeps among `folders`."""
    # If sweeps have different limits, the largest counts.
    limits = [run.config.get("sweep.smallest_difference") for run in runs]
    smallest = max((limit for limit in limits if isinstance(limit, float) and limit > 0), default=SMALLEST_DIFFERENCE)
    groups = with_contrasts(group_runs(runs), smallest)
    claims = {}
    for hardware in dict.fromkeys(group.hardware for group in groups):
        # A job that never started has no hardware record. It counts as evidence for each kind of hardware.
        known = [run for run in runs if not run.accelerator or run.hardware == hardware]
        claims[hardware] = evaluate_claims(Evidence([group for group in groups if group.hardware == hardware], known))
    statuses = Counter(run.status.replace("_", " ") for run in runs)
    counts = [f"{statuses.pop('done', 0)} of {len(runs)} jobs done"]
    counts += [f"{count} {status}" for status, count in sorted(statuses.items())]
    sweeps = [read_jobs(folder) for folder in folders if (folder / "jobs.json").is_file()]
    return Report(sweeps, runs, ", ".join(counts), smallest, [recommend(group) for group in groups], groups, claims)


def write_report(sweep_folders: list[Path], out: Path | None = None) -> Path:
    """Write the four files and the plots into `out`, by default the first folder, and return the path of report.html.

    Takes finished and unfinished sweeps and single run folders, of any number of machines.
    Raises ValueError, one line with path and fix, for any other folder or one that cannot be read.
    """
    runs = collect(sweep_folders)
    out = (out or sweep_folders[0]).resolve()
    report = compare(runs, sweep_folders)
    write_json(out / "report.json", plain(report, out))
    # dtype=object keeps counts whole: with a missing value, pandas would write 2.0.
    rows = pd.DataFrame([row(run, out) for run in runs], dtype=object)
    write_text(out / "report.csv", rows.to_csv(index=False, lineterminator="\n"))
    drawn = _draw(report.groups, out / PLOTS)
    for kind in ("md", "html"):
        write_text(out / f"report.{kind}", _render(kind, report, drawn, out))
    return out / "report.html"


def _render(kind: str, report: Report, drawn: dict[Group, list[plots.Plot]], out: Path) -> str:
    def href(run: RunRecord) -> str:
        return quote(relative(run.folder / "result.json" if run.result else run.folder, out))

    def page_href(page: str) -> str:
        return quote(relative(ROOT / page, out))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown"] = _markdown
    environment.globals.update(tables=tables, href=href, page_href=page_href, report=report, plots=drawn)
    environment.globals.update(groups=report.groups[:MOST_GROUPS_SHOWN], smallest=percent(report.smallest_difference))
    return environment.get_template(f"report.{kind}.j2").render()


def _draw(groups: Sequence[Group], folder: Path) -> dict[Group, list[plots.Plot]]:
    """Draw the first groups (all would make report.html too large). Write each plot and its data to a file."""
    for stale in folder.glob("[0-9]*_*.*"):
        stale.unlink()
    drawn: dict[Group, list[plots.Plot]] = {}
    size = 0
    for number, group in enumerate(groups[:MOST_GROUPS_PLOTTED], start=1):
        of_group = plots.draw(group)
        size += sum(len(plot.svg) for plot in of_group)
        if size > MOST_PLOT_BYTES:
            break
        drawn[group] = of_group
        for plot in of_group:
            write_text(folder / f"{number}_{plot.name}.svg", plot.svg + "\n")
            write_text(folder / f"{number}_{plot.name}.csv", plot.data.to_csv(index=False, lineterminator="\n"))
    return drawn


def _markdown(text: object) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(str(text).split()))


def plain(report: Report, out: Path) -> dict[str, Any]:
    """Convert a report to the contents of report.json."""
    leads = [
        {**_place(lead.group), **_pick(lead, "sentence", "command", "point"), "contrast": _fields(lead.contrast)}
        for lead in report.recommendations
    ]
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
            {"hardware": hardware, **_pick(claim, "number", "text", "figure", "verdict", "reason")}
            | {"runs": [run.name for run in claim.runs]}
            for hardware, claims in report.claims.items()
            for claim in claims
        ],
        "flags": [{"run": run.name, "flags": run.flags} for run in report.runs if run.flags],
        "shared": {key: seen[0] for key, seen in values(run.config for run in report.runs).items() if len(seen) == 1},
        "varied": varied(report.runs),
        "runs": [row(run, out) for run in report.runs],
    }


def relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out)).as_posix()


def row(run: RunRecord, out: Path) -> dict[str, Any]:
    """Convert a run to a row of report.csv. A value that was not recorded is empty."""
    return {
        "run": run.name,
        "folder": relative(run.folder, out),
        "reason": run.doubt or run.reason,
        "compared": run.comparable,
        "hardware": run.hardware if run.environment else "",
        "host": " ".join(run.hosts),
        **_pick(run, *_OF_A_RUN),
        **{name: run.integer(name) for name in ("world_size", "batch_size", "threads_per_device")},
        **{key.rpartition(".")[2]: run.config.get(key) for key in _SETTINGS_OF_A_RUN},
        "started": run.result.get("started") or run.environment.get("time"),
        "model": run.result.get("model"),
        "scaling": "weak" if run.config.get("data.batch_size_per_device") is not None else "strong",
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


def _plain_point(group: Group, point: MeasuredPoint) -> dict[str, Any]:
    return {
        **_place(group),
        **_pick(point, "label", "strategy", "devices", "nodes", "options", "needless_threads", "flagged"),
        "stand_in": point.is_simulated,
        "runs": [run.name for run in point.runs],
        "over_single": _fields(group.over_single(point)),
        "efficiency": group.efficiency(point),
        **{name: _fields(point.measure(name)) for name in MEASURES},
        "metrics": {name: _fields(metric) for name, metric in point.metrics.items()},
        "peak_bytes": [_fields(peak) for peak in point.peak_bytes],
        "parts_ms": {name: _fields(part) for name, part in point.parts.items()},
    }


def _place(group: Group) -> dict[str, Any]:
    return {"group": group.title, "hardware": group.hardware}


def _pick(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _fields(value: Contrast | Summary | None) -> dict[str, Any] | None:
    return dataclasses.asdict(value) if value else None
