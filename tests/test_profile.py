"""`debug=profile`: the parts of a step add up to it under every strategy, beside a trace that Perfetto reads."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train, in_ranks, resolved

from src.engine.machine.ranks import Ranks
from src.engine.record.result import read_result
from src.engine.report.report import write_report
from src.parallel.data_parallel import ThreadedDataParallel
from src.run.lifecycle import run
from src.training.moments import Moments
from src.training.profile import summary_lines

WORDS = ("debug=profile", "train.epochs=1000", "train.profile_steps=2", "train.max_steps=25", "train.accumulate=2")
COMMON = {"data", "forward", "backward", "optimizer", "other"}
OF_DP = {"scatter", "replicate", "gather"}


def trained(ranks: Ranks, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    """A whole run on this rank; its result."""
    (Path(folder) / "logs").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    run(resolved(*WORDS, *overrides), Path(folder), ranks, store if ranks.world_size > 1 else None)
    return vars(read_result(Path(folder)))


def parts_of(entry: dict[str, Any]) -> dict[str, float]:
    return {name.removesuffix("_ms"): ms for name, ms in entry["parts"].items()}


def check(result: dict[str, Any], folder: Path, names: set[str], ranks: int = 1) -> None:
    assert result["throughput"]["steps_timed"] == 12, "neither the warm-up nor the recorded steps"
    assert [entry["rank"] for entry in result["profile"]] == list(range(ranks))
    for entry, of_meter in zip(result["profile"], result["ranks"], strict=True):
        parts = parts_of(entry)
        assert set(parts) == names
        assert min(parts.values()) > 0
        assert sum(parts.values()) == pytest.approx(of_meter["step_ms"], rel=0.05)
        check_trace(folder / entry["trace"], names)
        table = (folder / entry["trace"]).with_name(f"rank_{entry['rank']}.txt").read_text()
        assert len(table.splitlines()) > 20 and "aten::addmm" in table
        longest = [operation["ms"] for operation in entry["operations"]]
        assert longest == sorted(longest, reverse=True) and min(longest) > 0


def check_trace(path: Path, names: set[str]) -> None:
    """Chrome's format, as Perfetto reads it: complete events with a begin, a duration, a process and a thread."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(event) for event in whole)
    ranges = [event["name"] for event in whole if event.get("cat") == "user_annotation"]
    assert {name.removeprefix("step: ") for name in ranges if name.startswith("step: ")} == names
    assert ranges.count("step: optimizer") == 2, "train.profile_steps"
    assert ranges.count("step: backward") == 4, "times train.accumulate"


@pytest.mark.slow
@pytest.mark.processes
def test_the_profilers_own_remarks_stay_off_the_console(train: Train) -> None:
    done = train("debug=profile", "parallel=single", "data.limit_train=640")
    assert done.returncode == 0 and done.stderr == "", done.output
    assert "backward" in done.stdout


def test_one_device_and_not_a_bit_is_trained_otherwise(tmp_path: Path) -> None:
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=single")
    check(result, tmp_path / "run", COMMON)
    without = trained(Ranks(), None, str(tmp_path / "without"), "parallel=single", "train.profile_steps=null")
    assert result["parameters_hash"] == without["parameters_hash"]
    lines = summary_lines(result["profile"][0], tmp_path / "run")
    assert lines[0].startswith("a step") and "backward" in lines[0]
    assert sum("calls" in line for line in lines) == len(result["profile"][0]["operations"])


@pytest.mark.slow
def test_dp_tells_its_copies_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicate = ThreadedDataParallel.replicate

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.02)
        return replicate(self, *args)

    monkeypatch.setattr(ThreadedDataParallel, "replicate", slow)
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=dp", "parallel.devices=2")
    check(result, tmp_path / "run", COMMON | OF_DP)
    assert 40 < parts_of(result["profile"][0])["replicate"] < 80, "two batches a step"
    with gzip.open(tmp_path / "run" / result["profile"][0]["trace"], "rt") as file:
        threads = {event["tid"] for event in json.load(file)["traceEvents"] if event.get("name") == "aten::addmm"}
    assert len(threads) == 2, "replicas work in threads"


@pytest.mark.slow
@pytest.mark.processes
def test_every_rank_of_ddp_has_a_trace(tmp_path: Path, without_plots: None) -> None:
    result = in_ranks(trained, 2, str(tmp_path / "run"), "parallel=ddp", "parallel.devices=2")[0]
    check(result, tmp_path / "run", COMMON, ranks=2)
    page = write_report([tmp_path / "run"]).read_text()
    assert "Where a step" in page
    [point] = json.loads((tmp_path / "run" / "report.json").read_text())["points"]
    assert {name: part["median"] for name, part in point["parts_ms"].items()} == parts_of(result["profile"][0])


@pytest.mark.slow
def test_what_is_no_part_of_a_step_is_in_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an epoch is three steps, and each is evaluated and saved."""
    from src.run.lifecycle import Training

    evaluate = Training.evaluate_model

    def slow(self: Training, model: Any, *args: Any) -> Any:
        time.sleep(0.05)
        return evaluate(self, model, *args)

    monkeypatch.setattr(Training, "evaluate_model", slow)
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=single", "train.evaluate_every=1")
    check_sum = sum(parts_of(result["profile"][0]).values())
    assert check_sum == pytest.approx(sum(result["step"].values()), rel=0.05)


def test_a_run_without_it_has_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop then meets the moments alone: no profiler, no marks, no wrapped calls."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made without being asked for")

    for name in ("ProfiledMoments", "Recording", "Split", "profile"):
        monkeypatch.setattr(f"src.training.profile.{name}", refuse)
    found: list[type] = []
    monkeypatch.setattr(Moments, "update_begins", lambda self: found.append(type(self)))
    result = trained(
        Ranks(), None, str(tmp_path / "run"), "parallel=single", "train.profile_steps=null", "train.max_steps=2"
    )
    assert set(found) == {Moments}
    assert result["profile"] == []
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize("words", [("train.max_steps=13",), ("train.max_steps=null", "train.epochs=4")])
def test_a_run_without_steps_to_time_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Four epochs of three steps; the first case is refused before anything starts, the second when the data are known."""
    with pytest.raises(
        ValueError, match="needs steps after the warm-up"
    ) as refusal:  # RefusedError is one: exit code 2
        trained(Ranks(), None, str(tmp_path / "run"), "parallel=single", *words)
    said = str(refusal.value)
    assert said.startswith("train.profile_steps=2: profiling needs steps after the warm-up")
    assert "14 or more" in said and "\n" not in said


@pytest.mark.slow
def test_one_step_more_is_enough(tmp_path: Path) -> None:
    result = trained(Ranks(), None, str(tmp_path / "run"), "parallel=single", "train.max_steps=14")
    assert result["throughput"]["steps_timed"] == 1
    assert sum(parts_of(result["profile"][0]).values()) > 0


def test_marks_of_a_device_are_added_up_once_it_is_done() -> None:
    """Between two marks all time is the first one's; what follows the last one waits for the next adding."""
    from src.training.profile import Split

    split = Split(torch.device("cpu"), ("forward", "other"))
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    split._now = lambda: next(now)  # type: ignore[method-assign]
    for part in ("forward", "other", None):
        split.mark(part)
    split.add_up()
    assert split.seconds == {"forward": 1.0, "other": 2.0}
    split.mark("forward")  # after 7 seconds that are nobody's
    split.mark("other")
    split.add_up()
    split.add_up()
    assert split.seconds == {"forward": 5.0, "other": 2.0}
