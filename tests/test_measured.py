"""What a run says it measured is what happened: throughput by the clock, parts, ranks, communication, guard, counts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Train, in_ranks, read_lines, resolved
from torch import nn

from src.engine.machine.nvidia import Gpu
from src.engine.machine.ranks import Ranks
from src.engine.record.guard import flags, guard
from src.engine.record.result import read_result
from src.parallel import build_strategy
from src.parallel.distributed import Distributed
from src.parallel.reporting import ReportingParallel
from src.run.lifecycle import run

QUIET: dict[str, Any] = {
    "load": 0.02,
    "own": 1.0,
    "cores": 2,
    "steal": 0.0,
    "cpu_per_thread": 0.99,
    "halves_ratio": 1.01,
    "temperature": None,
    "clocks": None,
}


def by_the_clock(folder: Path, batch: int) -> float:
    """Images per second from metrics.jsonl: those between the first logged step and the last, over their time."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line]
    first, last = lines[0], lines[-1]
    return float(batch * (last["step"] - first["step"]) / (last["time"] - first["time"]))


def trained(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    """A whole run on this rank; its result."""
    (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    run(resolved(*overrides), Path(folder), ranks, store if ranks.world_size > 1 else None)
    return vars(read_result(Path(folder)))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of ddp on two ranks, one epoch of 78 steps: its result and its folder."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    words = ("parallel=ddp", "parallel.devices=2", "data.limit_train=1256", "data.batch_size=16", "train.epochs=1")
    return in_ranks(trained, 2, str(folder), *words)[0], folder


def test_throughput_is_that_of_the_clock(two_ranks: tuple[dict[str, Any], Path]) -> None:
    result, folder = two_ranks
    assert result["throughput"]["images_per_sec"] == pytest.approx(by_the_clock(folder, 16), rel=0.02)
    assert result["throughput"]["steps_timed"] == 68


def test_the_parts_of_a_step_add_up_to_the_throughput(two_ranks: tuple[dict[str, Any], Path]) -> None:
    result, _ = two_ranks
    step = 1000 * 16 / result["throughput"]["images_per_sec"]
    assert sum(result["step"].values()) == pytest.approx(step)
    assert min(result["step"].values()) >= 0


def test_every_rank_says_what_it_waited_and_computed(two_ranks: tuple[dict[str, Any], Path]) -> None:
    result, _ = two_ranks
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert {key for rank in result["ranks"] for key in rank} == {
        *("rank", "host", "device", "data_ms", "compute_ms", "step_ms")
    }
    assert result["hosts"] == [result["ranks"][0]["host"]]


def test_counts_are_those_of_the_loaders_and_processes(two_ranks: tuple[dict[str, Any], Path]) -> None:
    proof = two_ranks[0]["proof"]
    assert [proof[f"indices_{what}"] for what in ("seen", "distinct", "expected")] == [1248] * 3
    assert proof["optimizers"] == 2


def test_what_fills_no_step_is_dropped_and_counted_as_such(tmp_path: Path) -> None:
    """Six batches, four to a step."""
    result = in_ranks(trained, 1, str(tmp_path / "run"), "parallel=single", "train.accumulate=4", "train.epochs=1")[0]
    proof = result["proof"]
    assert [proof[f"indices_{what}"] for what in ("seen", "distinct", "expected")] == [128] * 3
    assert (result["steps"], result["samples_seen"], result["dropped_per_epoch"]) == (1, 128, 64)


def read_twice(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    """As `trained`, with a sampler that gives rank 1 the share of rank 0."""
    from src.data.sampling import TrainRequests

    whole = TrainRequests.shard
    TrainRequests.shard = lambda self: (setattr(self, "rank", 0), whole(self))[1]  # type: ignore[method-assign]
    return trained(ranks, store, folder, *overrides)


def test_shares_that_overlap_are_counted_as_such(tmp_path: Path) -> None:
    words = ("parallel=ddp", "parallel.devices=2", "train.epochs=1")
    proof = in_ranks(read_twice, 2, str(tmp_path / "run"), *words)[0]["proof"]
    assert [proof[f"indices_{what}"] for what in ("seen", "distinct", "expected")] == [192, 96, 192]


def slow_rank(ranks: Ranks, store: Any, folder: str, slow: int, *overrides: str) -> dict[str, Any]:
    """As `trained`, with a rank that computes 20 ms longer in every step."""
    from src.training import loop

    update = loop._update

    def slower(state: Any) -> None:
        update(state)
        time.sleep(0.02 if ranks.rank == slow else 0)

    loop._update = slower  # type: ignore[assignment]
    return trained(ranks, store, folder, *overrides)


@pytest.mark.parametrize("slow", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_computes_longer_stands_out(tmp_path: Path, slow: int) -> None:
    """All ranks take as long for a step: what the others wait is no computing of theirs."""
    words = ("parallel=ddp", "parallel.devices=2", "train.epochs=4")
    ranks = in_ranks(slow_rank, 2, str(tmp_path / "run"), slow, *words)[0]["ranks"]
    assert ranks[slow]["compute_ms"] > ranks[1 - slow]["compute_ms"] + 10


def hooked(ranks: Ranks, store: Any, delay: float, blocks: int, norm: bool) -> tuple[float, float]:
    """(all, exposed) seconds per step of a model whose buckets take `delay` longer to reduce, after a warm-up."""
    import torch.distributed as dist

    strategy = build_strategy(
        resolved("parallel=ddp", "parallel.devices=2", "parallel.broadcast_buffers=true").parallel, ranks, store
    )
    assert isinstance(strategy, Distributed)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Identity()) for _ in range(blocks)]
    wrapped = strategy.wrap(nn.Sequential(*layers), nn.CrossEntropyLoss(), None)
    assert isinstance(wrapped, ReportingParallel)

    def hook(state: Any, bucket: Any) -> Any:
        """Of another thread, as communication is: what the hook itself sleeps holds up the backward pass."""
        tensor, done = bucket.buffer(), torch.futures.Future()  # type: ignore[var-annotated]
        work = dist.all_reduce(tensor, async_op=True)

        def late() -> None:
            work.wait()
            done.set_result(tensor)

        threading.Timer(delay if steps[0] >= 4 else 0.02, late).start()  # a warm-up that would spoil any mean
        return done

    hook.__annotations__.clear()  # torch wants its own types, not their names
    wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
    steps = [0]
    for step in range(11):
        steps[0] = step
        if step == 5:  # what the steps before have left is read when the next one begins
            strategy.window_opens(wrapped)
        wrapped(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)).backward()
    found = strategy.communication_seconds(wrapped)
    strategy.close()
    assert found is not None
    return found


@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_communication_agrees_with_a_hook_of_known_delay(norm: bool) -> None:
    for whole, exposed in in_ranks(hooked, 2, 0.4, 2, norm):
        assert whole == pytest.approx(0.4, rel=0.1)
        assert exposed == pytest.approx(0.4, rel=0.1)


def alone(ranks: Ranks, store: Any) -> Any:
    strategy = build_strategy(resolved("parallel=ddp", "parallel.devices=1").parallel, ranks, store)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wrapped = strategy.wrap(model, nn.CrossEntropyLoss(), None)
    strategy.window_opens(wrapped)
    for _ in range(3):
        wrapped(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)).backward()
    found = strategy.communication_seconds(wrapped), strategy.communication_bytes(model, wrapped, 1)
    strategy.close()
    return found


def test_one_rank_communicates_nothing() -> None:
    assert in_ranks(alone, 1) == [((0.0, 0.0), (0, 0))]


def bytes_of(ranks: Ranks, store: Any, *overrides: str) -> Any:
    strategy = build_strategy(resolved("parallel=ddp", "parallel.devices=2", *overrides).parallel, ranks, store)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = [strategy.communication_bytes(model, strategy.wrap(model, nn.CrossEntropyLoss(), None), n) for n in (1, 4)]
    strategy.close()
    return found


def test_ddp_moves_gradients_once_a_step_however_many_batches_it_has() -> None:
    gradients, buffers = 4 * (72 + 16), 4 * 16 + 8
    expected = (gradients, gradients + buffers)
    assert in_ranks(bytes_of, 2, "parallel.broadcast_buffers=true")[0] == [expected, expected]
    assert in_ranks(bytes_of, 2, "parallel.broadcast_buffers=false")[0][0] == (gradients, gradients)


def usage(**changes: float) -> dict[str, Any]:
    """A rank that kept one of two processors busy for ten seconds."""
    quiet = {"wall": 10.0, "own": 10.0, "busy": 10.2, "stolen": 0.0, "all": 20.0, "ran": 9.9, "queued": 0.05}
    return quiet | changes | {"host": "here"}


def test_the_guard_tells_its_own_work_from_that_of_others() -> None:
    found = guard({"halves": [100.0, 101.0]}, [usage(), usage()], [])
    assert found["load"] == 0.0, "two ranks of one host: both are this run's own"
    found = guard({"halves": [100.0, 90.0]}, [usage(busy=20.0, stolen=1.0, ran=4.0, queued=6.0)], [])
    assert (found["load"], found["steal"], found["cpu_per_thread"]) == (1.0, 0.05, 0.4)
    assert found["halves_ratio"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"load": 1.0}, ["other programs kept 1.0 of 2 processors busy"]),
        ({"load": 8.0, "own": 2.0, "cores": 64}, []),
        ({"steal": 0.2}, ["the hypervisor gave 20% of the processors' time to others"]),
        ({"cpu_per_thread": 0.4}, ["its threads got 40% of the processor time that they were ready to use"]),
        ({"cpu_per_thread": 0.4, "own": 1.99}, []),
        ({"halves_ratio": 0.8}, ["the second half of its steps ran at 0.80 times the speed of the first"]),
        ({"clocks": [{"slowed_by": ["power brake"]}]}, ["GPU 0 was slowed down: power brake"]),
        (dict.fromkeys(("load", "own", "steal", "cpu_per_thread", "halves_ratio")), []),
    ],
)
def test_flags_say_what_may_have_disturbed_a_figure(changes: dict[str, Any], said: list[str]) -> None:
    assert flags(QUIET | changes, 100) == said


class Nvml:
    """A driver that answers some questions about its one device, a little hotter each time."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.celsius = answers, 60

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            if name == "nvmlDeviceGetTemperature" and name in self.answers:
                self.celsius += 5
                return self.celsius
            if name not in self.answers:
                raise self.NVMLError(name)
            return self.answers[name]

        return answer


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({}, None),
        (
            {"nvmlInit": None, "nvmlDeviceGetHandleByUUID": 1},
            {"celsius": None, "sm_mhz": None, "sm_mhz_max": None, "slowed_by": []},
        ),
        (
            {
                "nvmlInit": None,
                "nvmlDeviceGetHandleByUUID": 1,
                "nvmlDeviceGetTemperature": 1,
                "nvmlDeviceGetClockInfo": 1500,
                "nvmlDeviceGetMaxClockInfo": 1980,
                "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,
            },
            {"celsius": 75, "sm_mhz": 1500, "sm_mhz_max": 1980, "slowed_by": ["heat (by the hardware)"]},
        ),
    ],
)
def test_temperature_and_clocks_are_known_where_nvml_has_them(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], found: dict[str, Any] | None
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Nvml(answers))
    gpu = Gpu("GPU-1")
    for _ in range(3):
        gpu.sample()
    assert gpu.state() == found


@pytest.mark.processes
def test_the_peak_memory_of_a_rank_is_its_own_and_not_that_of_its_launcher() -> None:
    """Linux's ru_maxrss begins with what the parent held."""
    held = bytearray(300 * 2**20)
    code = "from src.engine.machine.platform import peak_memory; print(peak_memory())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert 2**20 < int(done.stdout) < len(held) // 2


@pytest.mark.slow
@pytest.mark.processes
def test_throughput_from_a_folder_of_jpegs_is_that_of_the_clock(train: Train, tmp_path: Path) -> None:
    """Loader workers deliver in bursts, of which a median sees the quick half only."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, count in (("train", 720), ("val", 16)):
        for number in range(count):
            path = tmp_path / "data" / split / f"class_{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (160, 160, 3), dtype=np.uint8)).save(path)
    words = (f"data.root={tmp_path}/data", "data.image_size=32", "data.batch_size=8", "data.workers=8")
    done = train("data=folder", *words, "data.limit_train=720", "parallel=single", "train.epochs=1")
    assert done.returncode == 0, done.output
    assert done.result["throughput"]["images_per_sec"] == pytest.approx(by_the_clock(done.folder, 8), rel=0.02)
