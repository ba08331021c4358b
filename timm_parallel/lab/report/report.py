"""Write the comparison report of one or more sweeps: report.html, report.md, report.csv,
report.json, and the plots as files. `plain` converts a report to the contents of report.json, and
`row` converts a run to a row of report.csv.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd

from timm_parallel.app import root
from timm_parallel.lab.analysis.groups import Configuration, Group, values, varied, with_contrasts
from timm_parallel.lab.analysis.headline import Finding, Recommendation, finding, recommend
from timm_parallel.lab.analysis.runs import MEASURES, RunRecord
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.lab.analysis.statistics import SMALLEST_DIFFERENCE, Contrast, Summary
from timm_parallel.lab.analysis.strategies import LEVELS, efficiency, group_runs
from timm_parallel.lab.analysis.verdict import Verdict, judge
from timm_parallel.lab.report import plots, tables
from timm_parallel.lab.report.claims import ClaimResult, Evidence, evaluate_claims
from timm_parallel.lab.report.collect import collect, read_record
from timm_parallel.lab.report.sentences import percent, sentence, sentences
from timm_parallel.machine.files import write_json, write_text
from timm_parallel.machine.text import as_number
from timm_parallel.record.result import UNFINISHED, Jobs, read_jobs

# Version of the format of report.json, which docs/dev/report_method.md describes.
FORMAT = 7
# Limits that keep report.html below 2 MB. The files report.csv and report.json always contain
# everything.
MOST_GROUPS_PLOTTED = 10
MOST_GROUPS_SHOWN = 30
# Folder of the plots, next to report.html.
PLOTS = "report_plots"
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


Drawn = dict[Group, list[plots.Plot]]


def compare(folders: Sequence[Path]) -> Report:
    """Read sweep folders and run folders, group and compare the runs, and return the contents of
    the report. Raises ValueError if a folder cannot be read.
    """
    # Unlike Path.resolve, realpath raises no error for a link that leads back to itself.
    folders = [Path(name) for name in dict.fromkeys(map(os.path.realpath, folders))]
    runs = collect(folders)
    # If the sweeps set different values of sweep.smallest_difference, use the largest.
    limits = (as_number(run.config.get("sweep.smallest_difference")) for run in runs)
    smallest = max(filter(None, limits), default=SMALLEST_DIFFERENCE)
    groups = with_contrasts(group_runs(runs), smallest, LEVELS)
    record = read_record(folders[0]) if len(folders) == 1 else None
    verdict = judge(runs, record, smallest) if record else None
    settings = verdict.groups if verdict else with_contrasts(setting_groups(runs), smallest)
    leads = [recommend(group) for group in settings or groups]
    if verdict:
        of_group = leads[0].notes if leads else ()
        verdict = replace(verdict, notes=(*verdict.notes, *of_group))
        leads = [
            Recommendation(lead.group, (verdict.finding,), notes=verdict.notes)
            for lead in leads[:1]
        ]
    claims = {}
    for hardware in dict.fromkeys(group.hardware for group in groups):
        # Count a job that never started as evidence for every kind of hardware, because it recorded
        # none.
        known = [run for run in runs if not run.accelerator or run.hardware == hardware]
        claims[hardware] = evaluate_claims(
            Evidence([group for group in groups if group.hardware == hardware], known)
        )
    statuses = Counter(run.status.replace("_", " ") for run in runs)
    counts = [f"{statuses.pop('done', 0)} of {len(runs)} jobs done"]
    counts += [f"{count} {status}" for status, count in sorted(statuses.items())]
    sweeps = [read_jobs(folder) for folder in folders if (folder / "jobs.json").is_file()]
    return Report(
        sweeps, runs, ", ".join(counts), smallest, leads, groups, settings, claims, verdict
    )


def write_report(sweep_folders: list[Path], out: Path | None = None) -> Path:
    """Write report.html, report.md, report.csv, report.json and plots of sweeps and single runs.
    Return the path of report.html.

    `sweep_folders`: folders of sweeps or of runs, finished or not, from any number of machines.
    `out`: folder of the report, by default the first of `sweep_folders`. Raises ValueError for any
    other folder, or if a folder cannot be read.
    """
    report = compare(sweep_folders)
    out = Path(os.path.realpath(out or sweep_folders[0]))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out={out}: cannot be created ({error.strerror}); give another folder"
        ) from None
    write_json(out / "report.json", plain(report, out))
    # Use dtype=object, because pandas would otherwise write counts such as 2 as 2.0 if a value is
    # missing.
    rows = pd.DataFrame([row(run, out) for run in report.runs], dtype=object)
    write_text(out / "report.csv", rows.to_csv(index=False, lineterminator="\n"))
    drawn = _draw(report, out / PLOTS)
    for kind in ("md", "html"):
        write_text(out / f"report.{kind}", _render(kind, report, drawn, out))
    return out / "report.html"


def _render(kind: str, report: Report, drawn: Drawn, out: Path) -> str:
    def href(run: RunRecord) -> str:
        return quote(relative(run.folder / "result.json" if run.result else run.folder, out))

    def page_href(page: str) -> str:
        # A project may have no pages. Then their names are no links.
        return quote(relative(root() / page, out)) if (root() / page).is_file() else ""

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown"] = _markdown
    environment.globals.update(
        tables=tables,
        href=href,
        page_href=page_href,
        report=report,
        plots=drawn,
        sentence=sentence,
        sentences=sentences,
        groups=report.groups[:MOST_GROUPS_SHOWN],
        smallest=percent(report.smallest_difference),
    )
    return environment.get_template(f"report.{kind}.j2").render()


def _draw(report: Report, folder: Path) -> Drawn:
    """Draw the plots of the first groups, because plots of all groups would make the page too
    large. Write each plot and its data to files.
    """
    for stale in folder.glob("[0-9]*_*.*"):
        stale.unlink()
    # On a page about settings, skip speed plots of groups with one configuration. The table shows
    # their speed.
    of_speed = [group for group in report.groups if not report.settings or len(group.members) > 1]
    groups: list[Group] = [*report.settings, *of_speed]
    drawn = {group: plots.draw(group) for group in groups[:MOST_GROUPS_PLOTTED]}
    for number, of_group in enumerate(drawn.values(), start=1):
        for plot in of_group:
            write_text(folder / f"{number}_{plot.name}.svg", plot.svg + "\n")
            write_text(
                folder / f"{number}_{plot.name}.csv",
                plot.data.to_csv(index=False, lineterminator="\n"),
            )
    return drawn


def _markdown(text: object) -> str:
    """Escape the characters of a text that have a meaning in a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(str(text).split()))
