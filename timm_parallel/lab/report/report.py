"""Write the comparison report of one or more sweeps: report.html, report.md, report.csv,
report.json, and the plots as files.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import jinja2
import pandas as pd

from timm_parallel.app import root
from timm_parallel.lab.analysis.groups import Group, with_contrasts
from timm_parallel.lab.analysis.headline import Recommendation, recommend
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.lab.analysis.statistics import SMALLEST_DIFFERENCE
from timm_parallel.lab.analysis.strategies import LEVELS, group_runs, warnings
from timm_parallel.lab.analysis.verdict import judge
from timm_parallel.lab.report import plots, tables
from timm_parallel.lab.report.claims import Evidence, evaluate_claims
from timm_parallel.lab.report.collect import collect, read_record
from timm_parallel.lab.report.contents import Report, plain, relative, row
from timm_parallel.lab.report.sentences import percent, sentence, sentences
from timm_parallel.machine.files import write_json, write_text
from timm_parallel.machine.text import as_number
from timm_parallel.record.result import read_jobs

# Limits that keep report.html below 2 MB. The files report.csv and report.json always contain
# everything.
MOST_GROUPS_PLOTTED = 10
MOST_GROUPS_SHOWN = 30
# Folder of the plots, next to report.html.
PLOTS = "report_plots"

Drawn = dict[Group, list[plots.Plot]]


def compare(folders: Sequence[Path]) -> Report:
    """Read sweep folders and run folders, group and compare the runs, and return the contents of
    the report. Raises ValueError if a folder cannot be read.
    """
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
            Recommendation(lead.group, verdict.findings, notes=verdict.notes) for lead in leads[:1]
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
        warnings=warnings,
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
