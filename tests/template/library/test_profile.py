"""Test `debug=profile`: the trace must name the parts of a training step under every strategy,
in a format that Perfetto can read.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from src.train.run import run
from tests.template.runs import resolved
from timm_parallel.errors import RefusedError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.measure.step_hooks import StepHooks, summary_lines
from timm_parallel.parallel.networks import PhaseStep
from timm_parallel.record.result import read_result
from timm_parallel.testing.ranks import in_ranks

OVERRIDES = (
    "debug=profile",
    "train.epochs=1000",
    "train.profile_steps=2",
    "train.max_steps=25",
    "train.accumulate=2",
)
PARTS = {"data", "forward", "backward", "optimizer"}


def trained(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    """Train a complete run on this rank, and return its result."""
    (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    run(
        resolved(*OVERRIDES, *overrides),
        Path(folder),
        ranks,
        store if ranks.world_size > 1 else None,
    )
    return vars(read_result(Path(folder)))


def parts_of(entry: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix("_ms"): ms for name, ms in entry["parts"].items()}


def check(result: dict[str, Any], folder: Path, ranks: int = 1) -> None:
    assert result["throughput"]["steps_timed"] == 12, (
        "the timed steps include warm-up or profiled steps"
    )
    assert [entry["rank"] for entry in result["profile"]] == list(range(ranks))
    for entry in result["profile"]:
        parts = parts_of(entry)
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
        assert microseconds / 1000 / 2 == pytest.approx(ms, rel=0.01, abs=0.01), (
            "train.profile_steps"
        )
    assert ranges.count("step: optimizer") == 2, "train.profile_steps"
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
    run(config, folder, Ranks(), None)
    result = read_result(folder)
    assert result.steps == 26 and result.throughput["steps_timed"] == 20
    assert any("data.replay_batches=3" in flag for flag in result.flags)
    assert result.checkpoint is None and not [*folder.rglob("*.pt")]
    # A run that has a checkpoint is real training, so replaying batches must not continue it.
    run(resolved("parallel=single", "train.max_steps=2"), folder, Ranks(), None)
    assert read_result(folder).checkpoint is not None
    with pytest.raises(RefusedError, match=r"^data\.replay_batches=3: .*resume"):
        run(config, folder, Ranks(), None)


@pytest.mark.nightly
@pytest.mark.slow(seconds=5)
def test_profiled_run_trains_the_same_weights_as_an_unprofiled_run_bit_for_bit(
    tmp_path: Path,
) -> None:
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=single")
    check(result, tmp_path / "run")
    without = trained(
        Ranks(), None, str(tmp_path / "without"), "parallel=single", "train.profile_steps=null"
    )
    assert result["parameters_hash"] == without["parameters_hash"]
    lines = summary_lines(result["profile"][0], result["seconds"]["start"], tmp_path / "run")
    assert lines[0].startswith("start ") and "first batch" in lines[0]
    assert lines[1].startswith("a step") and "backward" in lines[1]
    assert any("rank_*.txt" in line for line in lines)


@pytest.mark.slow
@pytest.mark.nightly
def test_profile_of_dp_records_the_threads_of_its_replicas(tmp_path: Path) -> None:
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=dp", "parallel.devices=2")
    check(result, tmp_path / "run")
    with gzip.open(tmp_path / "run" / result["profile"][0]["trace"], "rt") as file:
        threads = {
            event["tid"]
            for event in json.load(file)["traceEvents"]
            if event.get("name") == "aten::addmm"
        }
    assert len(threads) == 2, "replicas do not run in threads"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_profile_of_ddp_writes_a_trace_for_every_rank(tmp_path: Path) -> None:
    result = in_ranks(trained, 2, str(tmp_path / "run"), "parallel=ddp", "parallel.devices=2")[0]
    check(result, tmp_path / "run", ranks=2)


@pytest.mark.slow
@pytest.mark.nightly
def test_profiled_forward_time_contains_the_time_that_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PhaseStep.forward

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return forward(self, *args)

    monkeypatch.setattr(PhaseStep, "forward", slow)
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=single", "train.max_steps=14")
    assert result["throughput"]["steps_timed"] == 1, "14 steps leave one to time after profiling"
    # A step accumulates two batches, and each forward pass sleeps for 50 ms.
    assert parts_of(result["profile"][0])["forward"] >= 100


def test_run_creates_no_profiler_when_profile_steps_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a profiler, the training loop must call the plain step hooks, which record no
    events.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made without train.profile_steps")

    for name in ("ProfiledStepHooks", "profile", "record_function"):
        monkeypatch.setattr(f"timm_parallel.measure.step_hooks.{name}", refuse)
    hooks: list[type] = []
    monkeypatch.setattr(StepHooks, "start_update", lambda self: hooks.append(type(self)))
    result = trained(
        Ranks(),
        None,
        str(tmp_path / "run"),
        "parallel=single",
        "train.profile_steps=null",
        "train.max_steps=2",
    )
    assert set(hooks) == {StepHooks}
    assert result["profile"] == []
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize(
    "overrides", [("train.max_steps=13",), ("train.max_steps=null", "train.epochs=4")]
)
def test_profile_steps_is_refused_when_no_step_is_left_to_time_after_profiling(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Four epochs have twelve steps. With train.max_steps, the run fails before its ranks start.
    With train.epochs, the run fails after the data are loaded, because the number of steps is
    known only then.
    """
    # A refusal after the data are loaded raises RefusedError, which is a subclass of ValueError.
    with pytest.raises(ValueError, match=r"train\.profile_steps=2") as refusal:
        trained(Ranks(), None, str(tmp_path / "run"), "parallel=single", *overrides)
    message = str(refusal.value)
    assert message.startswith("train.profile_steps=2: ")
    assert "14 steps or more" in message and "\n" not in message
