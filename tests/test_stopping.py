"""A signal stops all ranks after the same step, saved; going on from there equals never having stopped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from src.parallel.stopping import Stopping


def test_alone_the_step_under_way_is_the_last() -> None:
    stopping = Stopping()
    stopping.starts(7)
    assert not stopping.is_due(7)
    stopping.request(15)
    assert stopping.is_due(7)
    assert stopping.signal == 15


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asked_by", [[0], [2], [0, 1, 2]])
def test_all_ranks_stop_after_the_same_step(asked_by: list[int]) -> None:
    """Three threads play ranks that step at their own pace, within one step of each other as in ddp."""
    store = HashStore()
    ranks = [Stopping(rank, 3, store) for rank in range(3)]
    barrier = threading.Barrier(3)
    last = [0, 0, 0]

    def train(rank: int) -> None:
        for step in range(1, 10_000):
            ranks[rank].starts(step)
            barrier.wait(20)  # the all-reduce of the step
            time.sleep(0.001 * rank)
            if step == 20 and rank in asked_by:
                ranks[rank].request(15)
            if ranks[rank].is_due(step):
                last[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert last[0] >= 20
    assert len(set(last)) == 1
    assert [stopping.signal for stopping in ranks] == [15, 15, 15]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_stopped_and_resumed_equals_undisturbed(strategy: str, tmp_path: Path) -> None:
    import signal
    import subprocess
    import sys

    root = Path(__file__).parents[1]
    settings = [
        *(
            "model=tiny",
            "print_config=false",
            "train.epochs=4",
            f"parallel={strategy}",
            "parallel.threads_per_device=1",
        ),
        *(
            "+model.kwargs.drop_rate=0.1",
            "data.augment.mixup=0.2",
            "model.ema.decay=0.99",
            "data.augment.scale=[0.5,1]",
        ),
        "data.workers=1",
    ]

    def start(folder: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "train.py", *settings, *more, f"hydra.run.dir={folder}"]
        return subprocess.Popen(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    assert start(tmp_path / "whole").wait(90) == 0
    stopped = start(tmp_path / "stopped")
    while not (tmp_path / "stopped" / "checkpoints" / "last.pt").exists():
        assert stopped.poll() is None
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM, output
    assert output.splitlines()[-1].endswith(f"python train.py resume={tmp_path / 'stopped'}")
    command = [sys.executable, "train.py", f"resume={tmp_path / 'stopped'}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    whole, resumed = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "stopped")
    )
    assert whole["progress"] == resumed["progress"]
    for part in ("model", "ema"):
        for name, tensor in whole[part].items():
            assert torch.equal(tensor, resumed[part][name]), f"{part}: {name}"
