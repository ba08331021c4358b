"""A rank that stops playing along, in whichever way, ends the job promptly with its name, and nothing is left behind.

One table for launch form x strategy x world size x accident, of commands; one of what happens inside ranks, where the
launcher sees nothing else. The accidents happen inside real ranks (see `faulty/`).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, Train, read_lines, resolved, warm_ranks

from src.engine.launch import job
from src.engine.launch.failure import first_failure
from src.engine.launch.supervisor import Ended
from src.engine.machine.lock import is_owned
from src.engine.record.result import Result, read_result

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
    "stalls": Accident("stall", STALLED + "; the others waited for it", needs_watchdog=True),
    "stalls_reading": Accident("stall", STALLED + "; the others", "reading a batch", needs_watchdog=True),
    "stalls_evaluating": Accident("stall", STALLED, "evaluating", step=12, needs_watchdog=True),
    "stalls_saving": Accident("stall", STALLED, "saving", rank="0", step=12, needs_watchdog=True),
    "spins": Accident("spin", STALLED, needs_watchdog=True),
    "stopped": Accident("stop", "rank {rank} does not answer", needs_watchdog=True),
    "all_stall": Accident("stall", "other ranks stopped there too", rank="*", needs_watchdog=True),
}
# What the launcher sees and does: an exit code, a signal, a rank that does not end.
COMMANDS = [
    *(("python", "ddp", 2, name) for name in ("raises", "killed", "leaves_with_0", "stalls", "stopped")),
    *(("torchrun", "ddp", 2, name) for name in ("raises", "killed", "leaves_with_0", "stalls")),
    ("python", "ddp", 1, "leaves_with_0"),
    *(("python", "single", 1, name) for name in ("killed", "leaves_with_0", "stalls")),
    ("python", "dp", 2, "raises"),
]
# What differs inside the ranks alone.
WARM = [
    *(("ddp", 2, name) for name in ("raises_in_evaluation", "raises_before_the_first_step", "no_memory", "crashes")),
    *(("ddp", 2, name) for name in ("stalls_reading", "stalls_evaluating", "stalls_saving", "spins", "all_stall")),
    *(("ddp", 1, name) for name in ("raises", "stalls")),
    ("dp", 2, "stalls"),
    ("single", 1, "no_memory"),
]
QUICK = {("ddp", 2, "stalls_reading")}  # test_ends.py has a rank that raises, and a command that a signal ends


@dataclass
class Had:
    """A run that an accident has ended."""

    code: int
    stderr: str
    folder: Path
    accident: Accident  # as it must be told
    seconds: float  # from it to the end

    @property
    def result(self) -> Result:
        return read_result(self.folder)


def placed(accident: Accident, strategy: str, devices: int) -> Accident:
    """Of the rank that has it, where there is one of that number."""
    processes = devices if strategy == "ddp" else 1
    return replace(accident, rank="*" if accident.rank == "*" else str(min(int(accident.rank), processes - 1)))


def ordered(accident: Accident, mark: Path) -> dict[str, str]:
    """The environment in which it happens (see `faulty/`)."""
    where = f"{accident.kind}:{accident.rank}:{accident.step}:{accident.phase}"
    return {"FAULT": where, "FAULT_MARK": str(mark), "PYTHONPATH": os.pathsep.join([str(FAULTY), str(ROOT)])}


def words_of(strategy: str, devices: int, form: str = "python") -> tuple[str, ...]:
    words = (f"parallel={strategy}", f"parallel.timeout={SILENCE}", "train.log_every=2")
    return words if form == "torchrun" else (*words, f"parallel.devices={devices}")


def have(train: Train, accident: Accident, form: str, strategy: str, devices: int, *more: str) -> Had:
    accident, mark = placed(accident, strategy, devices), train.base / "mark"
    words = (*words_of(strategy, devices, form), *more)
    done = train(*words, form=form, ranks=devices, environment=ordered(accident, mark))
    return Had(done.returncode, done.stderr, done.folder, accident, time.time() - happened_at(mark))


def happened_at(mark: Path) -> float:
    return float(mark.read_text().split()[0])


def check(had: Had, strategy: str, devices: int, is_named: bool = True) -> None:
    accident = had.accident
    assert had.code == 1, had.stderr
    assert had.seconds < PROMPT + (SILENCE if accident.needs_watchdog else 0)
    assert had.result.status == accident.status
    if is_named:
        said = accident.said.format(rank=accident.rank, phase=accident.phase, step=accident.step)
        if strategy != "ddp" or devices == 1:
            said = said.partition("; the others")[0].replace("16 images", "32 images")
        assert said in had.stderr
        assert said in had.result.reason
    log = had.folder / "logs" / f"rank_{accident.rank.replace('*', '0')}.log"
    if accident.needs_watchdog and accident.kind != "stop":
        assert "sitecustomize.py" in log.read_text(), "the stack shows where it stood"
    if accident.kind == "raise":
        assert "Traceback (most recent call last)" in had.stderr
    assert [path.name for path in had.folder.rglob("*.tmp")] == []


@pytest.mark.slow
@pytest.mark.parametrize(("form", "strategy", "devices", "name"), COMMANDS)
def test_an_accident_ends_the_run_promptly_by_name(
    train: Train, form: str, strategy: str, devices: int, name: str
) -> None:
    had = have(train, ACCIDENTS[name], form, strategy, devices)
    check(had, strategy, devices, is_named=form == "python" or had.accident.named)
    assert not is_owned(had.folder)
    assert train.left_after(2) == []


@pytest.mark.parametrize(
    ("strategy", "devices", "name"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in WARM],
)
def test_an_accident_inside_a_rank_is_told_by_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    devices: int,
    name: str,
) -> None:
    accident, mark = placed(ACCIDENTS[name], strategy, devices), tmp_path / "mark"
    ranks = partial(warm_ranks, environment=ordered(accident, mark), first=FAULTY / "sitecustomize.py")
    monkeypatch.setattr(job, "run_ranks", ranks)
    code = job.run_job(resolved(*words_of(strategy, devices)), tmp_path / "run")
    seconds = time.time() - happened_at(mark)
    check(Had(code, capsys.readouterr().err, tmp_path / "run", accident, seconds), strategy, devices)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["python", "torchrun"])
def test_a_run_restarts_from_its_newest_checkpoint(train: Train, form: str) -> None:
    restarts = ("parallel.max_restarts=1",) if form == "python" else ()
    if form == "torchrun":
        train.environment["PET_MAX_RESTARTS"] = "1"  # as --max-restarts
    had = have(train, ACCIDENTS["killed"], form, "ddp", 2, "checkpoint.every_steps=2", *restarts)
    assert (had.code, had.result.steps) == (0, 12), had.stderr
    steps = [line["step"] for line in read_lines(had.folder / "metrics.jsonl") if "train/loss" in line]
    assert steps == sorted(set(steps)), "no step is logged twice"
    assert "going on from" in (had.folder / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
def test_when_restarts_are_used_up_the_last_accident_is_told(train: Train) -> None:
    accident = Accident("raise", "", step=7)
    train.environment["FAULT_AGAIN"] = "12"  # the second attempt gets to step 12
    had = have(train, accident, "python", "ddp", 1, "checkpoint.every_steps=2", "parallel.max_restarts=1")
    assert had.code == 1
    assert had.stderr.count("Failed: rank 0: RuntimeError: the accident of this test") == 1
    record = json.loads((had.folder / "logs" / "failure_rank_0.json").read_text())
    assert record["attempt"] == 1
    assert "step 6" in (had.folder / "logs" / "rank_0.log").read_text(), "it went on from the newest checkpoint"


@pytest.mark.parametrize(
    ("codes", "oom_kills", "status", "said"),
    [
        ({1: -9}, 0, "failed", "rank 1 was killed by SIGKILL"),
        ({0: -15, 1: 3}, 0, "failed", "rank 1 left early with exit code 3"),
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
