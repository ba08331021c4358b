"""What a report holds: everything that the runs bear out, before it is written."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from src.engine.record.jobs import Jobs
from src.engine.report.claims import Claim, Correction, correct, judge
from src.engine.report.collect import read_sweep
from src.engine.report.comparison import Group, group
from src.engine.report.evidence import Evidence
from src.engine.report.families import with_contrasts
from src.engine.report.lead import Lead, lead
from src.engine.report.measured import Run
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
    runs: list[Run]
    counts: str
    smallest_difference: float
    leads: list[Lead]
    machines: list[Machine]
    groups: list[Group]


def compare(runs: list[Run], folders: Sequence[Path] = ()) -> Report:
    """What the runs bear out. `folders`: those of them that are sweeps are named in the report."""
    smallest = _smallest_difference(runs)
    groups = with_contrasts(group(runs), smallest)
    machines = []
    for name in dict.fromkeys(g.hardware for g in groups):
        mine = [g for g in groups if g.hardware == name]
        accelerators = {g.accelerator for g in mine}
        # A job that never began has no record of its hardware: its refusal or failure counts as evidence everywhere.
        here = [r for r in runs if not r.accelerator or (hardware(r) == name and r.accelerator in accelerators)]
        evidence = Evidence(mine, here)
        machines.append(Machine(name, mine, judge(evidence), correct(evidence)))
    sweeps = [read_sweep(folder) for folder in folders if (folder / "jobs.json").is_file()]
    return Report(sweeps, runs, _counts(runs), smallest, [lead(g, smallest) for g in groups], machines, groups)


def _smallest_difference(runs: Sequence[Run]) -> float:
    """`sweep.smallest_difference`, the largest where sweeps differ."""
    given = {run.config.get("sweep.smallest_difference") for run in runs}
    return max((value for value in given if isinstance(value, float) and value > 0), default=SMALLEST_DIFFERENCE)


def _counts(runs: Sequence[Run]) -> str:
    """E.g. `7 of 9 jobs done, 1 skipped, 1 running`."""
    found = Counter(run.status for run in runs)
    done = found.pop("done", 0)
    others = [f"{count} {status.replace('_', ' ')}" for status, count in sorted(found.items())]
    return ", ".join([f"{done} of {len(runs)} jobs done", *others])
