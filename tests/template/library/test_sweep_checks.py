"""Checks of a sweep before its first job, and sweeps that try settings for speed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.app import app
from tests.template.runs import draw_images, tiny
from timm_parallel.entry import run_command
from timm_parallel.keys import Config
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.sweep.sweep import Sweep
from timm_parallel.machine import hardware
from timm_parallel.patches import hydra_parser
from timm_parallel.record.result import Jobs, Result, read_jobs, write_result
from timm_parallel.testing.commands import Refuse
from timm_parallel.testing.configs import parse
from timm_parallel.testing.report_sweeps import Sweep as Folder
from timm_parallel.testing.report_sweeps import findings, read

SMALL = (
    "-m",
    "model=tiny",
    "print_config=false",
    "parallel=single",
    "parallel.threads_per_device=1",
)


def test_sweep_is_refused_before_its_first_job_when_one_swept_data_root_is_missing(
    refuse: Refuse, tmp_path: Path
) -> None:
    images = draw_images(tmp_path / "images")
    gone = tmp_path / "gone"
    line = refuse(*SMALL, "data=folder", "data.batch_size=2", f"data.root={images},{gone}")
    assert f"data.root={gone}" in line
    assert f"{gone}/train" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("data.limit_train=40,100", "data.batch_size=64"), ("data.batch_size=64", "40 images")),
        (("train.accumulate=1,30",), ("train.accumulate=30", "19 batches")),
        (("seed=1,2", "data.limit_train=9", "sweep.dry_run=true"), ("9 images",)),
        (("search=optuna", "data.batch_size=choice(8,1258)"), ("data.batch_size=1258",)),
        (
            (
                *("sweep.tune=['data.workers=1']", "data.limit_train=9"),
                *("train.max_steps=3", "train.evaluate_every=0"),
            ),
            ("9 images",),
        ),
    ],
)
def test_sweep_is_refused_before_its_first_job_when_a_batch_exceeds_the_training_images(
    refuse: Refuse, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    line = refuse(*SMALL, *words)
    assert [text for text in named if text not in line] == [], line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("optim.lr=0.1,abc",), ("optim.lr=abc", "number")),
        (("train.epochs=0,1",), ("train.epochs=0",)),
        (("parallel=single,dpp",), ("parallel=dpp",)),
        (("modle=a,b",), ("modle",)),
        (("seed=range(3,3)",), ("seed=range(3,3): ",)),
        (("optim.lr=interval(0.001,0.1)",), ("optim.lr=interval(0.001,0.1)", "search=optuna")),
        (('tags="a,b","c d"',), ('tags="a,b"', "list")),
        (("optim.opt=[adamw,sgd],adamw",), ("optim.opt=[adamw,sgd]",)),
        (("optim.betas=[0.9,0.95],[0.9,0.99]",), ("optim.betas", "+optim.kwargs.betas")),
        (("optim.lr=1e-3,",), ("optim.lr=1e-3,",)),
        (("model=tiny,resnet50",), ("model=resnet50", "model.name=resnet50")),
        (("seed=1,2,1",), ("seed=1,2,1", "seed=1 twice", "sweep.repeats")),
        (("optim.lr=1e-3,0.001",), ("optim.lr=1e-3,0.001", "optim.lr=0.001 twice")),
    ],
)
def test_sweep_is_refused_with_a_fix_when_a_swept_value_is_invalid(
    refuse: Refuse, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    line = refuse(*SMALL, *words)
    assert [text for text in named if text not in line] == [], line


def test_sweep_interrupted_while_writing_job_configs_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The signal arrives while the sweep writes the config of its second job."""
    from timm_parallel.lab.sweep import sweep

    written: list[str] = []
    freeze = sweep.freeze_job

    def interrupted(folder: Path, job: object, point: object) -> None:
        if written:
            os.kill(os.getpid(), signal.SIGTERM)
        written.append("a job")
        freeze(folder, job, point)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "freeze_job", interrupted)
    folder = tmp_path / "sweep"
    monkeypatch.setattr(
        sys, "argv", ["train.py", *SMALL, "seed=1,2,3", f"hydra.sweep.dir={folder}"]
    )
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(app) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    out, err = capfd.readouterr()
    assert written and not folder.exists()
    assert len((out + err).splitlines()) == 1
    assert "SIGTERM" in err


@pytest.fixture
def no_jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop every sweep before its first job. Instead, write the folders of the jobs that would
    run. Return the list of their names.
    """
    waiting: list[str] = []

    def run(sweep: Sweep) -> int:
        waiting[:] = [write_job_folder(sweep.jobs.folder, job).name for job in sweep.waiting()]
        sweep.jobs.write()
        return 0

    monkeypatch.setattr(Sweep, "run", run)
    return waiting


def start(folder: Path, *words: str) -> Jobs:
    """Start a sweep with the given overrides, so that the configs of all its jobs are written.
    No job runs.
    """
    command = tiny("parallel=single", f"hydra.sweep.dir={folder}", *words)
    sys.argv[:] = ["train.py", "-m", *command]
    assert multirun(parse("-m", *command)) == 0
    return read_jobs(folder)


@pytest.mark.slow(seconds=1)
def test_sweep_prints_the_reason_of_a_skipped_job(
    tmp_path: Path,
    no_jobs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = start(tmp_path / "sweep", "parallel.devices=1,2")
    monkeypatch.setattr(
        "timm_parallel.lab.report.report.write_report", lambda folders: "report.html"
    )
    monkeypatch.setattr("timm_parallel.lab.sweep.sweep.show_headline", lambda folder: None)
    capsys.readouterr()
    Sweep(jobs)._close()
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped ")]
    assert "parallel.devices=2" in line and jobs.jobs[1].reason in line


def resume(folder: Path) -> int:
    return multirun(parse("-m", f"sweep.resume={folder}"))


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


@pytest.mark.slow(seconds=2)
def test_sweep_checks_each_data_once_and_when_resumed_writes_changed_configs_of_jobs_again(
    tmp_path: Path, no_jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deleted folder is of a finished job, the other of a waiting job. The config of another
    waiting job was edited, and the recorded command too, so composing it again would give other
    configs.
    """
    folder = tmp_path / "sweep"
    sizes: list[int | None] = []

    def check(config: Config) -> None:
        sizes.append(config.data.limit_train)

    monkeypatch.setattr("timm_parallel.lab.sweep.points.check_data", check)
    words = ("optim.lr=1e-3,1e-4", "data.limit_train=64,128", "sweep.repeats=2")
    jobs = start(folder, *words)
    assert sizes == [64, 128]
    for job in jobs.jobs:
        if job.folder not in ("1_block_0", "1_block_1"):
            job.status = "done"
            write_result(folder / job.folder, Result("done"))
    jobs.command = jobs.command.replace("1e-4", "1e-5")
    jobs.write()
    names = ["0_block_1", "1_block_0", "1_block_1"]
    wanted = {name: files_of(folder / name) for name in names}
    for name in names[:2]:
        shutil.rmtree(folder / name)
    edited = folder / "1_block_1" / "config.yaml"
    edited.write_text(edited.read_text().replace("  lr: 0.0001\n", "  lr: 0.5\n"))
    assert files_of(folder / "1_block_1") != wanted["1_block_1"]
    assert resume(folder) == 0
    assert sorted(no_jobs) == names
    assert {name: files_of(folder / name) for name in wanted} == wanted


def test_error_on_a_truncated_jobs_json_has_a_command_that_writes_the_report(
    tmp_path: Path, without_plots: None
) -> None:
    from scripts import report

    folder = tmp_path / "sweep"
    # The sweep was stopped with one finished job and one waiting job.
    sweep = Folder(folder)
    sweep.add("single", 1)
    (sweep.add("ddp", 2) / "result.json").unlink()
    sweep.write()
    path = folder / "jobs.json"
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ValueError, match="damaged") as refused:
        resume(folder)
    command = str(refused.value).partition("python scripts/report.py ")[2]
    words = subprocess.run(
        ["bash", "-c", f"echo {command}"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert report.main(words) == 0
    assert (folder / "report.html").exists()


def files_of(folder: Path) -> dict[str, str]:
    """Read the config files in the folder of a job that has not started. Return a dictionary
    from file name to text.
    """
    names = ("config.yaml", ".hydra/config.yaml", ".hydra/overrides.yaml")
    return {name: (folder / name).read_text() for name in names}


SHORT = (
    "experiment=tune",
    "model=tiny",
    "parallel=single",
    "parallel.accelerator=cpu",
    "train.max_steps=4",
)


def tuned(
    folder: Path, speeds: dict[str, list[float]], flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write the report on a tuning, and return its headline result. `speeds` is a dictionary
    from overrides, separated by spaces, to images/s per repeat.
    """
    sweep = Folder(folder)
    for text, values in speeds.items():
        overrides = dict(word.partition("=")[::2] for word in text.split())
        config: dict[str, Any] = {
            "train": {"precision": "fp32", "max_steps": 40, "evaluate_every": 0},
            "model": {
                "name": "resnet18",
                "kwargs": {},
                "channels_last": "model.channels_last" in overrides,
            },
            "sweep": {"tune": ["train.precision=bf16"], "smallest_difference": 0.03},
        }
        config["train"]["precision"] = overrides.get("train.precision", "fp32")
        if not values:
            sweep.row("experiment=tune", *text.split(), status="waiting")
        for block, speed in enumerate(values):
            sweep.add(
                "single", 1, speed, block=block, config={**config, "seed": block}, flags=list(flags)
            )
            sweep.jobs[-1]["overrides"] = [
                "experiment=tune",
                "data.workers=0",
                "train.max_steps=40",
                *text.split(),
            ]
    report = read(sweep.write())[2]
    lead: dict[str, Any] = report["lead"]
    return lead


@pytest.mark.usefixtures("without_plots")
def test_tuning_report_recommends_the_fastest_settings_and_shows_their_command(
    tmp_path: Path,
) -> None:
    both = "train.precision=bf16 model.channels_last=true"
    speeds: dict[str, list[float]] = {
        "": [100, 102, 101],
        "model.channels_last=true": [111, 113, 110],
        both: [150, 152, 153],
    }
    lead = tuned(tmp_path / "sweep", speeds)
    assert (
        lead["command"]
        == "python train.py data.workers=0 train.precision=bf16 model.channels_last=true"
    )
    assert lead["contrast"]["ratio"] == pytest.approx(1.502, abs=0.005)
    assert lead["contrast"]["low"] < 1.5 < lead["contrast"]["high"]
    better = findings(lead)["better"]
    labels = (better["setting"]["label"], better["baseline"]["label"])
    # The label of a setting has only what it changes.
    assert labels == (", ".join(sorted(both.split())), "the current settings")
    assert "images/s is 1.50 × as high" in lead["sentence"]
    assert lead["value"] == pytest.approx(151.7, abs=0.1)


@pytest.mark.usefixtures("without_plots")
def test_tuning_report_names_no_current_settings_before_their_first_run_has_ended(
    tmp_path: Path,
) -> None:
    bf16, channels_last = "train.precision=bf16", "model.channels_last=true"
    lead = tuned(tmp_path / "sweep", {"": [], bf16: [150], channels_last: [110]})
    few = findings(lead)["too_few_repeats"]
    assert few["baseline"]["label"] == f"{bf16}, model.channels_last=false"


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("speeds", "kind"),
    [
        # The speeds vary so much that the comparison is inconclusive.
        (([100, 120, 90], [110, 100, 130]), "best_mean"),
        # The current settings are shown to be the fastest.
        (([100, 101, 100], [90, 91, 90]), "better"),
        # The gain of 1 % is below sweep.smallest_difference.
        (([100, 100.1, 100], [101, 101.1, 101]), "best_mean"),
        (([100], [150]), "too_few_repeats"),
        (([100, 101, 100], []), "only_setting"),
        (([100, 101, 100], [150, 151, 150]), "disturbed"),
    ],
)
def test_tuning_report_recommends_nothing_when_no_setting_is_shown_to_be_faster(
    tmp_path: Path, speeds: tuple[list[float], list[float]], kind: str
) -> None:
    current, changed = speeds
    flags = ("other programs kept 1.0 of 2 processors busy",) if kind == "disturbed" else ()
    lead = tuned(tmp_path / "sweep", {"": current, "train.precision=bf16": changed}, flags)
    assert lead["findings"][0]["kind"] == kind
    assert lead["sentence"] and not lead["command"] and lead["point"] is None


def tune(*overrides: str) -> int:
    return multirun(hydra_parser().parse_args(["-m", *SHORT, *overrides]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("seed=1,2",), "sweep.tune"),
        (("sweep.jobs=2",), "sweep.jobs"),
        (("search=optuna",), r"search="),
        (("train.evaluate_every=1",), "train.evaluate_every"),
        (("sweep.tune=['train.precision=fp32']",), r"sweep\.tune=\['train\.precision=fp32'\]"),
        (("sweep.tune=['train.precission=bf16']",), r"sweep\.tune: train\.precission=bf16: "),
        (("cluster=slurm",), "cluster"),
    ],
)
def test_sweep_tune_is_refused_together_with_seeds_concurrent_jobs_a_search_or_slurm(
    tmp_path: Path, overrides: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        tune(f"hydra.sweep.dir={tmp_path}/sweep", *overrides)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow(seconds=1)
def test_speed_tuning_repeats_each_new_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: 0)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    new = ["train.precision=bf16", "train.precision=bf16 model.channels_last=true"]
    tried = [*new, new[0], "train.precision=fp32"]
    folder = tmp_path / "sweep"
    assert tune(f"sweep.tune={tried}", "sweep.repeats=2", f"hydra.sweep.dir={folder}") == 0
    jobs = read_jobs(folder).jobs
    assert sorted((job.name, job.block) for job in jobs) == sorted(
        (name, block)
        for name in ("current settings", *(text.replace(" ", ",") for text in new))
        for block in range(2)
    )
