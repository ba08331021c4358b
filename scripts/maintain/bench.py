"""Measure the speed of train.py against a hand-written loop on this machine. Each measurement
starts new processes. The programs alternate, and the result is the median ratio over the rounds.

    python scripts/maintain/bench.py              # all measurements: make bench
    python scripts/maintain/bench.py --only tiny  # measurements whose name contains this, no table

The script prints a table, and writes it with all measurements to outputs/bench/<time>/bench.json.
If the middle half of the rounds contains a missed target, the row says "within the spread", because
the machine is then not precise enough to decide.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.bench_measures import (
    SELDOM,
    Figures,
    Measure,
    Round,
    call,
    derive,
    measures,
    parts,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.files import claim_folder, write_json

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """A benchmark target: a figure of our program, alone or compared with that of another program
    as a ratio or a difference.
    """

    name: str
    figure: str
    ours: str
    other: str | None
    # Value that the program must reach. None: the row only shows a comparison.
    target: float | None
    less_is_better: bool = False
    difference: bool = False

    def value(self, done: Round) -> float:
        own = done[self.ours][self.figure]
        if self.other is None:
            return own
        return (
            own - done[self.other][self.figure]
            if self.difference
            else own / done[self.other][self.figure]
        )

    def judge(self, values: list[float]) -> str:
        """Return `met` or `MISSED`, or `within the spread` if the target lies in the middle half of
        the values.
        """
        if self.target is None:
            return ""
        sign, median = -1 if self.less_is_better else 1, statistics.median(values)
        if sign * median >= sign * self.target:
            return "met"
        signed = [sign * value for value in values]
        best = (
            statistics.quantiles(signed, n=4, method="inclusive")[2]
            if len(signed) > 1
            else signed[0]
        )
        return "within the spread" if best >= sign * self.target else "MISSED"


def rows() -> list[Row]:
    """Build all benchmark targets, in the order of the table."""
    rate = "images_per_sec"
    table = []
    for name, target in (("tiny", 0.95), ("resnet18", 0.99), ("small ViT", 0.99)):
        for world in (1, 2):
            sides = (f"{name} x{world}", f"{name} x{world} by hand")
            table.append(
                Row(f"{name} x{world}: images/s over the hand-written loop's", rate, *sides, target)
            )
    table += [
        Row(
            "resnet18: speed-up of ddp x2 over the hand-written",
            "speed-up",
            "ddp",
            "ddp by hand",
            0.98,
        ),
        Row(
            "resnet18 x1: images/s over torch's default AdamW",
            rate,
            "resnet18 x1",
            "default AdamW",
            1.4,
        ),
        Row("command to first step, x1", "first_step", "tiny x1", "tiny x1 by hand", 1.15, True),
        Row("command to first step, x2", "first_step", "tiny x2", "tiny x2 by hand", 1.0, True),
        *(
            Row(f"{name}: peak memory", "peak_mib", f"{name} x1", f"{name} x1 by hand", 1.1, True)
            for name in ("tiny", "resnet18")
        ),
        *(
            Row(
                f"{name}: seconds more than import hydra",
                "seconds",
                name,
                "import hydra",
                0.4,
                True,
                difference=True,
            )
            for name in ("--help", "--cfg job", "a refused config")
        ),
    ]
    for workers in (1, 2):
        ours = f"JPEG ours x{workers}"
        table += [
            Row(
                f"JPEG, {workers} workers: images/s over timm's loader",
                rate,
                ours,
                f"JPEG timm x{workers}",
                1.4,
            ),
            Row(
                f"JPEG, {workers} workers: images/s over a core's",
                rate,
                ours,
                f"JPEG core x{workers}",
                0.9,
            ),
        ]
    return [
        *table,
        Row(
            "synthetic data: share of a step spent waiting",
            "data_wait",
            "resnet18 x1",
            None,
            0.005,
            True,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="measure names that contain this, without the table"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_") as images:
        call([sys.executable, "scripts/maintain/bench_data.py", "make", images])
        everything = measures()
        wanted = {name: measure for name, measure in everything.items() if given.only in name}
        in_parts = parts(Path(images), given.rounds)
        of_parts = {name: part() for name, part in in_parts.items() if given.only in name}
        done = [
            measure_all(wanted, of_parts, number, given.rounds) for number in range(given.rounds)
        ]
    if given.only:
        for name in done[0]:
            rounds = [measured[name] for measured in done if name in measured]
            print(
                name,
                {
                    figure: statistics.median(values[figure] for values in rounds)
                    for figure in rounds[0]
                },
            )
        return 0
    for measured in done:
        derive(measured)
    table = []
    for row in rows():
        names = {row.ours, row.other or row.ours}
        table.append((row, [row.value(measured) for measured in done if names <= measured.keys()]))
    return show(table, done)


def measure_all(
    wanted: dict[str, Measure], parts: dict[str, list[Figures]], number: int, of: int
) -> Round:
    """Run all measurements of one round one after the other, and return their figures. `parts`:
    figures of programs that have measured all rounds at once; those of this round are added.
    """
    began = time.perf_counter()
    due = [name for name in wanted if number % 3 == 0 or not name.startswith(SELDOM)]
    done = {name: wanted[name]() for name in due}
    print(
        f"round {number + 1} of {of}: {time.perf_counter() - began:.0f} s, {about()['load']}",
        file=sys.stderr,
    )
    return done | {name: rounds[number] for name, rounds in parts.items()}


def about() -> dict[str, object]:
    """Describe the machine, its load and the versions of the packages."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm")}
    load = f"load {os.getloadavg()[0]:.1f} on {hardware.cores()} cores"
    return {"processor": platform.processor() or platform.machine(), "load": load, **versions}


def show(table: list[tuple[Row, list[float]]], done: list[Round]) -> int:
    """Print the table of targets, and write all measurements to a file. Return the exit code: 1 if
    a target is missed.
    """
    width = max(len(row.name) for row, _ in table)
    print(f"{'':{width}s}   median   lowest  highest   target")
    for row, values in table:
        numbers = "  ".join(
            f"{value:7.4f}" for value in (statistics.median(values), min(values), max(values))
        )
        target = (
            "" if row.target is None else f"{'<=' if row.less_is_better else '>='} {row.target}"
        )
        print(f"{row.name:{width}s}  {numbers}  {target:>8s}  {row.judge(values)}")
    folder = claim_folder(ROOT / "outputs" / "bench" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    lines = [
        {"name": row.name, "values": values, "target": row.target, "is": row.judge(values)}
        for row, values in table
    ]
    write_json(folder / "bench.json", {"machine": about(), "rows": lines, "rounds": done})
    print(f"every figure: {folder / 'bench.json'}")
    return 1 if any(row.judge(values) == "MISSED" for row, values in table) else 0


if __name__ == "__main__":
    sys.exit(main())
