"""A rank that stops playing along, in whichever way, ends the job promptly with its name, and nothing is left behind.

One table for launch form x strategy x world size x accident. The accidents happen inside real ranks (see `faulty/`).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, Finished, Train

from src.engine.launch.failure import first_failure
from src.engine.launch.supervisor import Ended
from src.engine.machine.lock import is_owned

pytestmark = pytest.mark.processes
FAULTY = Path(__file__).parent / "faulty"
PROMPT = 15.0  # seconds from the accident, and from the watchdog's bell where it needs one
SILENCE = 3  # parallel.timeout of these runs, seconds


@dataclass(frozen=True)
class Accident:
    kind: str
    said: str  # `{rank}` is the rank that had it
    phase: str = "the forward pass"
    status: str = "failed"
    rank: str = "1"
    step: int = 7
    needs_watchdog: bool = False
    named: bool = True  # also under torchrun, where nobody of ours sees exit codes


STALLED = "rank {rank} made no progress for 3 s, last seen in {phase} of step {step}"
ACCIDENTS = {
    "raises": Accident("raise", "rank {rank}: RuntimeError: the accident of this test"),
    "raises_in_evaluation": Accident("raise", "rank {rank}: RuntimeError", "evaluating", step=12),
    "raises_before_the_first_step": Accident("raise", "rank {rank}: RuntimeError", "reading a batch", step=1),
    "no_memory": Accident("no_memory", "rank {rank}: out of memory on cpu with 16 images", status="out_of_memory"),
    "killed": Accident("kill", "rank {rank} was killed by SIGKILL", named=False),
    "crashes": Accident("segv", "rank {rank} was killed by SIGSEGV", named=False),
    "leaves_with_0": Accident("exit0", "rank {rank} left early with exit code 0", named=False),
    "leaves_with_3": Accident("exit3", "rank {rank} left early with exit code 3", named=False),
    "stalls": Accident("stall", STALLED + "; the others waited for it", needs_watchdog=True),
    "stalls_reading": Accident("stall", STALLED + "; the others", "reading a batch", needs_watchdog=True),
    "stalls_evaluating": Accident("stall", STALLED, "evaluating", step=12, needs_watchdog=True),
    "stalls_saving": Accident("stall", STALLED, "saving", rank="0", step=12, needs_watchdog=True),
    "spins": Accident("spin", STALLED, needs_watchdog=True),
    "stopped": Accident("stop", "rank {rank} does not answer", needs_watchdog=True),
    "all_stall": Accident("stall", "other ranks stopped there too", rank="*", needs_watchdog=True),
}
ONCE = ("raises", "killed", "stalls", "leaves_with_0")  # what is tried in every launch form
TABLE = [
    *(("python", "ddp", 2, name) for name in ACCIDENTS),
    *(("torchrun", "ddp", 2, name) for name in (*ONCE, "stopped", "no_memory")),
    *(("torchrun", "ddp", 1, name) for name in ("raises", "stalls")),
    *(("python", "ddp", 1, name) for name in ONCE),
    *(("python", "single", 1, name) for name in ONCE),
    *(("python", "dp", 2, name) for name in ("raises", "stalls")),
]
QUICK = {("python", "ddp", 2, "stalls")}


def have(
    train: Train, accident: Accident, form: str, strategy: str, devices: int, *more: str
) -> tuple[Finished, float, Accident]:
    """The ended run, seconds from the accident to its end, and the accident as it must be told."""
    processes = devices if strategy == "ddp" else 1
    rank = accident.rank if accident.rank == "*" else str(min(int(accident.rank), processes - 1))
    mark = train.base / "mark"
    environment = {
        "FAULT": f"{accident.kind}:{rank}:{accident.step}:{accident.phase}",
        "FAULT_MARK": str(mark),
        "PYTHONPATH": os.pathsep.join([str(FAULTY), str(ROOT)]),
    }
    words = [f"parallel={strategy}", f"parallel.timeout={SILENCE}", "train.log_every=2", *more]
    if form == "python":
        words.append(f"parallel.devices={devices}")
    done = train(*words, form=form, ranks=devices, environment=environment)
    seconds = time.time() - float(mark.read_text().split()[0])
    return done, seconds, Accident(**{**accident.__dict__, "rank": rank})


@pytest.mark.parametrize(
    ("form", "strategy", "devices", "name"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in TABLE],
)
def test_an_accident_ends_the_run_promptly_by_name(
    train: Train, form: str, strategy: str, devices: int, name: str, record_property: pytest.RecordProperty
) -> None:
    done, seconds, accident = have(train, ACCIDENTS[name], form, strategy, devices)
    record_property("seconds_to_end", round(seconds, 1))
    assert done.returncode == 1, done.output
    assert seconds < PROMPT + (SILENCE if accident.needs_watchdog else 0)
    assert done.result["status"] == accident.status
    if form == "python" or accident.named:
        said = accident.said.format(rank=accident.rank, phase=accident.phase, step=accident.step)
        alone = strategy != "ddp" or devices == 1
        said = said.replace("; the others waited for it", "").replace("; the others", "") if alone else said
        said = said.replace("16 images", "32 images") if alone else said
        assert said in done.stderr, done.output
        assert said in done.result["reason"]
    log = done.folder / "logs" / f"rank_{accident.rank.replace('*', '0')}.log"
    if accident.needs_watchdog and accident.kind != "stop":
        assert "sitecustomize.py" in log.read_text(), "the stack shows where it stood"
    if accident.kind == "raise":
        assert "Traceback (most recent call last)" in done.stderr
    assert not is_owned(done.folder)
    assert [path.name for path in done.folder.rglob("*.tmp")] == []
    assert train.left_after(2) == []


@pytest.mark.slow
def test_a_run_restarts_from_its_newest_checkpoint(train: Train) -> None:
    settings = ("checkpoint.every_steps=2", "parallel.max_restarts=1")
    done, _, _ = have(train, ACCIDENTS["killed"], "python", "ddp", 2, *settings)
    assert done.returncode == 0, done.output
    assert done.result["steps"] == 12
    steps = [line["step"] for line in done.metrics if "train/loss" in line]
    assert steps == sorted(set(steps)), "no step is logged twice"
    assert "going on from" in (done.folder / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
def test_when_restarts_are_used_up_the_last_accident_is_told(train: Train) -> None:
    accident = Accident("raise", "", step=7)
    train.environment["FAULT_AGAIN"] = "12"  # the second attempt gets to step 12
    done, _, _ = have(train, accident, "python", "ddp", 2, "checkpoint.every_steps=2", "parallel.max_restarts=1")
    assert done.returncode == 1
    assert done.stderr.count("Failed: rank 1: RuntimeError: the accident of this test") == 1
    record = json.loads((done.folder / "logs" / "failure_rank_1.json").read_text())
    assert record["attempt"] == 1
    assert "step 6" in (done.folder / "logs" / "rank_0.log").read_text(), "it went on from the newest checkpoint"


@pytest.mark.parametrize(
    ("codes", "oom_kills", "status", "said"),
    [
        ({1: -9}, 0, "failed", "rank 1 was killed by SIGKILL"),
        ({1: -9}, 1, "out_of_memory", "the kernel, which ran out of memory"),
        ({0: -15, 1: -11}, 1, "failed", "rank 1 was killed by SIGSEGV"),
        ({0: -15}, 0, "failed", "rank 1 left early with exit code 0"),
        ({0: 1, 1: 143}, 0, "failed", "rank 0 left early with exit code 1"),
    ],
)
def test_what_exit_codes_alone_say(
    tmp_path: Path, codes: dict[int, int], oom_kills: int, status: str, said: str
) -> None:
    failure = first_failure(tmp_path, Ended(exit_codes=codes, world_size=2, oom_kills=oom_kills))
    assert failure["status"] == status
    assert said in failure["reason"]
