"""Rules of `resume` in train.py up to the start of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from src.app import app
from src.schema import Config
from tests.template.runs import draw_images
from timm_parallel import entry, keys
from timm_parallel.checked_configs import evaluation_config
from timm_parallel.config.compose import load_config, save_config
from timm_parallel.entry import run_command
from timm_parallel.keys import SweepConfig, leaves
from timm_parallel.lab.jobs.folders import config_folder
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.sweep import freeze_jobs
from timm_parallel.machine import hardware
from timm_parallel.machine.files import lock_folder
from timm_parallel.machine.ranks import NEEDED
from timm_parallel.record.environment import CODE_DIFF
from timm_parallel.record.result import Result, read_result, write_result
from timm_parallel.testing.configs import conf, parse

OVERRIDES = (
    "model=tiny",
    "parallel=single",
    "parallel.accelerator=cpu",
    "data.batch_size=32",
    "print_config=false",
)


@dataclass
class Main:
    """Callable that runs the main function of train.py and returns (exit code, stderr). Instead
    of starting ranks, it saves a checkpoint and writes a result with `status`.
    """

    command: Callable[[tuple[str, ...]], tuple[int, str]]
    # Copy of a run without further overrides. A copy of it is faster than a start.
    plain: Path
    status: str = "interrupted"
    code: int = 0
    ran: list[Path] = field(default_factory=list)
    # Output of the last call on stdout.
    out: str = ""

    def __call__(self, *overrides: str) -> tuple[int, str]:
        return self.command(overrides)

    def run(self, config: Config, folder: Path) -> int:
        self.ran.append(folder)
        save_config(config, folder)
        (folder / CODE_DIFF).write_text(f"the diff of attempt {len(self.ran)}")
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "last.pt").write_bytes(b"a checkpoint")
        write_result(folder, Result(status=self.status))
        return self.code

    def start(self, name: str, *overrides: str, status: str = "interrupted") -> Path:
        self.status = status
        if not overrides and self.plain.exists():
            self.ran.append(copy_of(self.plain, f"train/{name}", status))
        else:
            code, err = self(*OVERRIDES, f"hydra.run.dir=outputs/train/{name}", *overrides)
            assert code == 0, err
            if not overrides:
                shutil.copytree(self.ran[-1], self.plain)
        return self.ran[-1].resolve()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain") / "run"


@pytest.fixture
def main(
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Main:
    monkeypatch.chdir(tmp_path)
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())

    def command(overrides: tuple[str, ...]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        capsys.readouterr()
        code = run_command(app)
        runner.out, err = capsys.readouterr()
        return code, err

    runner = Main(command, plain)
    monkeypatch.setattr(entry, "run_job", runner.run)
    return runner


def copy_of(run: Path, name: str, status: str = "interrupted") -> Path:
    """Copy a run to outputs/<name> with another status, which is faster than a start."""
    folder = shutil.copytree(run, Path("outputs", name))
    write_result(folder, Result(status=status))
    return folder.resolve()


def value_of(config: keys.Config, key: str) -> Any:
    return {name: value for name, value, _ in leaves(config)}[key]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow(seconds=1)
def test_resume_continues_in_the_same_run_folder_with_the_saved_config(main: Main) -> None:
    folder = main.start("day/1", "optim.lr=0.25", "train.epochs=3")
    before = load_config(folder)
    # As for any key given twice, the last value wins.
    code, err = main("resume=/nowhere", f"resume={folder}")
    assert (code, err) == (0, ""), "no setting changed, so no change may be printed"
    assert main.ran == [main.ran[0], folder]
    after = load_config(folder)
    assert after.resume == str(folder)
    after.resume = before.resume
    assert after == before


@pytest.mark.slow(seconds=1)
def test_refused_resume_restores_all_files_in_the_run_folder(main: Main) -> None:
    """Ranks reject the change after the new config was written to the run folder. The next
    resume must not read this config.
    """
    folder = main.start("day/1")
    before = contents(folder)
    main.code, main.status = 2, "failed"
    assert main(f"resume={folder}", "optim.lr=0.5")[0] == 2
    assert contents(folder) == before
    (folder / "result.json").unlink()
    assert main(f"resume={folder}", "optim.lr=0.5")[0] == 2
    assert not (folder / "result.json").exists(), "a killed run has no result.json"
    (folder / CODE_DIFF).unlink()
    assert main(f"resume={folder}", "optim.lr=0.5")[0] == 2
    assert not (folder / CODE_DIFF).exists(), "a run of committed code has no code.diff"


ANOTHER_TRAINING = [
    ("+model.kwargs.drop_rate=0.1", "model.kwargs"),
    ("data.batch_size=64", "data.batch_size"),
    ("data.augment.hflip=0.5", "data.augment.hflip"),
    ("seed=7", "seed"),
    ("optim=sgd", "optim.opt"),
    ("train.accumulate=2", "train.accumulate"),
]


@pytest.mark.slow(seconds=3)
def test_resume_with_another_model_data_batch_or_seed_is_refused_unless_resume_strict_is_false(
    main: Main,
) -> None:
    folder = main.start("day/1")
    before, saved = contents(folder), load_config(folder)
    for override, key in ANOTHER_TRAINING:
        code, err = main(f"resume={folder}", override)
        assert code == 2, override
        assert len(err.splitlines()) == 1
        assert err.startswith(f"train.py: {key}=") and "was " in err and "None" not in err
        assert "resume_strict=false" in err
        assert contents(folder) == before, f"a refused command changes nothing: {override}"
    assert len(main.ran) == 1
    overrides = [override for override, _ in ANOTHER_TRAINING]
    assert main(f"resume={folder}", *overrides, "resume_strict=false")[0] == 0
    now = load_config(folder)
    assert all(value_of(now, key) != value_of(saved, key) for _, key in ANOTHER_TRAINING)
    assert main(f"resume={folder}")[0] == 0
    after = load_config(folder)
    assert all(value_of(after, key) == value_of(now, key) for _, key in ANOTHER_TRAINING), (
        "a later resume must keep the change"
    )


@pytest.mark.slow(seconds=1)
def test_resume_accepts_changed_training_and_strategy_and_single_drops_options_of_ddp(
    main: Main,
) -> None:
    folder = main.start("day/1")
    changes = {
        "data.workers": 2,
        "model.compile": True,
        "parallel.strategy": "ddp",
        "parallel.devices": 2,
        "parallel.bucket_cap_mb": 1.0,
        "train.epochs": 40,
        "optim.lr": 0.5,
    }
    code, err = main(f"resume={folder}", *(f"{key}={value}" for key, value in changes.items()))
    assert (code, main.ran[-1]) == (0, folder), err
    after = load_config(folder)
    assert {key: value_of(after, key) for key in changes} == changes
    code, err = main(f"resume={folder}", "parallel=single", "tracker=none")
    assert code == 0, err
    assert load_config(folder).parallel.devices == 1
    assert load_config(folder).tracker.use == {}, "the trackers of the run are replaced"
    assert main(f"resume={folder}", "parallel=single", "parallel.devices=2")[0] == 2, (
        "an explicit value is not dropped"
    )


@pytest.mark.slow(seconds=2)
def test_run_with_relative_paths_is_resumed_from_another_folder_and_with_moved_images(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_images(tmp_path / "shapes")
    Path("start.pt").write_bytes(b"weights")
    paths = ("data=folder", "data.root=shapes", "model.weights=start.pt")
    words = (*paths, "data.image_size=32", "data.batch_size=2", "train.epochs=4")
    folder = main.start("day/1", *words, "hydra.job.chdir=true")
    typed = (folder / ".hydra" / "overrides.yaml").read_text()
    assert "data.root=shapes" in typed
    # The same command finds its run.
    assert main(*OVERRIDES, *words, "resume=auto") == (0, "")
    assert main.ran[-1].resolve() == folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(f"resume={folder}") == (0, "")
    for config in (load_config(folder), evaluation_config(folder, [])):
        assert config.data.root == str(tmp_path / "shapes")
    assert load_config(folder).model.weights == str(tmp_path / "start.pt")
    (tmp_path / "shapes").rename(tmp_path / "moved")
    code, err = main(f"resume={folder}")
    assert code == 2 and f"data.root={tmp_path / 'shapes'}: " in err
    code, err = main(f"resume={folder}", "data.root=../moved")
    assert code == 0, err
    assert load_config(folder).data.root == str(tmp_path / "moved")


@pytest.mark.slow(seconds=2)
def test_sweep_saves_the_relative_paths_of_its_jobs_as_absolute_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("-m", "data=folder", "data.root=one,two", "parallel=single", "cluster=local")
    _, points = expand(parse(*words))
    jobs = freeze_jobs(tmp_path, points, SweepConfig())
    for each, name in zip(jobs.jobs, ("one", "two"), strict=True):
        target = config_folder(tmp_path, each)
        assert load_config(target).data.root == str(tmp_path / name)
        saved = OmegaConf.load(target / ".hydra" / "config.yaml")
        assert saved.data.root == str(tmp_path / name)


@pytest.mark.slow(seconds=1)
def test_resume_is_refused_when_a_new_device_count_changes_the_global_batch(
    main: Main,
) -> None:
    per_device = (
        "data.batch_size=null",
        "data.batch_size_per_device=16",
        "parallel=ddp",
        "parallel.devices=2",
    )
    folder = main.start("day/1", *per_device)
    code, err = main(f"resume={folder}", "parallel.devices=4")
    assert code == 2, err
    assert err.startswith("train.py: parallel.devices=4: ") and "resume_strict=false" in err
    assert "data.batch_size_per_device" in err and "global batch 64 (was 32)" in err
    half = "data.batch_size_per_device=8"
    code, err = main(f"resume={folder}", "parallel.devices=4", half)
    assert code == 2 and err.startswith(f"train.py: {half} (was 16)"), "the given key is named"


@pytest.mark.parametrize(
    ("words", "where"), [((), "in {output}"), (("task_name=flowers",), "of flowers")]
)
def test_resume_auto_is_refused_when_no_run_is_unfinished(
    main: Main, tmp_path: Path, words: tuple[str, ...], where: str
) -> None:
    code, err = main(f"paths.output_dir={tmp_path}/none", "resume=auto", *words)
    assert code == 2
    assert f"no unfinished run {where.format(output=tmp_path / 'none')}" in err


@pytest.mark.slow(seconds=2)
def test_resume_auto_continues_only_a_run_with_exactly_the_given_config(main: Main) -> None:
    """Two requeued jobs with the same task_name must not continue each other's run."""
    slow = main.start("2026-01-01/09-00-00", "optim.lr=0.1")
    fast = main.start("2026-01-02/09-00-00", "optim.lr=0.2")
    for override, folder in (("optim.lr=0.1", slow), ("optim.lr=0.2", fast)):
        assert main(*OVERRIDES, "resume=auto", override)[0] == 0
        assert main.ran[-1].resolve() == folder
    for other in (("optim.lr=0.3",), ("optim.lr=0.1", "+model.kwargs.drop_rate=0.1")):
        code, err = main(*OVERRIDES, "resume=auto", *other)
        assert code == 2 and len(main.ran) == 4
    assert "resume=auto: no unfinished run of train" in err and "auto_or_new" in err
    # Another run with the given config is done.
    done = copy_of(slow, "train/2026-01-03/09-00-00", status="done")
    config = (done / "config.yaml").read_text()
    (done / "config.yaml").write_text(config.replace("  lr: 0.1", "  lr: 0.3"))
    before = contents(done)
    code, err = main(*OVERRIDES, "resume=auto_or_new", "optim.lr=0.3")
    assert code == 0 and main.ran[-1].resolve() not in (slow, fast, done)
    assert len(err.splitlines()) == 1 and "starting a new run" in err
    assert contents(done) == before


@pytest.mark.slow(seconds=3)
def test_resume_auto_continues_the_newest_unfinished_run_of_any_or_the_given_task_with_its_config(
    main: Main,
) -> None:
    digits = main.start("2026-01-01/09-00-00")
    folder = "hydra.run.dir=outputs/flowers/2026-01-02/09-00-00"
    words = ("task_name=flowers", "optim.lr=0.25", "data=synthetic", folder)
    flowers = main.start("x", *words, status="failed")
    copy_of(flowers, "done/2026-01-03/09-00-00", status="done")
    (copy_of(digits, "train/2026-01-04/09-00-00") / "checkpoints" / "last.pt").unlink()
    # resume=auto must skip a job of a sweep, because sweep.resume continues such a job.
    (copy_of(digits, "my/sweep/0").parent / "jobs.json").write_text("{}")
    before, main.status = load_config(flowers), "interrupted"
    for overrides, expected in (
        (("resume=auto",), flowers),
        (("resume=auto", "print_config=false", "task_name=train"), digits),
        (("print_config=false", "cluster=local", "resume=auto_or_new"), digits),
        ((*OVERRIDES, "resume=auto"), digits),
    ):
        code, err = main(*overrides)
        assert (code, err) == (0, "")
        assert main.ran[-1].resolve() == expected, overrides
        assert f"{expected.relative_to(Path.cwd())}\n" in main.out
    after = load_config(flowers)
    assert after.resume is not None
    after.resume = before.resume
    assert after == before


@pytest.mark.slow(seconds=1)
def test_resume_ignores_later_edits_of_config_group_files(main: Main, tmp_path: Path) -> None:
    folder = main.start(
        "day/1",
        f"--config-dir={conf(tmp_path / 'own', model__mine='name: test_vit')}",
        "model=mine",
    )
    (tmp_path / "own" / "model" / "mine.yaml").write_text("name: resnet18")
    assert main(f"resume={folder}") == (0, "")
    assert load_config(folder).model.name == "test_vit"


@pytest.mark.slow(seconds=1)
def test_resume_auto_skips_runs_that_are_locked_or_unreadable_and_continues_a_killed_run(
    main: Main,
) -> None:
    killed = main.start("2026-01-01/09-00-00")
    (killed / "result.json").unlink()
    for day, text in (("02", None), ("03", "modle: {}"), ("04", "train: [1")):
        newer = copy_of(killed, f"train/2026-01-{day}/09-00-00")
        (newer / "config.yaml").unlink()
        if text is not None:
            (newer / "config.yaml").write_text(text)
    running = copy_of(killed, "train/2026-01-05/09-00-00")
    before = contents(running)
    with lock_folder(running):
        code, err = main(*OVERRIDES, "resume=auto")
        assert code == 0, err
        assert main.ran[-1].resolve() == killed
        assert all(f"2026-01-{day}/09-00-00" in err for day in ("02", "03", "04"))
        code, err = main(f"resume={running}")
        assert code == 2 and len(err.splitlines()) == 1 and "in use by process" in err
    assert contents(running) == before


@pytest.mark.slow(seconds=2)
def test_resume_of_a_finished_run_is_refused_unless_a_limit_of_its_training_changes(
    main: Main,
) -> None:
    run = main.start("day/1", "train.early_stop=1", status="done")
    code, err = main(f"resume={run}", "print_config=false")
    assert code == 2 and "train.epochs" in err and len(main.ran) == 1
    overrides = ("train.max_steps=90", "train.early_stop=null", "checkpoint.metric=val/loss")
    for number, override in enumerate(overrides):
        folder = copy_of(run, f"train/day/copy_{number}", "done")
        code, err = main(f"resume={folder}", override)
        assert code == 0 and main.ran[-1].resolve() == folder, err

    seconds = {"training": 61.0}
    write_result(run, Result("done", steps=90, epochs=9, seconds=seconds))
    for reached, other in (("epochs=9", "max_steps=91"), ("max_steps=90", "epochs=99")):
        assert main(f"resume={run}", f"train.{reached}", f"train.{other}")[0] == 2
    assert main(f"resume={run}", "train.max_minutes=1", "train.epochs=99")[0] == 2


@pytest.mark.slow(seconds=1)
def test_resume_is_refused_when_a_file_of_the_run_is_missing_a_folder_or_of_newer_code(
    main: Main,
) -> None:
    """A new checkpoint could not replace a folder, so the run would fail after its first epoch."""
    folder = main.start("day/1")
    for name in ("checkpoints/last.json", "result.json"):
        (folder / name).write_text(json.dumps({"format": 7, "status": "done"}))
        before = contents(folder)
        code, err = main(f"resume={folder}")
        assert code == 2 and Path(name).stem in err and "format 7" in err
        assert contents(folder) == before
        (folder / name).unlink()
    checkpoints = folder / "checkpoints"
    (checkpoints / "best.pt").mkdir()
    code, err = main(f"resume={folder}")
    assert (code, len(err.splitlines())) == (2, 1) and "best.pt" in err
    (checkpoints / "best.pt").rmdir()
    (checkpoints / "last.pt").unlink()
    code, err = main(f"resume={folder}")
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"resume={folder}: has no checkpoint" in err and "without resume" in err
    (checkpoints / "last.pt").mkdir()
    code, err = main(f"resume={folder}")
    assert (code, len(err.splitlines()), len(main.ran)) == (2, 1, 1) and "last.pt" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_result_status_is_interrupted_when_a_signal_stops_the_run_before_ranks_start(
    main: Main, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    done = main.start("day/1", status="done")
    monkeypatch.setattr(entry, "run_job", lambda config, folder: os.kill(os.getpid(), number))
    assert main(f"resume={done}", "train.epochs=99")[0] == 128 + number
    assert read_result(done).status == "done", "a finished run keeps its result"
    code, err = main(*OVERRIDES, "hydra.run.dir=outputs/train/1")
    assert (code, len(err.splitlines())) == (128 + number, 1)
    result = read_result(Path("outputs/train/1"))
    assert result.status == "interrupted" and number.name in result.reason


def test_resume_is_refused_when_the_path_is_not_a_run_folder(main: Main, tmp_path: Path) -> None:
    for broken, text in (("half_written", ""), ("not_yaml", "- [1")):
        (tmp_path / broken / ".hydra").mkdir(parents=True)
        (tmp_path / broken / ".hydra" / "overrides.yaml").write_text(text)
        (tmp_path / broken / ".hydra" / "hydra.yaml").write_text(text)
    before = contents(tmp_path)
    for name in ("nowhere", "half_written", "not_yaml"):
        code, err = main(f"resume={name}")
        assert code == 2 and len(err.splitlines()) == 1
        assert err.startswith(f"train.py: resume={name}: not a run folder") and "outputs/" in err
    assert main.ran == [] and contents(tmp_path) == before


@pytest.mark.slow(seconds=1)
def test_resume_continues_a_run_of_an_earlier_version_unless_it_sets_a_key_that_is_gone(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROJECT", "mine")
    words = ("tracker.project='${oc.env:PROJECT}'", "+model.kwargs.drop_rate=null")
    folder = main.start("day/1", *words)
    for path in (folder / "config.yaml", folder / ".hydra" / "config.yaml"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("parallel:\n", "parallel:\n  comm_hook: null\n", 1)
        text = text.replace("checkpoint:\n", "checkpoint:\n  top: 1\n", 1)
        path.write_text(text, encoding="utf-8")
    assert main(f"resume={folder}") == (0, "")
    path = folder / "config.yaml"
    text = path.read_text(encoding="utf-8")
    assert "comm_hook" not in text and "drop_rate" in load_config(folder).model.kwargs
    path.write_text(text.replace("train:\n", "train:\n  gone: 3\n", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.gone"):
        load_config(folder)
