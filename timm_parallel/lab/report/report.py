"""Comparison report of one or more sweeps: report.html, report.md, report.csv, report.json, and the
plots as files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import jinja2
import pandas as pd

from timm_parallel.lab.analysis.groups import LEVELS, Group, group_runs
from timm_parallel.lab.analysis.headline import Recommendation, recommend
from timm_parallel.lab.analysis.questions import with_contrasts
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.settings import SettingGroup, setting_groups
from timm_parallel.lab.analysis.statistics import SMALLEST_DIFFERENCE
from timm_parallel.lab.analysis.verdict import judge
from timm_parallel.lab.analysis.wording import percent
from timm_parallel.lab.report import plots, tables
from timm_parallel.lab.report.claims import evaluate_claims
from timm_parallel.lab.report.collect import collect, read_record
from timm_parallel.lab.report.contents import Report
from timm_parallel.lab.report.evidence import Evidence
from timm_parallel.lab.report.records import plain, relative, row
from timm_parallel.machine.files import write_json, write_text
from timm_parallel.project import root
from timm_parallel.record.jobs import read_jobs

# Bounds on report.html, which stays below 2 MB; report.csv and report.json always hold everything.
MOST_GROUPS_PLOTTED = 10
MOST_PLOT_BYTES = 1_000_000
MOST_GROUPS_SHOWN = 30
PLOTS = "report_plots"  # folder next to the report

Drawn = dict[Group | SettingGroup, list[plots.Plot]]


def compare(runs: list[RunRecord], folders: Sequence[Path]) -> Report:
    """Group and compare the runs, and return the report. Reads jobs.json of the sweep folders among
    `folders`.
    """
    # If sweeps have different limits, the largest counts.
    limits = [run.config.get("sweep.smallest_difference") for run in runs]
    smallest = max(
        (limit for limit in limits if isinstance(limit, float) and limit > 0),
        default=SMALLEST_DIFFERENCE,
    )
    groups = with_contrasts(group_runs(runs), smallest, LEVELS)
    record = read_record(folders[0]) if len(folders) == 1 else None
    verdict = judge(runs, record, smallest) if record else None
    settings = verdict.groups if verdict else with_contrasts(setting_groups(runs), smallest)
    leads = [recommend(group) for group in settings or groups]
    if verdict:
        of_group = leads[0].notes if leads else ()
        verdict = replace(verdict, notes=(*verdict.notes, *of_group))
        leads = [
            Recommendation(lead.group, verdict.sentence, notes=verdict.notes) for lead in leads[:1]
        ]
    claims = {}
    for hardware in dict.fromkeys(group.hardware for group in groups):
        # A job that never started has no hardware record. It counts as evidence for each kind of
        # hardware.
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
    """Write report.html, .md, .csv, .json and plots into `out`, by default the first folder. Return
    report.html's path.

    Takes finished and unfinished sweeps and single run folders, of any number of machines.
    Raises ValueError for any other folder or one that cannot be read.
    """
    runs = collect(sweep_folders)
    out = (out or sweep_folders[0]).resolve()
    report = compare(runs, sweep_folders)
    write_json(out / "report.json", plain(report, out))
    # dtype=object keeps counts whole: with a missing value, pandas would write 2.0.
    rows = pd.DataFrame([row(run, out) for run in runs], dtype=object)
    write_text(out / "report.csv", rows.to_csv(index=False, lineterminator="\n"))
    drawn = _draw(report, out / PLOTS)
    for kind in ("md", "html"):
        write_text(out / f"report.{kind}", _render(kind, report, drawn, out))
    return out / "report.html"


def _render(kind: str, report: Report, drawn: Drawn, out: Path) -> str:
    def href(run: RunRecord) -> str:
        return quote(relative(run.folder / "result.json" if run.result else run.folder, out))

    def page_href(page: str) -> str:
        return quote(relative(root() / page, out))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown"] = _markdown
    environment.globals.update(
        tables=tables, href=href, page_href=page_href, report=report, plots=drawn
    )
    environment.globals.update(
        groups=report.groups[:MOST_GROUPS_SHOWN], smallest=percent(report.smallest_difference)
    )
    return environment.get_template(f"report.{kind}.j2").render()


def _draw(report: Report, folder: Path) -> Drawn:
    """Draw the plots of the first groups of runs (all would make the page too large). Write each
    plot and its data to files.
    """
    for stale in folder.glob("[0-9]*_*.*"):
        stale.unlink()
    # Below a comparison of settings, the speed of a group with one configuration is in the table.
    of_speed = [group for group in report.groups if not report.settings or len(group.members) > 1]
    drawn: Drawn = {}
    size = 0
    groups: list[Group | SettingGroup] = [*report.settings, *of_speed]
    for number, group in enumerate(groups[:MOST_GROUPS_PLOTTED], start=1):
        of_group = plots.draw(group)
        size += sum(len(plot.svg) for plot in of_group)
        if size > MOST_PLOT_BYTES:
            break
        drawn[group] = of_group
        for plot in of_group:
            write_text(folder / f"{number}_{plot.name}.svg", plot.svg + "\n")
            write_text(
                folder / f"{number}_{plot.name}.csv",
                plot.data.to_csv(index=False, lineterminator="\n"),
            )
    return drawn


def _markdown(text: object) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(str(text).split()))
