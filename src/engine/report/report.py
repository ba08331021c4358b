"""The comparison report of one or more sweeps: report.html, report.md, report.csv, report.json, and the plots as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
import pandas as pd

from src.engine.machine.files import write_json, write_text
from src.engine.report import plots, tables
from src.engine.report.collect import collect
from src.engine.report.comparison import Group
from src.engine.report.contents import Report, compare, plain, relative, row
from src.engine.report.measured import RunRecord
from src.engine.report.wording import percent

# Bounds on report.html, which stays below 2 MB; report.csv and report.json always hold everything.
MOST_GROUPS_PLOTTED = 10
MOST_PLOT_BYTES = 1_000_000
MOST_GROUPS_SHOWN = 30
PLOTS = "report_plots"  # folder beside the report


def write_report(sweep_folders: list[Path], out: Path | None = None) -> Path:
    """Write the four files and the plots into `out`, by default the first of `sweep_folders`; returns report.html's path.

    Takes finished and unfinished sweeps and single run folders, of any number of machines.
    Errors: ValueError, one line with path and remedy, when a folder is none of these or cannot be read.
    """
    runs = collect(sweep_folders)
    out = (out or sweep_folders[0]).resolve()
    report = compare(runs, sweep_folders)
    write_json(out / "report.json", plain(report, out))
    rows = pd.DataFrame([row(run, out) for run in runs], dtype=object)  # else a count is 2.0 where one run has none
    write_text(out / "report.csv", rows.to_csv(index=False, lineterminator="\n"))
    drawn = _draw(report.groups, out / PLOTS)
    for kind in ("md", "html"):
        write_text(out / f"report.{kind}", _render(kind, report, drawn, out))
    return out / "report.html"


def _render(kind: str, report: Report, drawn: dict[Group, list[plots.Plot]], out: Path) -> str:
    def href(run: RunRecord) -> str:
        return quote(relative(run.folder / "result.json" if run.result else run.folder, out))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=kind == "html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown"] = _markdown
    environment.globals.update(tables=tables, href=href, report=report, plots=drawn)
    environment.globals.update(groups=report.groups[:MOST_GROUPS_SHOWN], smallest=percent(report.smallest_difference))
    return environment.get_template(f"report.{kind}.j2").render()


def _draw(groups: Sequence[Group], folder: Path) -> dict[Group, list[plots.Plot]]:
    """Plots of the first groups, as many as keep report.html small; each is also a file, its data beside it."""
    for stale in folder.glob("[0-9]*_*.*"):
        stale.unlink()
    drawn: dict[Group, list[plots.Plot]] = {}
    size = 0
    for number, group in enumerate(groups[:MOST_GROUPS_PLOTTED], start=1):
        found = plots.draw(group)
        size += sum(len(plot.svg) for plot in found)
        if size > MOST_PLOT_BYTES:
            break
        drawn[group] = found
        for plot in found:
            write_text(folder / f"{number}_{plot.name}.svg", plot.svg + "\n")
            write_text(folder / f"{number}_{plot.name}.csv", plot.data.to_csv(index=False, lineterminator="\n"))
    return drawn


def _markdown(text: object) -> str:
    """Text that stands in a Markdown table as it is."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(str(text).split()))
