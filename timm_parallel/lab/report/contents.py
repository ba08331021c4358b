"""Contents of a report, before they are rendered as HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from timm_parallel.lab.analysis.findings import Finding, finding
from timm_parallel.lab.analysis.groups import Group
from timm_parallel.lab.analysis.headline import Recommendation
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.verdict import Verdict
from timm_parallel.lab.report import tables
from timm_parallel.lab.report.claims import ClaimResult
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
    def notes(self) -> list[Finding]:
        """Findings on the jobs that a reader must know to rely on the report."""
        notes = []
        for sweep in self.sweeps:
            left = sum(job.status in UNFINISHED for job in sweep.jobs)
            if left:
                jobs = len(sweep.jobs)
                notes.append(finding("sweep_not_ended", status=sweep.status, count=left, jobs=jobs))
        edited = [run.name for run in self.runs if run.is_edited]
        if edited:
            notes.append(finding("edited_seed", runs=edited))
        with_value = [run for run in self.runs if run.metric_value is not None]
        unknown = [run.name for run in with_value if run.metric_is is None]
        if unknown:
            notes.append(finding("unknown_direction", runs=unknown))
        for sweep in self.sweeps:
            folder = sweep.folder.resolve()
            of_sweep = [run for run in self.runs if folder in run.folder.resolve().parents]
            commits = list(dict.fromkeys(run.commit for run in of_sweep if run.commit))
            if len(commits) > 1:
                notes.append(finding("code_changed", commits=commits))
        return notes

    @property
    def table(self) -> tables.Table | None:
        """Table of the first group of configurations. None if there are no groups."""
        groups = self.settings or self.groups
        return tables.results_table(groups[0]) if groups else None
