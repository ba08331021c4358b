"""scripts/compare_runs.py: runs agree, differ from a step on, or cannot be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_runs
from timm_parallel.config.arguments import command_line, errors_in_one_line, number_argument
from timm_parallel.lab.reproduce import compare_curves
from timm_parallel.record.result import MetricsLog, Result, write_result

pytestmark = pytest.mark.portable


def run(folder: Path, losses: list[float], speed: float = 100.0, **result: Any) -> Path:
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl")
    for step, loss in enumerate(losses, 1):
        log.write(
            step,
            time=speed * step,
            **{"train/loss": loss, "train/images_per_sec": speed, "memory/cpu_MiB": speed},
        )
    log.close()
    write_result(
        folder,
        Result(**{"status": "done", "steps": len(losses), "val": {"samples": 270}, **result}),
    )
    return folder


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "largest", "differs_at"),
    [
        # Times, speeds and memory of the two runs differ, and are not compared.
        ([2.0, 1.0], [2.0, 1.0], 0.0, 0.0, None),
        ([2.0, 1.0, 0.5], [2.0, 1.001, 0.503], 1e-2, 0.003 / 0.503, None),
        ([2.0, 1.0, 0.5], [2.0, 1.001, 0.503], 2e-3, 0.003 / 0.503, 3),
        ([2.0, 1.0, 0.5], [2.0, 1.001, 0.503], 1e-9, 0.003 / 0.503, 2),
        ([2.0, math.nan], [2.0, 1.0], 1.0, math.inf, 2),
        ([2.0, math.nan], [2.0, math.nan], 0.0, 0.0, None),
        # Only one run logged the second step.
        ([2.0, 1.0], [2.0], 1.0, math.inf, 2),
        ([2.0, math.nan], [2.0], 1.0, math.inf, 2),
    ],
)
def test_compare_runs_names_the_first_step_whose_loss_differs_beyond_the_tolerance(
    tmp_path: Path,
    one: list[float],
    other: list[float],
    tolerance: float,
    largest: float,
    differs_at: int | None,
) -> None:
    runs = [run(tmp_path / "a", one), run(tmp_path / "b", other, speed=7.0, steps=len(one))]
    for first, second in (runs, runs[::-1]):
        (curve,) = compare_curves(first, second, tolerance)
        assert (curve.name, curve.differs_at) == ("train/loss", differs_at)
        assert curve.largest == pytest.approx(largest)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"losses": [2.0]}, "steps: 2"),
        ({"losses": [2.0, 1.0], "batch_size": 32}, "batch_size"),
        ({"losses": [2.0, 1.0], "data": {"all": "b", "train": "t"}}, r"data \(all\)"),
        ({"losses": [2.0, 1.0], "val": {"samples": 10}}, "val samples"),
    ],
)
def test_compare_runs_refuses_runs_with_different_steps_batch_size_or_data(
    tmp_path: Path, other: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected) as refusal:
        compare_curves(
            run(tmp_path / "a", [2.0, 1.0], data={"all": "a"}), run(tmp_path / "b", **other), 1e-3
        )
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("word", ["abc", "-1", "nan", "inf"])
def test_compare_runs_refuses_an_invalid_tolerance(word: str) -> None:
    parser = command_line(None)
    parser.add_argument("--tolerance", type=number_argument())
    with pytest.raises(ValueError, match=f"--tolerance: '{word}': expected a number >= 0"):
        parser.parse_intermixed_args([f"tolerance={word}"])


def test_a_flag_of_a_script_is_set_by_its_name_or_by_true_and_takes_no_other_value() -> None:
    parser = command_line(None)
    parser.add_argument("--json", action="store_true")
    given = {word: parser.parse_intermixed_args([word]).json for word in ("--json", "json=true")}
    assert given == {"--json": True, "json=true": True}
    assert parser.parse_intermixed_args(["json=false"]).json is False
    with pytest.raises(ValueError, match="json=yes: expected json=true"):
        parser.parse_intermixed_args(["json=yes"])


def test_script_main_exits_130_and_prints_one_line_on_keyboard_interrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @errors_in_one_line
    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    assert main([]) == 130
    assert capsys.readouterr().err == "test_compare_runs.py: stopped by SIGINT\n"


def test_compare_runs_script_exits_0_when_equal_1_when_different_2_when_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (
        run(tmp_path / name, losses)
        for name, losses in (("a", [2.0, 1.0]), ("b", [2.0, 1.1]), ("c", [2.0]))
    )
    for other, code, expected in (
        (a, 0, "agree"),
        (b, 1, "differ from step 2 on: 1 and 1.1"),
        (c, 2, ""),
    ):
        assert compare_runs.main([str(a), str(other)]) == code
        out, err = capsys.readouterr()
        assert expected in out
        assert err.count("\n") == (code == 2)
    assert json.loads((a / "result.json").read_text())["steps"] == 2
