"""The library must be able to run a project that is not this template. The folder small_project/
has another package, with its own config classes, strategies, data and training function.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

PROJECT = Path(__file__).with_name("small_project")
LIBRARY = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


def start(*words: str, code: int = 0) -> str:
    """Run a Python command in the folder of the small project, and return its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    } | {"PYTHONPATH": str(LIBRARY)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def result_of(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


@pytest.mark.slow(seconds=8)
@pytest.mark.nightly
def test_library_trains_a_project_other_than_the_template_with_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    start(*torchrun, "train.py", f"hydra.run.dir={tmp_path / 'run'}")
    assert result_of(tmp_path / "run")["world_size"] == 2


@pytest.mark.nightly
@pytest.mark.slow(seconds=8)
def test_sweep_over_strategies_and_devices_trains_equally_on_one_and_two_ranks(
    tmp_path: Path,
) -> None:
    jobs = ("parallel.strategy=one,each", "parallel.devices=1,2")
    start("train.py", "-m", *jobs, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    jobs_file = json.loads((tmp_path / "sweep/jobs.json").read_text(encoding="utf-8"))["jobs"]
    assert [job["status"] for job in jobs_file] == ["done", "skipped", "done", "done"]
    assert jobs_file[1]["code"] == "one_device"
    results = [result_of(tmp_path / "sweep" / number) for number in ("0", "2", "3")]
    assert [result["world_size"] for result in results] == [1, 1, 2]
    objectives = [result["objective"] for result in results]
    assert objectives == pytest.approx([objectives[0]] * 3, rel=1e-5)


@pytest.mark.slow(seconds=8)
@pytest.mark.nightly
def test_search_minimizes_the_metric_of_a_project_other_than_the_template(tmp_path: Path) -> None:
    search = ("search=lr", "parallel.strategy=one", f"hydra.sweep.dir={tmp_path / 'search'}")
    start("train.py", "-m", *search)
    objectives = [
        float(str(result_of(tmp_path / "search" / str(n))["objective"])) for n in range(3)
    ]
    study = optuna.load_study(
        study_name=None, storage=f"sqlite:///{tmp_path / 'search' / 'study.db'}"
    )
    assert study.best_value == pytest.approx(min(objectives))


@pytest.mark.slow(seconds=3)
def test_library_applies_the_config_rules_of_a_project_other_than_the_template() -> None:
    assert "did you mean data.slope" in start("train.py", "data.slpe=2", code=2)
    assert "data.name=digits" in start("train.py", "data.name=digits", code=2)
    assert "did you mean each" in start("train.py", "parallel.strategy=eech", code=2)
