"""train.py against a loop written by hand, on this machine: fresh processes, in turns, medians of the rounds' ratios.

    python scripts/maintain/bench.py              # everything: make bench
    python scripts/maintain/bench.py --only tiny  # measure what has this in its name, without the table

The table is printed, and written with every figure to outputs/bench/<time>/bench.json. A target that is missed, but lies
within the middle half of the rounds, is reported as such: the machine cannot tell. Peers are measured where they are installed
(pip install -r requirements-bench.txt).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

from scripts.maintain.bench_measures import (
    FROM_FILES,
    PEERS,
    SELDOM,
    Figures,
    Measure,
    Round,
    call,
    derive,
    measures,
    parts,
)
from src.engine.machine import hardware
from src.engine.machine.files import claim_folder, write_json

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """One target: `figure` of `ours` over that of `other`; or less it, or alone where there is no other."""

    name: str
    figure: str
    ours: str
    other: str | None
    target: float | None  # None: told for comparison
    less_is_better: bool = False
    difference: bool = False

    def value(self, done: Round) -> float:
        own = done[self.ours][self.figure]
        if self.other is None:
            return own
        return own - done[self.other][self.figure] if self.difference else own / done[self.other][self.figure]

    def judge(self, values: list[float]) -> str:
        """met, MISSED, or that the target lies in the middle half of the rounds."""
        if self.target is None:
            return ""
        sign, median = -1 if self.less_is_better else 1, statistics.median(values)
        if sign * median >= sign * self.target:
            return "met"
        signed = [sign * value for value in values]
        best = statistics.quantiles(signed, n=4, method="inclusive")[2] if len(signed) > 1 else signed[0]
        return "within the spread" if best >= sign * self.target else "MISSED"


def rows(measured: Collection[str]) -> list[Row]:
    """Every target, in the order of the table."""
    rate = "images_per_sec"
    found = []
    for name, target in (("tiny", 0.95), ("resnet18", 0.99), ("small ViT", 0.99)):
        for world in (1, 2):
            sides = (f"{name} x{world}", f"{name} x{world} by hand")
            found.append(Row(f"{name} x{world}: images/s over the hand-written loop's", rate, *sides, target))
    for peer in PEERS:
        if f"tiny x1 {peer}" in measured:
            sides = (f"tiny x1 {peer}", "tiny x1 by hand")
            found.append(Row(f"{peer}, tiny x1: images/s over the hand-written loop's", rate, *sides, None))
    found += [
        Row("resnet18: speed-up of ddp x2 over the hand-written", "speed-up", "ddp", "ddp by hand", 0.98),
        Row("resnet18 x1: images/s over torch's default AdamW", rate, "resnet18 x1", "default AdamW", 1.4),
        Row("command to first step, x1", "first_step", "tiny x1", "tiny x1 by hand", 1.15, True),
        Row("command to first step, x2", "first_step", "tiny x2", "tiny x2 by hand", 1.0, True),
        *(
            Row(f"{name}: peak memory", "peak_mib", f"{name} x1", f"{name} x1 by hand", 1.1, True)
            for name in ("tiny", "resnet18")
        ),
        *(
            Row(f"{name}: seconds more than import hydra", "seconds", name, "import hydra", 0.4, True, difference=True)
            for name in ("--help", "--cfg job", "a refused config")
        ),
    ]
    for workers in (1, 2):
        ours = f"JPEG ours x{workers}"
        found.append(
            Row(f"JPEG, {workers} workers: images/s over timm's loader", rate, ours, f"JPEG timm x{workers}", 1.4)
        )
        found.append(Row(f"JPEG, {workers} workers: images/s over a core's", rate, ours, f"JPEG core x{workers}", 0.9))
    for world in (1, 2):
        sides = (f"{FROM_FILES} x{world}", f"{FROM_FILES} x{world} timm")
        found.append(Row(f"{FROM_FILES} x{world}: images/s over timm's train.py, in pieces", rate, *sides, 1.0))
    return [
        *found,
        Row("synthetic data: share of a step spent waiting", "data_wait", "resnet18 x1", None, 0.005, True),
        Row("evaluation: images/s over a hand-written loop's", "ratio", "evaluation", None, 0.97),
        Row("resnet50: time that a checkpoint every 500 steps adds", "share", "checkpoint", None, 0.02, True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure what has this in its name, without the table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_") as images:
        call([sys.executable, "scripts/maintain/bench_data.py", "make", images])
        everything = measures(Path(images))
        wanted = {name: measure for name, measure in everything.items() if given.only in name}
        in_parts = parts(Path(images), given.rounds)
        measured = {name: part() for name, part in in_parts.items() if given.only in name}
        done = [measure_all(wanted, measured, number, given.rounds) for number in range(given.rounds)]
    if given.only:
        for name in done[0]:
            rounds = [one[name] for one in done if name in one]
            print(name, {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]})
        return 0
    for one in done:
        derive(one)
    table = [
        (row, [row.value(one) for one in done if {row.ours, row.other or row.ours} <= one.keys()])
        for row in rows(wanted)
    ]
    return show(table, done)


def measure_all(wanted: dict[str, Measure], parts: dict[str, list[Figures]], number: int, of: int) -> Round:
    """One round: everything that is due once, one after the other, with this round's figures of the parts."""
    began = time.perf_counter()
    due = [name for name in wanted if number % 3 == 0 or not name.startswith(SELDOM)]
    done = {name: wanted[name]() for name in due}
    print(f"round {number + 1} of {of}: {time.perf_counter() - began:.0f} s, {about()['load']}", file=sys.stderr)
    return done | {name: rounds[number] for name, rounds in parts.items()}


def about() -> dict[str, object]:
    """The machine and how busy it is."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm")}
    load = f"load {os.getloadavg()[0]:.1f} on {hardware.cores()} cores"
    return {"processor": platform.processor() or platform.machine(), "load": load, **versions}


def show(table: list[tuple[Row, list[float]]], done: list[Round]) -> int:
    """Print the table and write every figure. Returns the exit code: 1 where a target is missed."""
    width = max(len(row.name) for row, _ in table)
    print(f"{'':{width}s}   median   lowest  highest   target")
    for row, values in table:
        numbers = "  ".join(f"{value:7.4f}" for value in (statistics.median(values), min(values), max(values)))
        target = "" if row.target is None else f"{'<=' if row.less_is_better else '>='} {row.target}"
        print(f"{row.name:{width}s}  {numbers}  {target:>8s}  {row.judge(values)}")
    folder = claim_folder(ROOT / "outputs" / "bench" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    lines = [
        {"name": row.name, "values": values, "target": row.target, "is": row.judge(values)} for row, values in table
    ]
    write_json(folder / "bench.json", {"machine": about(), "rows": lines, "rounds": done})
    print(f"every figure: {folder / 'bench.json'}")
    return 1 if any(row.judge(values) == "MISSED" for row, values in table) else 0


if __name__ == "__main__":
    sys.exit(main())
