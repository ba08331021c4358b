"""Scripts for finished runs: runs.py lists them, and reproduce.py repeats one bit for bit."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts import reproduce as script
from scripts import runs as list_script
from tests.template.repositories import git
from tests.template.runs import ROOT, resolved, run_warm
from timm_parallel.config.compose import load_config, save_config
from timm_parallel.keys import TrackerConfig
from timm_parallel.lab import reproduce
from timm_parallel.lab.code_copy import apply_diff, copy_commit
from timm_parallel.machine.files import lock_folder
from timm_parallel.record.environment import CODE_DIFF
from timm_parallel.record.result import Result, write_result

# The recorded run has 15 steps and logs a loss every 3 steps. The tests reproduce only the first 9
# steps.
STEPS = 9
Change = Callable[[Path], None]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def copied_code(repository: Path, commit: str, folder: Path) -> None:
    """Replace `copy_commit`, because the current code may not be committed."""
    for name in ("src", "conf", "timm_parallel"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("tests"))
    shutil.copy(ROOT / "train.py", folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("recorded")
    random = np.random.default_rng(0)
    for number in range(60):
        path = base / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    settings = (
        *("data=folder", f"data.root={base / 'data'}", "data.val_fraction=0.2"),
        *("data.limit_train=null", "data.image_size=32", "data.batch_size=8"),
    )
    run = run_warm(
        base / "run",
        *settings,
        "data.workers=0",
        "parallel=single",
        "parallel.accelerator=cpu",
        "train.max_steps=15",
        "train.epochs=4",
        "train.log_every=3",
    )
    write_environment(run, commit="0123", dirty=False)
    (run / CODE_DIFF).unlink(missing_ok=True)
    return base


def write_environment(run: Path, **changes: Any) -> None:
    path = run / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))


@pytest.fixture
def copy(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reproduce, "copy_commit", copied_code)
    shutil.copytree(recorded, tmp_path / "copy")
    edit(tmp_path / "copy/run/config.yaml", str(recorded), str(tmp_path / "copy"))
    return tmp_path / "copy"


def certificate(base: Path, code: int, steps: int = STEPS) -> dict[str, Any]:
    assert script.main([f"run={base / 'run'}", f"steps={steps}"]) == code
    text = (base / "run" / "certificate.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.slow(seconds=9)
def test_repeated_run_has_equal_losses_and_weights(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The recorded run used a remote MLflow server. The repetition must not be sent there.
    edit(copy / "run/config.yaml", "tensorboard: true", "mlflow: true")
    edit(copy / "run/config.yaml", "  uri: null", "  uri: http://localhost:1")
    # A time limit, which the repetition would reach at another step.
    edit(copy / "run/config.yaml", "max_minutes: null", "max_minutes: 1.0e-06")
    # Hydra looks for config groups in the folders of the run, and may warn about such a file.
    (copy / "run" / "workflows").mkdir()
    (copy / "run" / "workflows" / "ci.yml").touch()
    found = certificate(copy, 0, steps=50)
    assert load_config(copy / "run" / "reproduced" / "run").tracker == TrackerConfig()
    assert (found["steps"], found["losses"], found["equal_losses"]) == (15, 5, 5)
    assert (found["reproduced"], found["weights_compared"]) == (True, True)
    assert (found["first_difference"], found["differences"]) == (None, {})
    printed = capfd.readouterr()
    assert "reproduced: 5 of 5 losses" in printed.out and "Warning" not in printed.err


@pytest.mark.nightly
@pytest.mark.slow
def test_reproduction_names_what_has_changed_since_the_run(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed_code(repository: Path, commit: str, folder: Path) -> None:
        copied_code(repository, commit, folder)
        step = folder / "timm_parallel/run/step.py"
        edit(step, "{name: loss.detach()", "{name: 2 * loss.detach()")

    monkeypatch.setattr(reproduce, "copy_commit", changed_code)
    edit(copy / "run/config.yaml", "threads_per_device: 1", "threads_per_device: 2")
    found = certificate(copy, 3)
    assert (found["losses"], found["equal_losses"]) == (3, 0)
    first = found["first_difference"]
    assert (first["metric"], first["step"]) == ("train/loss", 3)
    assert first["now"] == pytest.approx(2 * first["was"], rel=1e-5)
    code = "code of timm_parallel/run/step.py"
    assert found["differences"].keys() == {"threads_per_device", code}
    assert found["differences"]["threads_per_device"] == [1, 2]


def write_diff(text: str) -> Change:
    def change(base: Path) -> None:
        write_environment(base / "run", dirty=True)
        (base / "run" / CODE_DIFF).write_text(text)

    return change


def resume_with_other_settings(base: Path) -> None:
    path = base / "run" / "result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result["segments"][0]["changed"] = {"train.precision": ["fp32", "bf16"]}
    path.write_text(json.dumps(result))


def use_64_gpus(base: Path) -> None:
    config = base / "run" / "config.yaml"
    edit(config, "accelerator: cpu", "accelerator: cuda")
    edit(config, "  devices: 1", "  devices: 64")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "steps", "named"),
    [
        (lambda base: write_environment(base / "run", commit=None), STEPS, "has no commit"),
        (lambda base: write_environment(base / "run", dirty=True), STEPS, "code.diff: missing"),
        (write_diff("diff --git a/x b/x\n+1\ncut: larger\n"), STEPS, "cut as"),
        (write_diff("diff --git a/x b/x\n+token = ***\n"), STEPS, "masked"),
        (write_diff("diff --git a/x b/x\n--- a/x\n+++ b/x\n"), STEPS, "cannot be restored"),
        (resume_with_other_settings, STEPS, "resumed with other settings"),
        (use_64_gpus, STEPS, "parallel."),
        (lambda base: None, 2, "steps=2"),
    ],
)
def test_reproducing_a_run_without_its_code_settings_or_devices_is_refused(
    copy: Path, capfd: pytest.CaptureFixture[str], change: Change, steps: int, named: str
) -> None:
    change(copy)
    assert script.main([f"run={copy / 'run'}", f"steps={steps}"]) == 2
    assert named in capfd.readouterr().err
    assert not (copy / "run" / "certificate.json").exists()
    # Only the repeated run itself finds that devices are missing.
    assert (copy / "run" / "reproduced").exists() == (change is use_64_gpus)


def test_copied_commit_with_code_diff_applied_is_the_code_that_the_run_used(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("first\n")
    (tmp_path / "run").mkdir()
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "code.py").write_text("second\n")
    diff, folder = tmp_path / "run" / CODE_DIFF, tmp_path / "run" / "code"
    diff.write_text("untracked: mine/\n")
    copy_commit(tmp_path, "HEAD", folder)
    apply_diff(folder, diff)
    assert (folder / "code.py").read_text() == "first\n"
    diff.write_text(f"untracked: mine/\n{git(tmp_path, 'diff', 'HEAD')}\n")
    apply_diff(folder, diff)
    assert (folder / "code.py").read_text() == "second\n"
    with pytest.raises(ValueError, match="0123"):
        copy_commit(tmp_path, "0123", tmp_path / "other")


def write_run(folder: Path, *overrides: str, age: float = 0, **result: Any) -> Path:
    """Write the files of a run. `age`: seconds since it was started."""
    (folder / ".hydra").mkdir(parents=True)
    save_config(resolved(*overrides), folder)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(["hydra.x=1", *overrides]))
    changed = time.time() - age
    os.utime(folder / "config.yaml", (changed, changed))
    if result:
        metrics = {"loss": {"lower_is_better": True}, "acc": {"lower_is_better": False}}
        write_result(folder, Result(**{"status": "done", "metrics": metrics, **result}))
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three runs that ended, two that did not, damaged folders and others."""
    tmp_path = tmp_path_factory.mktemp("outputs")
    write_run(
        tmp_path / "train/day/one",
        "optim.lr=0.5",
        age=50,
        val={"acc": 0.5, "loss": 1.0},
        objective=0.6,
        throughput={"images_per_sec": 123.4},
        seconds={"total": 90.0},
    )
    write_run(tmp_path / "train/day/two", "seed=7", age=40, val={"acc": 0.75, "loss": 2.0})
    write_run(tmp_path / "sweeps/day/s/0", "train.epochs=3", age=30, status="failed")
    write_run(tmp_path / "train/day/unfinished", age=20)
    write_run(tmp_path / "train/day/running", age=10)
    for number, text in enumerate(("{", "[]", '{"status": "great"}', "[" * 100_000)):
        folder = write_run(tmp_path / f"train/day/damaged_{number}", age=100 + number)
        (folder / "result.json").write_text(text)
    (tmp_path / "foreign" / "deep").mkdir(parents=True)
    (tmp_path / "foreign" / "notes.txt").write_text("no run")
    (tmp_path / "loop").symlink_to(tmp_path)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[dict[str, str]]:
    capsys.readouterr()
    assert list_script.main([f"folder={folder}", "csv=true", *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def names(rows: list[dict[str, str]]) -> list[str]:
    return [Path(row["folder"]).name for row in rows]


def test_runs_are_listed_from_the_newest_with_status_figures_and_settings(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_folder(outputs / "train/day/running"):
        rows = listed(capsys, outputs)
    assert names(rows)[:5] == ["running", "unfinished", "0", "two", "one"]
    statuses = [row["status"] for row in rows]
    assert statuses == ["running", "unfinished", "failed", "done", "done", *["damaged"] * 4]
    one = rows[4]
    assert (one["objective"], one["images/s"], one["minutes"]) == ("0.6", "123.4", "1.5")
    assert one["settings"] == "optim.lr=0.5"
    # Without csv=true, the columns are aligned.
    assert list_script.main([f"folder={outputs}"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == list(one)
    assert lines[4][header.index("status") :].split() == ["done", *list(one.values())[2:]]


@pytest.mark.parametrize(
    ("metric", "order"), [("val/acc", ["two", "one"]), ("val/loss", ["one", "two"])]
)
def test_runs_with_a_metric_are_listed_from_the_best(
    outputs: Path, capsys: pytest.CaptureFixture[str], metric: str, order: list[str]
) -> None:
    rows = listed(capsys, outputs, f"metric={metric}")
    assert names(rows)[:2] == order
    assert all(row[metric] for row in rows[:2]) and not any(row[metric] for row in rows[2:])


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (("optim.lr=0.5",), ["one"]),
        (("optim.lr=5e-1", "seed=42"), ["one"]),
        (("seed=7",), ["two"]),
        (("seed=7", "optim.lr=0.5"), []),
        (("model.ema.decay=null", "train.epochs=3"), ["0"]),
        (("tags=[]", "seed=7"), ["two"]),
        (("model.kwargs.depth=2", "seed=7"), ["two"]),
    ],
    ids=str,
)
def test_where_keeps_the_runs_with_a_value_in_their_config(
    outputs: Path, capsys: pytest.CaptureFixture[str], where: tuple[str, ...], found: list[str]
) -> None:
    assert names(listed(capsys, outputs, *(f"where={word}" for word in where))) == found


@pytest.mark.parametrize(
    "word", ["where=optim.rate=1", "where=seed", "metric=val/accuracy", "folder=missing"]
)
def test_list_of_runs_refuses_what_no_run_has(
    outputs: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert list_script.main([f"folder={outputs}", word]) == 2
    assert capsys.readouterr().err.startswith(f"runs.py: {word}")


def test_resumed_run_is_listed_with_the_settings_of_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "python train.py seed=3 'tags=[a b]' print_config=false"
    run = write_run(tmp_path / "run", "seed=3", segments=[{"command": command}, {"command": "x"}])
    (run / ".hydra" / "overrides.yaml").write_text(f"- resume={run}\n- train.epochs=9\n")
    assert [row["settings"] for row in listed(capsys, tmp_path)] == ["seed=3 tags=[a b]"]


@pytest.mark.slow(seconds=2)
def test_2000_runs_are_listed_in_less_than_a_second_of_processor_time(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = outputs / "train/day/one"
    for number in range(2000):
        folder = tmp_path / str(number % 100) / str(number)
        (folder / ".hydra").mkdir(parents=True)
        for name in ("config.yaml", "result.json", ".hydra/overrides.yaml"):
            os.link(first / name, folder / name)
    began = time.process_time()
    rows = listed(capsys, tmp_path, "metric=val/acc", "where=optim.lr=0.5")
    assert time.process_time() - began < 1
    assert len(rows) == 2000
