"""Random faults in ddp runs. Each run is resumed after each fault, and must end like a run without
faults.

The seed determines the faults. More of them: `CHAOS_FAULTS=200 CHAOS_SEED=1 python -m pytest
tests/template/test_chaos.py -m nightly -s`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.template.runs import assert_equal_trees, numbers_of, training_of
from timm_parallel.record.result import read_result, read_status
from timm_parallel.run import checkpoint
from timm_parallel.testing.commands import Running, Train

FAULTS, SEED = (int(os.environ.get(name, 3)) for name in ("CHAOS_FAULTS", "CHAOS_SEED"))
SETTINGS = (
    *("parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu", "parallel.timeout=4"),
    *("train.epochs=15", "train.log_every=10", "checkpoint.every_steps=15", "checkpoint.keep=3"),
    *("data.workers=1", "data.limit_train=null", "data.augment.scale=[0.5,1]"),
    *("data.augment.mixup=0.2", "model.ema.decay=0.99", "+model.kwargs.drop_rate=0.1"),
)
# Seconds within which all processes must end after a fault.
PROMPT = 15.0


# Kind of fault -> whose process gets the signal, and the signal.
KINDS = {
    "kill -9 a rank": ("rank", signal.SIGKILL),
    "kill -9 the launcher": ("launcher", signal.SIGKILL),
    "kill -9 a loader worker": ("loader worker", signal.SIGKILL),
    "crash of a rank": ("rank", signal.SIGSEGV),
    "stop of a rank": ("rank", signal.SIGSTOP),
    "SIGINT": ("launcher", signal.SIGINT),
    "SIGTERM": ("launcher", signal.SIGTERM),
    "SIGUSR1": ("launcher", signal.SIGUSR1),
    "SIGINT to the group": ("group", signal.SIGINT),
    "SIGTERM to the group": ("group", signal.SIGTERM),
}


def is_training(running: Running) -> bool:
    """Wait until a run has logged a step since its start. Return False if it has ended before."""
    log = running.folder / "metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    while running.process.poll() is None:
        if log.exists() and log.stat().st_size > size:
            return True
        time.sleep(0.02)
    return False


def strike(draw: random.Random, running: Running, kind: str) -> None:
    """Send the signal of a kind of fault to a run. A run that is about to end by itself may have no
    such process any more.
    """
    whose, number = KINDS[kind]
    with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):
        if whose == "group":
            os.killpg(running.process.pid, number)
        elif whose == "launcher":
            running.process.send_signal(number)
        else:
            processes = [*running.workers().values()]
            if whose == "loader worker":
                processes = [child for rank in processes for child in rank.children()]
            draw.choice(processes).send_signal(number)


def damage(draw: random.Random, folder: Path) -> None:
    """Damage the newest checkpoint in three of ten cases, so that the next resume must use an older
    one.
    """
    if len([*(folder / "checkpoints").glob("step_*.pt")]) < 2 or draw.random() > 0.3:
        return
    newest = folder / "checkpoints" / "last.pt"
    data = newest.read_bytes()
    where = draw.randrange(len(data) - 64)
    how = draw.choice(["cut off", "overwritten", "removed"])
    if how == "removed":
        newest.unlink()
    else:
        # last.pt is a hard link to the newest step_N.pt, which is damaged too.
        end = b"" if how == "cut off" else draw.randbytes(64) + data[where + 64 :]
        newest.write_bytes(data[:where] + end)


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
@pytest.mark.processes
def test_run_with_random_faults_ends_like_a_run_without_faults(train: Train) -> None:
    draw, faults = random.Random(SEED), 0
    whole = train(*SETTINGS, folder=train.base / "whole")
    assert whole.returncode == 0, whole.output
    while faults < FAULTS:
        folder = train.base / f"disturbed_{faults}"
        while read_status(folder) != "done":
            if any((folder / "checkpoints").glob("*.pt")):
                running = train.start(f"resume={folder}", folder=folder, defaults=False)
            else:
                shutil.rmtree(folder, ignore_errors=True)
                running = train.start(*SETTINGS, folder=folder)
            if faults >= FAULTS or not is_training(running):
                done = running.finish()
                assert done.returncode == 0, done.output
                continue
            time.sleep(draw.uniform(0, 2.5))
            kind, running.started = draw.choice([*KINDS]), time.monotonic()
            strike(draw, running, kind)
            done, (whose, number) = running.finish(), KINDS[kind]
            print(f"{kind}: {done.seconds:.1f} s, exit code {done.returncode}")
            # The watchdog notices a stopped rank only after parallel.timeout.
            assert done.seconds < PROMPT + 4 * (number == signal.SIGSTOP), f"{kind}: {done.output}"
            # 128 + signal; 0 if the run was about to end; -signal if the process did not handle
            # signals yet, or no longer.
            codes = (0, 1) if whose in ("rank", "loader worker") else (0, 128 + number, -number)
            assert done.returncode in codes, f"{kind}: {done.output}"
            assert train.left_after(PROMPT) == [], kind
            damage(draw, folder)
            faults += 1
        contents = [
            checkpoint.load(run / "checkpoints" / "last.pt") for run in (whole.folder, folder)
        ]
        assert_equal_trees(training_of(contents[0]), training_of(contents[1]))
        assert numbers_of(folder) == numbers_of(whole.folder)
        results = [read_result(run) for run in (whole.folder, folder)]
        assert results[0].samples_seen == results[1].samples_seen
        assert results[0].val == results[1].val
