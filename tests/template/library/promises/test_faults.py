"""Tests that a failing or stalled rank, or a full disk, ends the run promptly. The error names the
rank, and no process remains. faulty/sitecustomize.py injects the faults into real ranks.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.template.runs import FAULTY, fault_environment, resolved
from timm_parallel.faults.failure import RankExits, first_failure
from timm_parallel.launch import job
from timm_parallel.machine.files import is_locked
from timm_parallel.record.result import Result, read_result
from timm_parallel.run import checkpoint
from timm_parallel.testing.commands import Train
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import warm_ranks

pytestmark = pytest.mark.processes
# Longest allowed time in seconds between a fault and the end of the run. If only the watchdog
# detects the fault, the time starts with the alarm of the watchdog.
PROMPT = 15.0
WITH_RANKS = ("ddp", "fsdp")
# Value of parallel.timeout in all runs, in seconds.
SILENCE = 3


@dataclass(frozen=True)
class Fault:
    kind: str
    # Expected part of the error message, in which {rank} stands for the rank with the fault.
    message: str
    phase: str = "the forward pass"
    status: str = "failed"
    rank: str = "1"
    step: int = 7
    needs_watchdog: bool = False
    # False if the error names the rank only when train.py starts the ranks. Under torchrun, the
    # exit codes of the ranks are not visible to this project.
    named: bool = True

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}:{self.phase}"


STALLED = "rank {rank} made no progress for 3 s, last seen in {phase} of step {step}"
FAULTS = {
    "raises": Fault("raise", "rank {rank}: RuntimeError: the accident of this test"),
    "raises_in_evaluation": Fault("raise", "rank {rank}: RuntimeError", "evaluating", step=12),
    "raises_before_the_first_step": Fault(
        "raise", "rank {rank}: RuntimeError", "reading a batch", step=1
    ),
    "no_memory": Fault(
        "no_memory", "rank {rank}: out of memory on cpu with 16 images", status="out_of_memory"
    ),
    "killed": Fault("kill", "rank {rank} was killed by SIGKILL", named=False),
    "crashes": Fault("segv", "rank {rank} was killed by SIGSEGV", named=False),
    "leaves_with_0": Fault("exit0", "rank {rank} exited early with exit code 0", named=False),
    "stalls": Fault("stall", STALLED + "; the others waited for it", needs_watchdog=True),
    "stalls_reading": Fault(
        "stall", STALLED + "; the others", "reading a batch", needs_watchdog=True
    ),
    "stalls_evaluating": Fault("stall", STALLED, "evaluating", step=12, needs_watchdog=True),
    "stalls_saving": Fault("stall", STALLED, "saving", rank="0", step=12, needs_watchdog=True),
    "spins": Fault("spin", STALLED, needs_watchdog=True),
    "stopped": Fault("stop", "rank {rank} does not answer", needs_watchdog=True),
    "all_stall": Fault("stall", "other ranks stopped there too", rank="*", needs_watchdog=True),
}
# Faults that the launcher sees as an exit code, a signal or a rank that does not end. They are
# tested with a real launcher.
COMMANDS = [
    *(
        ("python", "ddp", 2, name)
        for name in ("killed", "raises", "leaves_with_0", "stalls", "stopped")
    ),
    ("python", "dp", 2, "raises"),
    *(("torchrun", "ddp", 2, name) for name in ("raises", "killed", "leaves_with_0", "stalls")),
    *(("python", "fsdp", 2, name) for name in ("killed", "stalls")),
    ("python", "ddp", 1, "leaves_with_0"),
    *(("python", "single", 1, name) for name in ("killed", "stalls")),
]
# Faults that look equal to every launcher, because only the code inside the rank differs. They are
# tested in forked ranks, which is faster.
WARM = [
    *(
        ("ddp", 2, name)
        for name in ("raises_in_evaluation", "raises_before_the_first_step", "no_memory", "crashes")
    ),
    *(
        ("ddp", 2, name)
        for name in ("stalls_reading", "stalls_evaluating", "stalls_saving", "spins", "all_stall")
    ),
    *(("fsdp", 2, name) for name in ("crashes", "stalls_saving")),
    *(("ddp", 1, name) for name in ("raises", "stalls")),
    ("dp", 2, "stalls"),
    ("single", 1, "no_memory"),
]


@dataclass
class FaultyRun:
    """Exit code, output and run folder of a run that a fault has ended."""

    code: int
    stderr: str
    folder: Path
    # The injected fault, which the error message must report.
    fault: Fault
    # Seconds between the fault and the end of the run.
    seconds: float

    @property
    def result(self) -> Result:
        return read_result(self.folder)


def fitted(fault: Fault, strategy: str, devices: int) -> Fault:
    """Return the fault with a rank that a run of this strategy and number of devices has."""
    processes = devices if strategy in WITH_RANKS else 1
    return replace(
        fault, rank="*" if fault.rank == "*" else str(min(int(fault.rank), processes - 1))
    )


def overrides_of(strategy: str, devices: int, form: str = "python") -> tuple[str, ...]:
    overrides = (f"parallel={strategy}", f"parallel.timeout={SILENCE}", "train.log_every=2")
    return overrides if form == "torchrun" else (*overrides, f"parallel.devices={devices}")


def run_with(
    train: Train, fault: Fault, form: str, strategy: str, devices: int, *more: str
) -> FaultyRun:
    fault, mark = fitted(fault, strategy, devices), train.base / "mark"
    overrides = (*overrides_of(strategy, devices, form), *more)
    done = train(
        *overrides, form=form, ranks=devices, environment=fault_environment(fault.text, mark)
    )
    return FaultyRun(
        done.returncode, done.stderr, done.folder, fault, time.time() - fault_time(mark)
    )


def fault_time(mark: Path) -> float:
    return float(mark.read_text().split()[0])


def check(run: FaultyRun, strategy: str, devices: int, is_named: bool = True) -> None:
    fault = run.fault
    assert run.code == 1, run.stderr
    assert run.seconds < PROMPT + (SILENCE if fault.needs_watchdog else 0)
    assert run.result.status == fault.status
    if is_named:
        message = fault.message.format(rank=fault.rank, phase=fault.phase, step=fault.step)
        if strategy not in WITH_RANKS or devices == 1:
            message = message.partition("; the others")[0].replace("16 images", "32 images")
        assert message in run.stderr
        assert message in run.result.reason
    log = run.folder / "logs" / f"rank_{fault.rank.replace('*', '0')}.log"
    if fault.needs_watchdog and fault.kind != "stop":
        assert "sitecustomize.py" in log.read_text(), (
            "expected a stack that shows where the rank stopped"
        )
    if fault.kind == "raise":
        assert "Traceback (most recent call last)" in run.stderr
    assert [path.name for path in run.folder.rglob("*.tmp")] == []


@pytest.mark.sample(40)
@pytest.mark.slow
@pytest.mark.parametrize(("form", "strategy", "devices", "name"), COMMANDS)
def test_crash_or_stall_of_a_rank_ends_the_run_promptly_and_error_names_the_rank(
    train: Train, form: str, strategy: str, devices: int, name: str
) -> None:
    run = run_with(train, FAULTS[name], form, strategy, devices)
    check(run, strategy, devices, is_named=form == "python" or run.fault.named)
    assert not is_locked(run.folder)
    assert train.left_after(2) == []


@pytest.mark.parametrize(
    ("strategy", "devices", "name"),
    # Not all are slow. test_ends.py has quick tests of other failures.
    [
        pytest.param(*row, marks=() if row[2] == "stalls_reading" else pytest.mark.slow)
        for row in WARM
    ],
)
@pytest.mark.slow(seconds=7)
@pytest.mark.sample(24)
def test_error_names_rank_phase_and_step_of_a_crash_or_stall_inside_a_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    devices: int,
    name: str,
) -> None:
    fault, mark = fitted(FAULTS[name], strategy, devices), tmp_path / "mark"
    ranks = partial(
        warm_ranks,
        environment=fault_environment(fault.text, mark),
        first=FAULTY / "sitecustomize.py",
    )
    monkeypatch.setattr(job, "run_ranks", ranks)
    code = job.run_job(resolved(*overrides_of(strategy, devices)), tmp_path / "run")
    seconds = time.time() - fault_time(mark)
    check(
        FaultyRun(code, capsys.readouterr().err, tmp_path / "run", fault, seconds),
        strategy,
        devices,
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["python", "torchrun"])
@pytest.mark.sample(2)
def test_run_restarts_from_the_newest_checkpoint_when_a_rank_is_killed(
    train: Train, form: str
) -> None:
    restarts = ("parallel.max_restarts=1",) if form == "python" else ()
    if form == "torchrun":
        # torchrun reads PET_MAX_RESTARTS as its option --max-restarts.
        train.environment["PET_MAX_RESTARTS"] = "1"
    run = run_with(train, FAULTS["killed"], form, "ddp", 2, "checkpoint.every_steps=2", *restarts)
    assert (run.code, run.result.steps) == (0, 12), run.stderr
    steps = [
        line["step"] for line in read_lines(run.folder / "metrics.jsonl") if "train/loss" in line
    ]
    assert steps == sorted(set(steps)), "each step must be logged once"
    assert "resumed from" in (run.folder / "logs" / "rank_0.log").read_text()
    if form == "python":
        # The command wrote result.json at its end, and has counted the seconds since its start.
        ended, seconds = (run.folder / "result.json").stat().st_mtime, run.result.seconds
        first_step = ended - seconds["total"] + seconds["start_to_first_step"]
        lost = first_step - fault_time(train.base / "mark")
        assert 0 < lost < seconds["total"]
        assert run.result.goodput is not None
        assert 0 < run.result.goodput < 1 - lost / seconds["total"]


@pytest.mark.parametrize(
    ("codes", "oom_kills", "status", "message"),
    [
        ({1: -9}, 0, "failed", "rank 1 was killed by SIGKILL"),
        ({0: -15, 1: 3}, 0, "failed", "rank 1 exited early with exit code 3"),
        ({1: -9}, 1, "out_of_memory", "the kernel, which ran out of memory"),
        ({0: -15, 1: -11}, 1, "failed", "rank 1 was killed by SIGSEGV"),
        ({0: -15}, 0, "failed", "rank 1 exited early with exit code 0"),
        ({0: 1, 1: 143}, 0, "failed", "rank 0 exited early with exit code 1"),
    ],
)
def test_first_failure_is_derived_from_exit_codes_when_ranks_wrote_no_failure_record(
    tmp_path: Path, codes: dict[int, int], oom_kills: int, status: str, message: str
) -> None:
    failure = first_failure(
        tmp_path, RankExits(exit_codes=codes, world_size=2, oom_kills=oom_kills)
    )
    assert failure["status"] == status
    assert message in failure["reason"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 3 MiB and return its folder. Mounting needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.nightly
@pytest.mark.slow
def test_full_disk_ends_the_run_with_exit_code_1_and_keeps_the_last_checkpoint(
    train: Train, small_disk: Path
) -> None:
    overrides = (
        "parallel=ddp",
        "parallel.devices=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep=50",
        "train.epochs=50",
    )
    done = train(*overrides, folder=small_disk / "run")
    assert done.returncode == 1, done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Failed: ")]
    assert ".pt: " in line and "MiB free" in line, done.output
    assert done.result["reason"] == line.removeprefix("Failed: ")
    assert done.seconds < 60
    last = done.folder / "checkpoints" / "last.pt"
    assert checkpoint.load(last)["progress"]["step"] >= 2
    assert train.left_after(2) == []
    resumed = train.start(
        f"resume={done.folder}",
        "checkpoint.keep=1",
        "train.epochs=3",
        defaults=False,
        folder=done.folder,
    )
    # Delete files to free disk space, as the error message of the full disk suggests.
    shutil.rmtree(done.folder / "tensorboard")
    for old in sorted((done.folder / "checkpoints").glob("step_*"))[:-2]:
        old.unlink()
    assert resumed.finish().returncode == 0
