"""The comparison report of one or more sweeps: report.html, report.md, report.csv and report.json."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from src.engine.machine.files import write_json, write_text
from src.engine.record.jobs import Jobs
from src.engine.report import tables
from src.engine.report.advice import Recommendation, advise, recommend
from src.engine.report.claims import Claim, Correction, correct, judge
from src.engine.report.collect import collect, read_sweep
from src.engine.report.comparison import MEASURES, Group, Point, group, hardware, shared, varied
from src.engine.report.measured import Run
from src.engine.report.ranges import Summary

FORMAT = 1
# Bounds on report.html, which stays below 2 MB; report.csv and report.json always hold everything.
MOST_GROUPS_PLOTTED = 10
MOST_PLOT_BYTES = 1_000_000
MOST_GROUPS_SHOWN = 30
MOST_UNFINISHED_SHOWN = 300


@dataclasses.dataclass(frozen=True)
class Machine:
    """All that was measured on one hardware."""

    name: str
    groups: list[Group]
    runs: list[Run]
    claims: list[Claim]
    corrections: list[Correction]
    advice: list[str]


@dataclasses.dataclass(frozen=True)
class Report:
    sweeps: list[Jobs]
    runs: list[Run]
    counts: str
    recommendations: list[Recommendation]
    machines: list[Machine]
    groups: list[Group]


def write_report(sweep_folders: list[Path], out: Path | None = None) -> Path:
    """Write the four files into `out`, by default the first of `sweep_folders`; returns the path of report.html.

    Takes finished and unfinished sweeps and single run folders, of any number of machines.
    Errors: ValueError, one line with path and remedy, when a folder is none of these or cannot be read.
    """
    runs = collect(sweep_folders)
    out = (out or sweep_folders[0]).resolve()
    report = _compare(runs, sweep_folders)
    write_json(out / "report.json", _plain(report, out))
    write_text(out / "report.csv", _csv(runs, out))
    write_text(out / "report.md", _render("report.md.j2", report, out))
    write_text(out / "report.html", _render("report.html.j2", report, out))
    return out / "report.html"


def _compare(runs: list[Run], folders: Sequence[Path]) -> Report:
    groups = group(runs)
    machines = []
    for name in dict.fromkeys(g.hardware for g in groups):
        mine = [g for g in groups if g.hardware == name]
        accelerators = {g.accelerator for g in mine}
        # A skipped or failed job may have no record of its hardware: its refusal counts as evidence everywhere.
        here = [r for r in runs if not r.environment or (hardware(r) == name and r.accelerator in accelerators)]
        machines.append(Machine(name, mine, here, judge(mine, here), correct(mine, here), advise(mine)))
    sweeps = [read_sweep(folder) for folder in folders if (folder / "jobs.json").is_file()]
    return Report(sweeps, runs, _counts(runs), [recommend(g) for g in groups], machines, groups)


def _counts(runs: Sequence[Run]) -> str:
    """E.g. `7 of 9 jobs done, 1 skipped, 1 running`."""
    found = Counter(run.status for run in runs)
    done = found.pop("done", 0)
    others = [f"{count} {status.replace('_', ' ')}" for status, count in sorted(found.items())]
    return ", ".join([f"{done} of {len(runs)} jobs done", *others])


def _render(template: str, report: Report, out: Path) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown"] = _markdown
    environment.globals.update(tables=tables, shared=shared, varied=varied, href=lambda run: _href(run, out))
    unfinished = [run for run in report.runs if not run.comparable]
    return environment.get_template(template).render(
        report=report,
        groups=report.groups[:MOST_GROUPS_SHOWN],
        plots=_plots(report.groups) if environment.autoescape else {},
        unfinished=unfinished[:MOST_UNFINISHED_SHOWN],
        num_unfinished=len(unfinished),
    )


def _plots(groups: Sequence[Group]) -> dict[Group, list[tuple[str, Any]]]:
    """(caption, SVG) of the first groups, as many as keep report.html small."""
    from markupsafe import Markup

    from src.engine.report.plots import draw

    plots: dict[Group, list[tuple[str, Any]]] = {}
    size = 0
    for members in groups[:MOST_GROUPS_PLOTTED]:
        drawn = draw(members)
        size += sum(len(svg) for _, svg in drawn)
        if size > MOST_PLOT_BYTES:
            break
        plots[members] = [(caption, Markup(svg)) for caption, svg in drawn]  # matplotlib escaped all text in it
    return plots


def _href(run: Run, out: Path) -> str:
    """Relative link to the run's result, or to its folder where there is none."""
    target = run.folder / "result.json" if run.result else run.folder
    return quote(_relative(target, out))


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out)).as_posix()


def _markdown(text: object) -> str:
    """Text that stands in a Markdown table as it is."""
    words = " ".join(str(text).split())
    for special in "\\`*_|<>[]":
        words = words.replace(special, f"\\{special}")
    return words


def _csv(runs: Sequence[Run], out: Path) -> str:
    text = io.StringIO()
    rows = [_row(run, out) for run in runs]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(run: Run, out: Path) -> dict[str, Any]:
    """One run, unrounded. An empty field was not recorded."""
    result = run.result
    return {
        "run": run.name,
        "folder": _relative(run.folder, out),
        "status": run.status,
        "reason": run.doubt or run.reason,
        "compared": run.comparable,
        "hardware": hardware(run) if run.environment else "",
        "accelerator": run.accelerator,
        "strategy": run.strategy,
        "devices": run.devices,
        "world_size": result.world_size if result else None,
        "model": result.model if result else "",
        "scaling": "weak" if run.config.get("data.batch_size_per_device") is not None else "strong",
        "batch_size": result.batch_size if result else None,
        "batch_size_per_device": run.config.get("data.batch_size_per_device"),
        "threads_per_device": result.threads_per_device if result else None,
        "repeat": run.repeat,
        "stand_in_for_devices": "threads on CPU" if run.stand_in else "",
        **{name: getattr(run, name) for name in MEASURES},
        "peak_bytes": " ".join(f"{peak:.0f}" for peak in run.peak_bytes),
        "val_loss": result.val.get("loss") if result and isinstance(result.val, dict) else None,
        "total_seconds": result.seconds.get("total") if result and isinstance(result.seconds, dict) else None,
        "overrides": " ".join(run.overrides),
    }


def _plain(report: Report, out: Path) -> dict[str, Any]:
    """The report's numbers, unrounded, as JSON holds them."""
    return {
        "format": FORMAT,
        "sweeps": [
            {"folder": _relative(sweep.folder, out)}
            | {key: getattr(sweep, key) for key in ("command", "created", "status")}
            for sweep in report.sweeps
        ],
        "counts": report.counts,
        "recommendations": [
            {"group": r.group.title, "hardware": r.group.hardware, "sentence": r.sentence, "command": r.command}
            | {"point": r.point.label if r.point else None}
            for r in report.recommendations
        ],
        "groups": [_plain_group(members) for members in report.groups],
        "machines": [
            {
                "hardware": machine.name,
                "claims": [
                    dataclasses.asdict(dataclasses.replace(claim, runs=())) | {"runs": [run.name for run in claim.runs]}
                    for claim in machine.claims
                ],
                "corrections": [dataclasses.asdict(correction) for correction in machine.corrections],
                "advice": machine.advice,
            }
            for machine in report.machines
        ],
        "shared": shared(report.runs),
        "varied": varied(run for run in report.runs if run.config),
        "runs": [_row(run, out) for run in report.runs],
    }


def _plain_group(members: Group) -> dict[str, Any]:
    keys = ("hardware", "accelerator", "model", "kind", "batch", "settings")
    return {key: getattr(members, key) for key in keys} | {
        "ranking": [[point.label for point in tier] for tier in members.ranked()],
        "points": [_plain_point(members, point) for point in members.points],
    }


def _plain_point(members: Group, point: Point) -> dict[str, Any]:
    def plain(summary: Summary | None) -> dict[str, Any] | None:
        return dataclasses.asdict(summary) if summary else None

    difference = members.accuracy_difference(point)
    return {
        "label": point.label,
        "strategy": point.strategy,
        "devices": point.devices,
        "options": point.options,
        "threads_on_cpu": point.stand_in,
        "threads_and_cores": point.needless_threads,
        "runs": [run.name for run in point.runs],
        "speed_up": plain(members.speed_up(point)),
        "efficiency": plain(members.efficiency(point)),
        **{name: plain(point.measure(name)) for name in MEASURES},
        "peak_bytes": [plain(peak) for peak in point.peak_bytes],
        "accuracy_minus_single": difference[0] if difference else None,
    }
