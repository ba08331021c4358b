"""Contents of a report, before they are rendered as HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from timm_parallel.lab.analysis.groups import Group
from timm_parallel.lab.analysis.headline import Recommendation
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.verdict import Verdict
from timm_parallel.lab.analysis.wording import join_short
from timm_parallel.lab.report import tables
from timm_parallel.lab.report.evidence import ClaimResult
from timm_parallel.record.jobs import UNFINISHED, Jobs


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
    def notes(self) -> list[str]:
        """Sentences about the jobs that a reader must know to rely on the report."""
        notes = []
        for sweep in self.sweeps:
            left = sum(job.status in UNFINISHED for job in sweep.jobs)
            if left:
                state = "runs" if sweep.status == "running" else "was stopped"
                notes.append(
                    f"The sweep {state}: {left} of {len(sweep.jobs)} jobs have not ended, so the "
                    "results may change."
                )
        edited = [run.name for run in self.runs if run.is_edited]
        if edited:
            notes.append(
                "Not compared, because jobs.json has another seed than config.yaml: "
                f"{join_short(edited)}."
            )
        unknown = [
            run.name for run in self.runs if run.metric_value is not None and run.metric_is is None
        ]
        if unknown:
            notes.append(
                "Not compared, because result.json does not state if a lower value of the metric "
                f"is better: {join_short(unknown)}."
            )
        for sweep in self.sweeps:
            folder = sweep.folder.resolve()
            code = dict.fromkeys(
                run.commit
                for run in self.runs
                if run.commit and folder in run.folder.resolve().parents
            )
            if len(code) > 1:
                notes.append(
                    f"The code changed during the sweep: {join_short(code)}. Runs of unlike code "
                    "are not compared."
                )
        return notes

    @property
    def table(self) -> tables.Table | None:
        """Table of the first group of configurations. None if there are no groups."""
        groups = self.settings or self.groups
        return tables.results_table(groups[0]) if groups else None

    @property
    def answer(self) -> tables.Table | None:
        """Table of a verdict on a change of the code, with a row per measure. None on any other
        page.
        """
        if self.verdict is None:
            return None
        return tables.Table(self.verdict.rows, text_columns=("measure", "verdict"))
