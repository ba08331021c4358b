"""`scripts/report.py <folder> baseline=report.json`: points that became slower end it with 1, where the figures bear that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_sweeps import Sweep

from scripts.report import main

pytestmark = [pytest.mark.usefixtures("without_plots"), pytest.mark.portable]

BEFORE = {("single", 1): [1000.0, 1010.0, 990.0], ("ddp", 2): [1900.0, 1910.0, 1890.0]}


def sweep(folder: Path, speeds: dict[tuple[str, int], list[float]], **changes: Any) -> Path:
    made = Sweep(folder, changes.pop("accelerator", "cuda"), changes.pop("cores", 16))
    for (strategy, devices), of_blocks in speeds.items():
        made.repeat(strategy, devices, of_blocks, **changes)
    return made.write()


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """report.json of a sweep with the speeds of BEFORE, without the sweep."""
    folder = sweep(tmp_path / "before", BEFORE)
    assert main([str(folder)]) == 0
    shutil.move(folder / "report.json", tmp_path / "baseline.json")
    shutil.rmtree(folder)
    return tmp_path / "baseline.json"


def against(baseline: Path, tmp_path: Path, speeds: dict[tuple[str, int], list[float]], **changes: Any) -> int:
    return main([str(sweep(tmp_path / "now", speeds, **changes)), f"baseline={baseline}", "max-drop=5"])


def test_a_point_that_fell_is_named(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against(baseline, tmp_path, BEFORE | {("ddp", 2): [1700, 1710, 1690]}) == 1
    single, ddp = capsys.readouterr().out.splitlines()[-2:]
    assert "single × 1 at 1,000 images/s: 1.00 ×" in single and single.endswith(": ok")
    assert "ddp × 2 at 1,700 images/s: 0.89 × (95 %: 0.8" in ddp
    assert ddp.endswith("slower by more than 5.0 %")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ([1870, 1880, 1860], "ok"),  # 2 % slower
        ([2500, 2510, 2490], "ok"),
        ([1900, 1300, 1700], "undecided: the interval holds 0.95; more blocks would tell"),  # 14 %, but how noisy
    ],
)
def test_a_drop_counts_where_its_interval_bears_it(
    baseline: Path, tmp_path: Path, now: list[float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert against(baseline, tmp_path, BEFORE | {("ddp", 2): now}) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(("speed", "code"), [(960.0, 0), (940.0, 1)])
def test_single_runs_have_no_interval_and_their_ratio_decides(tmp_path: Path, speed: float, code: int) -> None:
    before = sweep(tmp_path / "before", {("single", 1): [1000.0]})
    main([str(before)])
    assert against(before / "report.json", tmp_path, {("single", 1): [speed]}) == code


def test_the_limit_is_the_users(baseline: Path, tmp_path: Path) -> None:
    folder = sweep(tmp_path / "now", BEFORE | {("ddp", 2): [1700, 1710, 1690]})
    assert main([str(folder), "--baseline", str(baseline), "--max-drop", "20"]) == 0
    assert main([str(folder), "--baseline", str(baseline), "--max-drop", "5"]) == 1


def test_a_report_may_be_held_against_its_own_former_self(tmp_path: Path) -> None:
    """The file is read before it is written anew."""
    folder = sweep(tmp_path / "s", BEFORE)
    assert main([str(folder)]) == 0
    for job in sorted(folder.glob("[0-9]*")):
        result = json.loads((job / "result.json").read_text())
        result["throughput"]["images_per_sec"] /= 2
        (job / "result.json").write_text(json.dumps(result))
    assert main([str(folder), f"baseline={folder / 'report.json'}"]) == 1
    assert main([str(folder), f"baseline={folder / 'report.json'}"]) == 0


@pytest.mark.parametrize(
    "changes",
    [{"flags": ["other programs kept 1.0 of 2 processors busy"]}, {"neighbours": 1}],
    ids=["disturbed", "beside other jobs"],
)
def test_disturbed_runs_fail_nobody(baseline: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    made = Sweep(tmp_path / "now")
    made.repeat("single", 1, BEFORE["single", 1])
    made.repeat("ddp", 2, [900, 910, 890], **changes)
    made.repeat("ddp", 4, [900, 910, 890], **changes)
    assert main([str(made.write()), f"baseline={baseline}"]) == 0


def test_an_upgrade_is_what_it_is_for(baseline: Path, tmp_path: Path) -> None:
    """Other versions of torch and driver are held against each other: they may be what made it slower."""
    newer = {"libraries": {"torch": "2.15.0"}, "driver": "999.1"}
    assert against(baseline, tmp_path, {("ddp", 2): [1700, 1710, 1690]}, environment=newer) == 1


@pytest.mark.parametrize(
    ("speeds", "changes", "said"),
    [
        (BEFORE, {"accelerator": "cpu"}, "--baseline: was measured on other hardware: NVIDIA H200"),
        (BEFORE, {"environment": {"cpu": {"model": "another", "cores": 8}}}, "was measured on other hardware"),
        ({("ddp", 8): [1.0]}, {}, "has no point in common with this report; here: resnet18"),
        (BEFORE, {"config": {"model": {"name": "resnet18", "kwargs": {"drop": 1}}}}, "model.kwargs"),
    ],
    ids=["accelerator", "processor", "points", "settings"],
)
def test_what_cannot_be_compared_is_refused(
    baseline: Path,
    tmp_path: Path,
    speeds: dict[tuple[str, int], list[float]],
    changes: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert against(baseline, tmp_path, speeds, **changes) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("report.py: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not a report.json"),
        ('{"points": []}', "not a report.json"),
        ('{"format": 1, "points": [], "groups": [], "runs": [], "shared": {}, "varied": {}}', "not a report.json"),
    ],
)
def test_what_is_no_report_is_refused_before_anything_is_written(
    tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = sweep(tmp_path / "s", {("single", 1): [1000.0]}), tmp_path / "baseline.json"
    if text is not None:
        path.write_text(text)
    assert main([str(folder), f"baseline={path}"]) == 2
    error = capsys.readouterr().err
    assert said in error and str(path) in error and error.count("\n") == 1
    assert not (folder / "report.json").exists()
