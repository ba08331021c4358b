"""Throughput, times per rank, communication, energy, disturbances and profile of a run."""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.template.runs import resolved, run_python, task_of, train_run
from timm_parallel.batch import Batch
from timm_parallel.errors import RefusedError
from timm_parallel.faults.liveness import liveness
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.distributed import Distributed, TimedDistributedDataParallel
from timm_parallel.parallel.networks import Networks, PhaseStep
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.record.result import read_result
from timm_parallel.run import telemetry
from timm_parallel.run.meter import StepHooks, summary_lines
from timm_parallel.run.run_result import flags, guard
from timm_parallel.run.step import Step
from timm_parallel.run.telemetry import Energy
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks

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
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line]
    first, last = lines[0], lines[-1]
    return float(batch * (last["step"] - first["step"]) / (last["time"] - first["time"]))


def trained(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    train_run(resolved(*overrides), Path(folder), ranks, store if ranks.world_size > 1 else None)
    return vars(read_result(Path(folder)))


def train_two_ranks(folder: Path) -> dict[str, Any]:
    words = (
        "parallel=ddp",
        "parallel.devices=2",
        "data.limit_train=1256",
        "data.batch_size=16",
        "train.epochs=1",
    )
    return in_ranks(trained, 2, str(folder), *words)[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("measured") / "run"
    return train_two_ranks(folder), folder


def test_images_per_sec_of_a_ddp_result_matches_the_timestamps_of_its_logged_steps(
    two_ranks: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, folder = two_ranks
    assert result["throughput"]["steps_timed"] == 68
    ratios = [result["throughput"]["images_per_sec"] / by_the_clock(folder, 16)]
    # A busy machine may pause a process between two timestamps of the 800 ms. Measure again then: a
    # wrong figure would be wrong in every run.
    while abs(ratios[-1] - 1) > 0.02 and len(ratios) < 3:
        folder = tmp_path / str(len(ratios))
        again = train_two_ranks(folder)
        ratios.append(again["throughput"]["images_per_sec"] / by_the_clock(folder, 16))
    assert ratios[-1] == pytest.approx(1, rel=0.02), ratios


def test_result_json_of_ddp_has_parts_of_the_step_time_and_times_and_hashes_of_all_ranks(
    two_ranks: tuple[dict[str, Any], Path],
) -> None:
    result, _ = two_ranks
    step = 1000 * 16 / result["throughput"]["images_per_sec"]
    assert sum(result["step"].values()) == pytest.approx(step)
    assert min(result["step"].values()) >= 0
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert {key for rank in result["ranks"] for key in rank} == {
        *("rank", "host", "device", "data_ms", "compute_ms", "step_ms")
    }
    assert result["hosts"] == [result["ranks"][0]["host"]]
    assert result["proof"].keys() == {"parameters_hash_start", "hashes_equal", "chunk_sizes"}
    assert result["proof"]["hashes_equal"] is True and result["proof"]["chunk_sizes"] == [8, 8]
    assert result["proof"]["parameters_hash_start"] != result["parameters_hash"]
    assert result["energy"] == {"joules_per_image": None, "kwh": None}, "unknown on a CPU"


def test_gradient_accumulation_drops_images_that_do_not_fill_the_last_optimizer_step(
    tmp_path: Path,
) -> None:
    """An epoch has six batches, and an optimizer step takes four of them."""
    result = in_ranks(
        trained, 1, str(tmp_path / "run"), "parallel=single", "train.accumulate=4", "train.epochs=1"
    )[0]
    assert (result["steps"], result["samples_seen"], result["dropped_per_epoch"]) == (1, 128, 64)


def slow_rank(ranks: Ranks, store: Any, folder: str, slow: int, *overrides: str) -> dict[str, Any]:
    clip = Step._clip

    def slower(step: Step, phase: Any) -> None:
        clip(step, phase)
        time.sleep(0.02 if ranks.rank == slow else 0)

    Step._clip = slower  # type: ignore[assignment, method-assign]
    return trained(ranks, store, folder, *overrides)


@pytest.mark.slow(seconds=3)
def test_ddp_result_shows_a_longer_compute_time_only_for_the_slowed_rank(tmp_path: Path) -> None:
    """All ranks have the same step time, because each step waits for the slowest rank. The
    waiting time must not count as compute time.
    """
    words = ("parallel=ddp", "parallel.devices=2", "train.epochs=4")
    ranks = in_ranks(slow_rank, 2, str(tmp_path / "run"), 1, *words)[0]["ranks"]
    assert ranks[1]["compute_ms"] > ranks[0]["compute_ms"] + 10


def hooked(ranks: Ranks, store: Any, delay: float) -> tuple[float, float]:
    """Run ddp steps in which the reduction of each gradient bucket takes `delay` seconds longer.
    Return the total and the exposed communication time per step after a warm-up, in seconds.
    """
    import torch.distributed as dist

    strategy = build_strategy(
        resolved("parallel=ddp", "parallel.devices=2", "parallel.broadcast_buffers=true"),
        ranks,
        store,
    )
    assert isinstance(strategy, Distributed)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)]
    task = task_of(10)
    networks = Networks(task.networks(nn.Sequential(*layers)))
    wrapped = strategy.wrap(PhaseStep(task, networks, "train"))
    assert isinstance(wrapped, TimedDistributedDataParallel)

    def hook(state: Any, bucket: Any) -> Any:
        """Delay the reduction in a separate thread. A sleep in the hook itself would block the
        backward pass.
        """
        tensor, done = bucket.buffer(), torch.futures.Future()  # type: ignore[var-annotated]
        work = dist.all_reduce(tensor, async_op=True)

        def late() -> None:
            work.wait()
            done.set_result(tensor)

        # Give the warm-up steps another delay. If they were measured by mistake, the mean would
        # show it.
        threading.Timer(delay if steps[0] >= 4 else 0.02, late).start()
        return done

    # The file postpones annotations, so they are strings. torch compares annotations of a hook with
    # its own types, and would reject strings.
    hook.__annotations__.clear()
    wrapped.register_comm_hook(None, hook)  # type: ignore[operator]
    steps, communication = [0], strategy.communication(wrapped)
    for step in range(11):
        steps[0] = step
        # Start to measure at step 5. The timer reads the communication times of a step only when
        # the next step begins.
        if step == 5:
            communication.start_measuring()
        fields = {"image": torch.randn(4, 8), "target": torch.zeros(4, dtype=torch.int64)}
        wrapped(Batch(fields))[0].mean().backward()
    measured = communication.seconds()
    strategy.group.close()
    assert measured is not None
    return measured


@pytest.mark.slow(seconds=4)
def test_ddp_communication_time_matches_the_delay_added_by_a_comm_hook() -> None:
    for whole, exposed in in_ranks(hooked, 2, 0.4):
        assert whole == pytest.approx(0.4, rel=0.1)
        assert exposed == pytest.approx(0.4, rel=0.1)


def of_strategy(ranks: Ranks, store: Any, *overrides: str) -> Any:
    strategy = build_strategy(resolved(*overrides), ranks, store)
    step = nn.Linear(8, 8)
    measured = (
        strategy.communication(step).seconds(),
        strategy.communication(step).bytes(step.parameters()),
    )
    strategy.group.close()
    return measured


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_communication_time_of_dp_and_fsdp_is_unknown_on_two_devices_and_zero_on_one_device(
    strategy: str,
) -> None:
    for devices, expected in ((1, ((0.0, 0.0), 0)), (2, (None, None))):
        ranks = devices if strategy == "fsdp" else 1
        assert (
            in_ranks(of_strategy, ranks, f"parallel={strategy}", f"parallel.devices={devices}")[0]
            == expected
        )


def usage(**changes: float) -> dict[str, Any]:
    quiet = {
        "wall": 10.0,
        "own": 10.0,
        "busy": 10.2,
        "stolen": 0.0,
        "all": 20.0,
        "ran": 9.9,
        "queued": 0.05,
    }
    return quiet | changes | {"host": "here"}


def test_measured_cpu_load_of_other_programs_excludes_the_cpu_time_of_the_run() -> None:
    measured = guard({"halves": [100.0, 101.0]}, [usage(), usage()], [])
    assert measured["load"] == 0.0
    measured = guard(
        {"halves": [100.0, 90.0]}, [usage(busy=20.0, stolen=1.0, ran=4.0, queued=6.0)], []
    )
    assert (measured["load"], measured["steal"], measured["cpu_per_thread"]) == (1.0, 0.05, 0.4)
    assert measured["halves_ratio"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"load": 1.0}, ["other programs kept 1.0 of 2 processors busy"]),
        ({"load": 8.0, "own": 2.0, "cores": 64}, []),
        ({"steal": 0.2}, ["the hypervisor gave 20% of the processors' time to others"]),
        (
            {"cpu_per_thread": 0.4},
            ["its threads got 40% of the processor time that they were ready to use"],
        ),
        ({"cpu_per_thread": 0.4, "own": 1.99}, []),
        (
            {"halves_ratio": 0.8},
            ["the second half of its steps ran at 0.80 times the speed of the first"],
        ),
        ({"clocks": [{"slowed_by": ["power brake"]}]}, ["GPU 0 was slowed down: power brake"]),
        (dict.fromkeys(("load", "own", "steal", "cpu_per_thread", "halves_ratio")), []),
    ],
)
def test_result_flags_report_other_cpu_load_steal_time_slowdown_and_gpu_throttling(
    changes: dict[str, Any], reasons: list[str]
) -> None:
    assert flags(QUIET | changes, 100) == reasons


class SteppedGpu:
    """Fake GPU whose energy counter rises by 5 J with every training step. With `known` false,
    the GPU of rank 1 has no counter.
    """

    def __init__(self, uuid: str, known: bool = True) -> None:
        self.uuid, self.known = uuid, known

    def joules(self) -> float:
        return 1000.0 + 5 * liveness.step if self.known else math.nan


def metered(
    ranks: Ranks, store: Any, folder: str, uuids: list[str], known: bool, *overrides: str
) -> dict[str, Any]:
    gpu: Any = SteppedGpu(uuids[ranks.rank], known or ranks.rank == 0)
    telemetry.Energy = lambda gpus: Energy([gpu])  # type: ignore[assignment, misc]
    return trained(ranks, store, folder, *overrides)


@pytest.mark.parametrize(
    ("uuids", "known", "gpus"),
    [
        # Ranks that share a GPU read the same energy counter, which must count once.
        (["GPU-a", "GPU-a"], True, 1),
        (["GPU-a", "GPU-b"], True, 2),
        (["GPU-a", "GPU-b"], False, None),
    ],
)
@pytest.mark.slow(seconds=2)
@pytest.mark.sample(2)
def test_result_energy_is_summed_over_the_distinct_gpus_and_null_when_one_is_unknown(
    tmp_path: Path, uuids: list[str], known: bool, gpus: int | None
) -> None:
    words = ("parallel=ddp", "parallel.devices=2", "train.epochs=2")
    result = in_ranks(metered, 2, str(tmp_path / "run"), uuids, known, *words)[0]
    assert result["throughput"]["steps_timed"] < result["steps"]
    energy = result["energy"]
    if gpus is None:
        assert energy == {"joules_per_image": None, "kwh": None}
    else:
        assert energy["joules_per_image"] == pytest.approx(gpus * 5 / result["batch_size"])
        assert energy["kwh"] == pytest.approx(gpus * 5 * result["steps"] / 3.6e6)


@pytest.mark.processes
def test_peak_memory_of_child_process_excludes_memory_of_its_parent_process() -> None:
    """On Linux, ru_maxrss of a child process starts at the memory use of its parent process."""
    held = bytearray(300 * 2**20)
    code = "from timm_parallel.machine.platform import peak_memory; print(peak_memory())"
    assert 2**20 < int(run_python("-c", code).stdout) < len(held) // 2


PROFILE = (
    "debug=profile",
    "train.epochs=1000",
    "train.profile_steps=2",
    "train.max_steps=25",
    "train.accumulate=2",
)
PARTS = {"data", "forward", "backward", "optimizer"}


def profiled(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    return trained(ranks, store, folder, *PROFILE, *overrides)


def check_profile(result: dict[str, Any], folder: Path, ranks: int = 1) -> None:
    assert result["throughput"]["steps_timed"] == 12
    assert [entry["rank"] for entry in result["profile"]] == list(range(ranks))
    for entry in result["profile"]:
        parts = {name.removesuffix("_ms"): ms for name, ms in entry["parts"].items()}
        assert set(parts) == PARTS
        assert min(parts.values()) > 0
        check_trace(folder / entry["trace"], parts)
        table = (folder / entry["trace"]).with_name(f"rank_{entry['rank']}.txt").read_text()
        assert len(table.splitlines()) > 20 and "aten::addmm" in table


def check_trace(path: Path, parts: dict[str, float]) -> None:
    """Check that the trace has Chrome's format, which Perfetto reads: each complete event has a
    name, start, duration, process and thread.

    Check also that the times of the step parts in result.json are the durations of these
    events, per step.
    """
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(event) for event in whole)
    ranges = [event["name"] for event in whole if event.get("cat") == "user_annotation"]
    assert {name.removeprefix("step: ") for name in ranges if name.startswith("step: ")} == PARTS
    for part, ms in parts.items():
        microseconds = sum(event["dur"] for event in whole if event["name"] == f"step: {part}")
        assert microseconds / 1000 / 2 == pytest.approx(ms, rel=0.01, abs=0.01)
    assert ranges.count("step: optimizer") == 2
    assert ranges.count("step: backward") == 4, "times train.accumulate"


@pytest.mark.slow(seconds=3)
def test_headspace_replays_batches_saves_nothing_and_marks_its_result(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    config = resolved(
        "debug=headspace",
        "parallel=single",
        "data.replay_batches=3",
        "train.epochs=1000",
        "train.max_steps=26",
    )
    train_run(config, folder)
    result = read_result(folder)
    assert result.steps == 26 and result.throughput["steps_timed"] == 20
    assert any("data.replay_batches=3" in flag for flag in result.flags)
    assert result.checkpoint is None and not [*folder.rglob("*.pt")]
    # A run that has a checkpoint is real training, so replaying batches must not continue it.
    train_run(resolved("parallel=single", "train.max_steps=2"), folder)
    assert read_result(folder).checkpoint is not None
    with pytest.raises(RefusedError, match=r"^data\.replay_batches=3: .*resume"):
        train_run(config, folder)


@pytest.mark.slow(seconds=4)
def test_profiled_run_trains_the_same_weights_as_an_unprofiled_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = profiled(Ranks(), None, str(tmp_path / "run"), "parallel=single")
    check_profile(result, tmp_path / "run")
    # Without a profiler, the training loop must call the plain step hooks.
    hooks: list[type] = []
    monkeypatch.setattr(StepHooks, "start_update", lambda self: hooks.append(type(self)))
    words = ("parallel=single", "train.profile_steps=null")
    without = profiled(Ranks(), None, str(tmp_path / "without"), *words)
    assert set(hooks) == {StepHooks} and without["profile"] == []
    assert result["parameters_hash"] == without["parameters_hash"]
    lines = summary_lines(result["profile"][0], result["seconds"]["start"], tmp_path / "run")
    assert lines[0].startswith("start ") and "first batch" in lines[0]
    assert lines[1].startswith("a step") and "backward" in lines[1]
    assert any("rank_*.txt" in line for line in lines)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_profile_of_ddp_writes_a_trace_for_every_rank(tmp_path: Path) -> None:
    result = in_ranks(profiled, 2, str(tmp_path / "run"), "parallel=ddp", "parallel.devices=2")[0]
    check_profile(result, tmp_path / "run", ranks=2)


@pytest.mark.parametrize(
    "overrides", [("train.max_steps=13",), ("train.max_steps=null", "train.epochs=4")]
)
def test_profile_steps_is_refused_when_no_step_is_left_to_time_after_profiling(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Four epochs have twelve steps."""
    with pytest.raises(ValueError, match=r"train\.profile_steps=2") as refusal:
        profiled(Ranks(), None, str(tmp_path / "run"), "parallel=single", *overrides)
    message = str(refusal.value)
    assert message.startswith("train.profile_steps=2: ")
    assert "14 steps or more" in message and "\n" not in message
