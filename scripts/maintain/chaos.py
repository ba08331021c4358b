"""Train under ddp with random faults, and resume after each fault. The faults kill, stop and signal
processes, fill the disk and damage files.

    python scripts/maintain/chaos.py --minutes 5 --seed 0

At the end, the weights, curves and numbers of samples must equal those of a run without faults.
outputs/chaos/<time>/faults.json lists the faults. Exit code 0 if the project handled all faults.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import psutil

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.chaos_faults import GRACE, KINDS, Life
from timm_parallel.machine.files import claim_folder, write_json
from timm_parallel.record.result import read_metrics, read_result

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "model=tiny",
    "parallel=ddp",
    "parallel.devices=2",
    "parallel.threads_per_device=1",
    "parallel.accelerator=cpu",
    "parallel.timeout=4",
    "train.log_every=10",
    "checkpoint.every_steps=15",
    "checkpoint.keep=3",
    "data.workers=1",
    "data.augment.scale=[0.5,1]",
    "data.augment.mixup=0.2",
    "model.ema.decay=0.99",
    "+model.kwargs.drop_rate=0.1",
    "print_config=false",
)
# Seconds within which all processes must end after a fault.
PROMPT = 15.0
# Seconds within which all processes must end if the watchdog must notice the fault first.
SILENCE = 4 + 15.0


@dataclass
class Fault:
    kind: str
    # Time from the fault until all processes ended.
    seconds: float
    exit_code: int
    complaint: str = ""


@dataclass
class Chaos:
    """Injects random faults into runs, and records them. A seed determines the faults."""

    draw: random.Random
    base: Path
    # Time by time.monotonic() after which no fault is injected.
    deadline: float
    # Number of faults to inject even after the deadline.
    at_least: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        return time.monotonic() < self.deadline or len(self.faults) < self.at_least

    def start(self, folder: Path, epochs: int, room: int | None = None) -> Life:
        """Start a run, or resume it if it has a checkpoint. `room`: limit of the size of a file in
        bytes, to simulate a full disk; None: no limit.
        """
        overrides = [f"resume={folder}"]
        if not any((folder / "checkpoints").glob("*.pt")):
            shutil.rmtree(folder, ignore_errors=True)
            overrides = [*SETTINGS, f"train.epochs={epochs}", f"hydra.run.dir={folder}"]

        def limit() -> None:
            if room is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

        log = open(self.base / "console.log", "ab")
        command = [sys.executable, str(ROOT / "train.py"), *overrides]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=limit,
        )
        log.close()
        return Life(process, folder)

    def live(self, life: Life) -> bool:
        """Let a run train for a random time before the next fault. Return True if the run has not
        ended by itself.
        """
        log = life.folder / "metrics.jsonl"
        size = log.stat().st_size if log.exists() else 0
        until = time.monotonic() + GRACE
        while life.process.poll() is None and time.monotonic() < until:
            if log.exists() and log.stat().st_size > size:
                time.sleep(self.draw.uniform(0, 2.5))
                return life.process.poll() is None
            time.sleep(0.02)
        return False

    def strike(self, life: Life) -> None:
        """Inject a random fault into a run, and wait until all of its processes have ended. Record
        a complaint if this takes too long or the exit code is wrong.
        """
        kind = self.draw.choice(list(KINDS))
        before = life.family()
        began = time.monotonic()
        allowed = KINDS[kind](self.draw, life)
        code, complaint = life.end()
        left = psutil.wait_procs(before, timeout=max(0.1, began + PROMPT - time.monotonic()))[1]
        seconds = time.monotonic() - began
        if left:
            complaint = f"left behind: {[process.pid for process in left]}"
            for process in left:
                process.kill()
        limit = SILENCE if kind.startswith("stop") else PROMPT
        if not complaint and seconds > limit:
            complaint = f"took {seconds:.1f} s, more than {limit:.0f}"
        if not complaint and code not in allowed:
            complaint = f"exit code {code}, expected {' or '.join(map(str, allowed))}"
        self.note(Fault(kind, round(seconds, 2), code, complaint))

    def note(self, fault: Fault) -> None:
        self.faults.append(fault)
        print(
            f"{len(self.faults):4d}  {fault.kind:28s} {fault.seconds:6.1f} s  "
            f"{fault.complaint or 'held'}",
            flush=True,
        )

    def damage(self, folder: Path) -> None:
        """Damage the newest checkpoint with a probability of 30 %, so that the next resume must use
        an older one.
        """
        checkpoints = sorted(
            (folder / "checkpoints").glob("step_*.pt"), key=lambda path: path.stat().st_mtime
        )
        if len(checkpoints) < 2 or self.draw.random() > 0.3:
            return
        newest = folder / "checkpoints" / "last.pt"
        how = self.draw.choice(["cut off", "overwritten", "removed"])
        data = bytearray(newest.read_bytes())
        if how == "cut off":
            # Truncating last.pt also truncates the newest step_N.pt, because last.pt is a hard link
            # to it.
            newest.write_bytes(data[: self.draw.randrange(len(data))])
        elif how == "overwritten":
            where = self.draw.randrange(len(data) - 64)
            data[where : where + 64] = self.draw.randbytes(64)
            newest.write_bytes(data)
        else:
            newest.unlink()
        self.note(Fault(f"last.pt {how}", 0.0, 0))

    def full_disk(self, folder: Path, epochs: int) -> None:
        """Resume a run on a full disk in some rounds. The run must end without a hang, and keep its
        checkpoints.
        """
        if self.draw.random() > 0.15 or not any((folder / "checkpoints").glob("*.pt")):
            return
        began = time.monotonic()
        life = self.start(folder, epochs, room=150_000)
        code, complaint = life.end()
        if not complaint and code not in (0, 1):
            complaint = f"exit code {code}"
        self.note(Fault("disk full", round(time.monotonic() - began, 2), code, complaint))

    def round(self, whole: Path, epochs: int) -> str:
        """Inject faults into a run, and resume it, until it is done. Return a text that describes
        how it differs from the run without faults, or an empty text if both are equal.
        """
        folder = self.base / f"disturbed_{sum(1 for _ in self.base.glob('disturbed_*'))}"
        while True:
            life = self.start(folder, epochs)
            if self.continues and self.live(life):
                self.strike(life)
            elif life.process.wait(timeout=GRACE * 5) != 0:
                return (
                    f"a run without a fault: exit code {life.process.returncode}; see "
                    f"{self.base}/console.log"
                )
            if (folder / "result.json").exists() and read_result(folder).status == "done":
                return difference(whole, folder)
            self.damage(folder)
            self.full_disk(folder, epochs)


def difference(whole: Path, folder: Path) -> str:
    """Compare the final state of a run with faults to that of a run without faults. Return a text
    that describes the first difference, or an empty text if both are equal.
    """
    import torch

    expected = torch.load(whole / "checkpoints" / "last.pt", weights_only=True)
    actual = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    pairs = {
        "model": (expected["model"], actual["model"]),
        "ema": (expected["averages"]["ema"], actual["averages"]["ema"]),
    }
    for part, (was, now) in pairs.items():
        for name, tensor in was.items():
            if not torch.equal(tensor, now[name]):
                return f"{part}: {name} differs"
    # The training time of two runs differs.
    was, now = ({**state["progress"], "seconds": None} for state in (expected, actual))
    if was != now:
        return f"progress: {was} and {now}"
    a, b = read_result(whole), read_result(folder)
    if (a.samples_seen, a.steps, a.val, a.test) != (b.samples_seen, b.steps, b.val, b.test):
        return f"result: {a.samples_seen, a.steps, a.val} and {b.samples_seen, b.steps, b.val}"
    losses = [
        [
            (line["step"], line["train/loss"])
            for line in read_metrics(run / "metrics.jsonl")
            if "train/loss" in line
        ]
        for run in (whole, folder)
    ]
    return "" if losses[0] == losses[1] else "the logged losses differ, or a step was logged twice"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="time with faults; the last run ends undisturbed"
    )
    parser.add_argument(
        "--faults", type=int, default=0, help="least number of faults, even if it takes longer"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults and their times")
    parser.add_argument("--epochs", type=int, default=40, help="length of a run")
    parser.add_argument("--out", type=Path, help="folder (default: below outputs/chaos)")
    arguments = parser.parse_args()
    name = time.strftime("%Y-%m-%d/%H-%M-%S")
    base = claim_folder((arguments.out or ROOT / "outputs" / "chaos" / name).resolve())
    chaos = Chaos(random.Random(arguments.seed), base, deadline=0.0)
    whole = chaos.base / "undisturbed"
    undisturbed = chaos.start(whole, arguments.epochs)
    if undisturbed.ranks_in_training() != 2 or undisturbed.process.wait(timeout=600) != 0:
        undisturbed.process.kill()
        print(
            f"the undisturbed run failed, or does not have two ranks; see {chaos.base}/console.log",
            file=sys.stderr,
        )
        return 1
    chaos.deadline, chaos.at_least = time.monotonic() + 60 * arguments.minutes, arguments.faults
    runs, differences = 0, []
    while chaos.continues or not runs:
        changed = chaos.round(whole, arguments.epochs)
        runs += 1
        print(f"run {runs}: {changed or 'equal to the undisturbed one'}", flush=True)
        if changed:
            differences.append(changed)
    return summarize(chaos, arguments, runs, differences)


def summarize(
    chaos: Chaos, arguments: argparse.Namespace, runs: int, differences: list[str]
) -> int:
    """Print a summary of the faults, and write all of them to faults.json. Return the exit code: 1
    if there are complaints.
    """
    seconds = pd.DataFrame(chaos.faults, columns=["kind", "seconds"]).groupby("kind")["seconds"]
    print(f"\n{seconds.agg(['count', 'median', 'max'])}")
    complaints = [
        f"{fault.kind}: {fault.complaint}" for fault in chaos.faults if fault.complaint
    ] + differences
    print(
        f"{len(chaos.faults)} faults, {runs} runs, {len(complaints)} complaints; seed "
        f"{arguments.seed}; {chaos.base}"
    )
    write_json(
        chaos.base / "faults.json",
        {
            "seed": arguments.seed,
            "minutes": arguments.minutes,
            "runs": runs,
            "complaints": complaints,
            "faults": [asdict(fault) for fault in chaos.faults],
        },
    )
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
