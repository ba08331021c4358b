"""What a report holds: everything that the runs bear out, before it is written."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from src.engine.record.jobs import Jobs
from src.engine.report.claims import Claim, Correction, correct, weigh_claims
from src.engine.report.collect import read_sweep
from src.engine.report.comparison import Group, group_runs
from src.engine.report.evidence import Evidence
from src.engine.report.families import with_contrasts
from src.engine.report.lead import Lead, lead_of
from src.engine.report.measured import RunRecord
from src.engine.report.settings import hardware
from src.engine.report.statistics import SMALLEST_DIFFERENCE


@dataclasses.dataclass(frozen=True)
class Machine:
    """All that was measured on one hardware."""

    name: str
    groups: list[Group]
    claims: list[Claim]
    corrections: list[Correction]


@dataclasses.dataclass(frozen=True)
class Report:
    sweeps: list[Jobs]
    runs: list[RunRecord]
    counts: str  # e.g. `7 of 9 jobs done, 1 skipped, 1 running`
    smallest_difference: float
    leads: list[Lead]
    machines: list[Machine]
    groups: list[Group]


def compare(runs: list[RunRecord], folders: Sequence[Path] = ()) -> Report:
    """What the runs bear out. `folders`: those of them that are sweeps are named in the report."""
    limits = {run.config.get("sweep.smallest_difference") for run in runs}  # of several sweeps the largest
    smallest = max((limit for limit in limits if isinstance(limit, float) and limit > 0), default=SMALLEST_DIFFERENCE)
    groups = with_contrasts(group_runs(runs), smallest)
    machines = []
    for name in dict.fromkeys(group.hardware for group in groups):
        mine = [group for group in groups if group.hardware == name]
        accelerators = {group.accelerator for group in mine}
        # A job that never began has no record of its hardware: its refusal or failure counts as evidence everywhere.
        here = [r for r in runs if not r.accelerator or (hardware(r) == name and r.accelerator in accelerators)]
        evidence = Evidence(mine, here)
        machines.append(Machine(name, mine, weigh_claims(evidence), correct(evidence)))
    statuses = Counter(run.status.replace("_", " ") for run in runs)
    counts = [f"{statuses.pop('done', 0)} of {len(runs)} jobs done"]
    counts += [f"{count} {status}" for status, count in sorted(statuses.items())]
    sweeps = [read_sweep(folder) for folder in folders if (folder / "jobs.json").is_file()]
    leads = [lead_of(group, smallest) for group in groups]
    return Report(sweeps, runs, ", ".join(counts), smallest, leads, machines, groups)
