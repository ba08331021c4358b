"""What a run keeps of its speed beside a program that takes one core, and beside a second run of its own kind.

    python scripts/maintain/bench_neighbour.py                          # the table of docs/benchmarks.md, about 9 minutes
    python scripts/maintain/bench_neighbour.py --kinds single --settings ours libgomp GOMP_SPINCOUNT=1000 --windows quiet

Two runs for each setting of OpenMP live at the same time; all but those that a window of a few seconds is about are
suspended. So the windows that are compared lie seconds apart, and no start-up is measured. Every figure is a median over
the rounds; the rates of a window come from the clock of metrics.jsonl. Needs a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

from src.engine.machine import hardware
from src.engine.record.result import read_metrics

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("single", "ddp", "dp")
SPINNING = "libgomp"  # with its own default, which spins for milliseconds at every barrier
SETTINGS: dict[str, dict[str, str]] = {
    "ours": {},  # what train.py sets for itself
    SPINNING: {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
BATCH = 64
START_SECONDS = 120.0
WARM_UP_STEPS = 3
SETTLE_SECONDS = 5.0
OTHERS, TRIES = 0.15, 5  # cores that everything else may take during a window; how often one is taken again
TARGETS = {"quiet": 0.98, "busy": 0.62, "twin": 0.45}


@dataclass
class Suspendable:
    """A program in a session of its own, as from another terminal; suspended and resumed with all that it has started."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, command: Sequence[str], environment: dict[str, str], log: Path) -> Suspendable:
        with open(log, "wb") as output:
            options: dict[str, Any] = {"env": environment, "stdout": output, "stderr": output}
            return cls(subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options))

    def everybody(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def send(self, number: int) -> None:
        for one in self.everybody():
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            for one in self.everybody():
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait()


@dataclass
class Training:
    """The main job on random images, under one setting."""

    program: Suspendable
    log: Path  # metrics.jsonl
    windows: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # time.time() of start and end

    def rates(self, what: str) -> list[float]:
        """Steps per second in each window of this name."""
        lines = [line for line in read_metrics(self.log) if "train/loss" in line]
        offset = self.log.stat().st_mtime - lines[-1]["time"]  # the clock of the file counts from the run's start
        at = [offset + line["time"] for line in lines]
        found = []
        for start, end in self.windows[what]:
            inside = [moment for moment in at if start <= moment <= end]
            if len(inside) < 3:  # hardly any step is done: their number says enough
                found.append(len(inside) / (end - start))
            else:
                found.append((len(inside) - 1) / (inside[-1] - inside[0]))
        return found


Pairs = dict[str, tuple[Training, Training]]  # by setting: two runs of its own


def command(kind: str, folder: Path) -> list[str]:
    devices = 1 if kind == "single" else 2
    words = [
        *("print_config=false", f"parallel={kind}", f"parallel.devices={devices}", "parallel.accelerator=cpu"),
        *("data=synthetic", "data.kwargs.num_samples=64000", f"data.batch_size={BATCH}", "train.evaluate_every=0"),
        *("train.log_every=1", "train.epochs=1", f"hydra.run.dir={folder}"),
    ]
    return [sys.executable, "train.py", *words]


@contextmanager
def trainings(kind: str, settings: Sequence[str], base: Path) -> Iterator[Pairs]:
    """Two runs of this kind for each setting, all past their first steps and all suspended."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    found: Pairs = {}
    with ExitStack() as stack:
        for setting in settings:
            pair = []
            for twin in range(2):
                folder = base / f"{kind}_{setting.replace('=', '_')}_{twin}"
                environment = {**kept, **variables(setting)}
                program = Suspendable.start(command(kind, folder), environment, folder.with_suffix(".log"))
                stack.callback(program.end)
                pair.append(Training(program, folder / "metrics.jsonl"))
                wait_until_warm(pair[-1])
                program.send(signal.SIGSTOP)
            found[setting] = (pair[0], pair[1])
        yield found
        for twins in found.values():
            for one in twins:
                assert one.program.process.poll() is None, f"a run ended early: {one.log.parent.with_suffix('.log')}"


def variables(setting: str) -> dict[str, str]:
    return SETTINGS[setting] if setting in SETTINGS else dict([setting.split("=")])


def wait_until_warm(training: Training) -> None:
    until = time.monotonic() + START_SECONDS
    while not (training.log.exists() and training.log.read_bytes().count(b"\n") >= WARM_UP_STEPS):
        if training.program.process.poll() is not None or time.monotonic() > until:
            said = training.log.parent.with_suffix(".log").read_text(errors="replace")
            raise RuntimeError(f"{training.log.parent.name} did not start:\n{said[-2000:]}")
        time.sleep(0.1)


def measure(
    kind: str, settings: Sequence[str], windows: Sequence[str], rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Setting -> what -> ratios of the rounds: `quiet` over libgomp's default, `busy` and `twin` over the setting's quiet.

    `twin` is the slower one of two runs beside each other.
    """
    with tempfile.TemporaryDirectory(prefix="bench_") as base, ExitStack() as stack:
        neighbour = Suspendable.start(
            [sys.executable, "-c", "while True: pass"], dict(os.environ), Path(base) / "n.log"
        )
        stack.callback(neighbour.end)
        neighbour.send(signal.SIGSTOP)
        pairs = stack.enter_context(trainings(kind, settings, Path(base)))
        take_rounds(pairs, neighbour, windows, rounds, seconds)
        return ratios(pairs, windows)


def take_rounds(pairs: Pairs, neighbour: Suspendable, windows: Sequence[str], rounds: int, seconds: float) -> None:
    """Every window of every round; a window in which the rest of the machine was busy is taken again."""
    for number in range(rounds):
        for what in windows:
            for setting in pairs if number % 2 else reversed(pairs):
                one, other = pairs[setting]
                beside = {"quiet": [], "busy": [neighbour], "twin": [other.program]}[what]
                watched = [one, other] if what == "twin" else [one]
                for _ in range(TRIES):
                    began, ended, others = window([one.program, *beside], seconds)
                    if others <= OTHERS:
                        break
                else:
                    raise RuntimeError(
                        f"other programs take {others:.2f} cores of this machine: wait until it is quiet"
                    )
                for training in watched:
                    training.windows.setdefault(what, []).append((began, ended))


def window(running: list[Suspendable], seconds: float) -> tuple[float, float, float]:
    """Let `running` run for so long: (start, end, cores that everything else took meanwhile).

    What comes before it has settled does not count: a run looks once a second whether it is crowded.
    """
    for program in running:
        program.send(signal.SIGCONT)
    time.sleep(SETTLE_SECONDS)
    own = {process.pid for program in running for process in program.everybody()}
    before, began = _seconds_of_others(own), time.time()
    time.sleep(seconds)
    ended = time.time()
    others = (_seconds_of_others(own) - before) / (ended - began)
    for program in running:
        program.send(signal.SIGSTOP)
    return began, ended, others


def _seconds_of_others(own: set[int]) -> float:
    """Processor seconds of every process but these, children that have ended included."""
    total = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            total += 0.0 if process.pid in own else sum(process.cpu_times()[:4])
    return total


def ratios(pairs: Pairs, windows: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    quiet = {setting: one.rates("quiet") for setting, (one, _) in pairs.items()}
    found = {}
    for setting, (one, other) in pairs.items():
        own = quiet[setting]
        found[setting] = {
            "rate": [BATCH * rate for rate in own],
            "quiet": [rate / other for rate, other in zip(own, quiet.get(SPINNING, own), strict=True)],
        }
        kept = {"busy": one.rates("busy")} if "busy" in windows else {}
        kept |= {"twin": [*map(min, one.rates("twin"), other.rates("twin"))]} if "twin" in windows else {}
        for what, rates in kept.items():
            found[setting][what] = [rate / alone for rate, alone in zip(rates, own, strict=True)]
    return found


def main() -> int:
    """Returns the exit code: 1 where the medians of `ours` miss a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=KINDS)
    add("--settings", nargs="+", default=["ours", SPINNING], help="ours, libgomp, passive or NAME=value")
    add("--windows", nargs="+", choices=TARGETS, default=list(TARGETS), help="quiet is what others are held against")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=3.0, help="length of a window")
    given = parser.parse_args()
    windows = [what for what in TARGETS if what == "quiet" or what in given.windows]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # nothing stays behind
    print(f"{hardware.cores()} cores; images/s when quiet, over {SPINNING}'s; share kept beside one busy core, and")
    print(f"beside a second run (the slower of the two). Median (lowest … highest). At least: {TARGETS}.")
    missed = False
    for kind in given.kinds:
        for setting, figures in measure(kind, given.settings, windows, given.rounds, given.seconds).items():
            medians = {what: statistics.median(figures[what]) for what in windows}
            missed |= setting == "ours" and any(medians[what] < TARGETS[what] for what in windows)
            shown = "  ".join(
                f"{what} {medians[what]:.2f} ({min(figures[what]):.2f} … {max(figures[what]):.2f})" for what in windows
            )
            print(f"{kind:7s} {setting:22s} {statistics.median(figures['rate']):6.1f} images/s  {shown}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
