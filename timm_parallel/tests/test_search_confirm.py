"""Test the confirmation of a search (search.confirm): jobs and seeds, refusals, the report, and
a resume after kill -9.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from src.schema import OptimConfig
from timm_parallel.config.compose import load_config
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.search.confirm import Confirmation, check_confirmation, confirm_best
from timm_parallel.lab.search.search import _confirm
from timm_parallel.lab.search.space import freeze_search, read_search, read_space
from timm_parallel.lab.sweep.points import expand
from timm_parallel.record.jobs import Job, Jobs, read_jobs
from timm_parallel.testing.commands import Train
from timm_parallel.testing.configs import parse, tiny

BEST = ["optim.lr=0.0123", "optim.weight_decay=0.2"]


def frozen_search(folder: Path, *overrides: str) -> Jobs:
    """Write the files of a search with one trial into `folder`, and return its jobs."""
    command, points = expand(parse("-m", "search=optuna", *tiny("parallel=single", *overrides)))
    folder.mkdir()
    freeze_search(
        folder, points[0].tree, read_space(command), seed=0, direction="maximize", study_name="s"
    )
    return Jobs(
        folder,
        "python train.py -m search=optuna",
        [Job(0, "optim.lr=0.0123,optim.weight_decay=0.2", "0", [])],
    )


@pytest.fixture
def confirmations(monkeypatch: pytest.MonkeyPatch) -> list[Confirmation]:
    """Replace the start of a confirmation, so that no job runs. Return a list that collects the
    confirmations that would start.
    """
    collected: list[Confirmation] = []

    def run(confirmation: Confirmation) -> int:
        confirmation.jobs.write()
        collected.append(confirmation)
        return 0

    monkeypatch.setattr(Confirmation, "run", run)
    return collected


def finish(folder: Path, job: Job) -> None:
    (folder / job.folder / "result.json").write_text(json.dumps({"status": "done", "reason": ""}))


@pytest.mark.slow(seconds=4)
def test_search_confirm_trains_best_trial_and_default_settings_with_new_seeds(
    tmp_path: Path, confirmations: list[Confirmation]
) -> None:
    trials = frozen_search(tmp_path / "search", "seed=7")
    assert confirm_best(trials, 0, BEST, 3, max_jobs=1) == 0
    jobs = read_jobs(tmp_path / "search" / "confirm_0")
    assert jobs.command == trials.command
    seeds: dict[str, list[int]] = {}
    for job in jobs.jobs:
        folder = write_job_folder(jobs.folder, job)
        config = load_config(folder)
        seeds.setdefault(job.name, []).append(config.seed)
        assert f"seed={config.seed}" in OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        is_best = job.name == trials.jobs[0].name
        assert isinstance(config.optim, OptimConfig)
        assert (config.optim.lr == 0.0123, config.optim.weight_decay == 0.2) == (is_best, is_best)
        assert job.seed == config.seed and job.overrides[-2:] == (
            BEST if is_best else job.overrides[-2:]
        )
    assert {name: sorted(of_name) for name, of_name in seeds.items()} == {
        "default settings": [8, 9, 10],
        trials.jobs[0].name: [8, 9, 10],
    }
    assert {job.folder.partition("_block")[0] for job in jobs.jobs} == {"0_default", "1_best"}


@pytest.mark.slow(seconds=2)
def test_search_confirm_trains_only_default_settings_when_the_best_trial_has_equal_settings(
    tmp_path: Path, confirmations: list[Confirmation]
) -> None:
    trials = frozen_search(tmp_path / "search")
    optim = read_search(trials.folder)[0].optim
    assert isinstance(optim, OptimConfig)
    confirm_best(
        trials,
        0,
        [f"optim.lr={optim.lr}", f"optim.weight_decay={optim.weight_decay}"],
        2,
        max_jobs=1,
    )
    assert [job.name for job in confirmations[0].jobs.jobs] == ["default settings"] * 2


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_search_confirm_keeps_finished_jobs_and_adds_seeds_when_resumed_with_more_seeds(
    tmp_path: Path, confirmations: list[Confirmation]
) -> None:
    trials = frozen_search(tmp_path / "search")
    confirm_best(trials, 0, BEST, 2, max_jobs=1)
    folder = confirmations[0].jobs.folder
    before = read_jobs(folder)
    done, deleted = before.jobs[0], before.jobs[-1]
    finish(folder, done)
    shutil.rmtree(folder / deleted.folder)
    confirm_best(trials, 0, BEST, 3, max_jobs=1)
    after = read_jobs(folder)
    assert [job.status for job in after.jobs] == ["done", *["waiting"] * 5]
    assert [(job.folder, job.seed) for job in after.jobs[:4]] == [
        (job.folder, job.seed) for job in before.jobs
    ]
    seeds = [load_config(write_job_folder(folder, job)).seed for job in after.jobs]
    assert seeds == [job.seed for job in after.jobs]
    assert seeds[4:] == [max(seeds[:4]) + 1] * 2
    assert len({job.folder for job in after.jobs}) == 6


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_resumed_search_confirm_starts_over_when_it_was_killed_while_writing_job_configs(
    tmp_path: Path, confirmations: list[Confirmation]
) -> None:
    trials = frozen_search(tmp_path / "search")
    confirm_best(trials, 0, BEST, 2, max_jobs=1)
    folder = confirmations[0].jobs.folder
    (folder / "jobs.json").unlink()
    confirm_best(trials, 0, BEST, 2, max_jobs=1)
    jobs = read_jobs(folder).jobs
    assert [load_config(write_job_folder(folder, job)).seed for job in jobs] == [
        job.seed for job in jobs
    ]
    assert len({job.folder for job in jobs}) == len(jobs) == 4


@pytest.mark.nightly
@pytest.mark.slow(seconds=2)
def test_stopped_search_confirm_prints_a_resume_command_with_the_search_folder(
    tmp_path: Path, confirmations: list[Confirmation], capsys: pytest.CaptureFixture[str]
) -> None:
    trials = frozen_search(tmp_path / "search")
    confirm_best(trials, 0, BEST, 2, max_jobs=1)
    assert confirmations[0]._say_stopped(signal.SIGTERM) == 128 + signal.SIGTERM
    assert (
        capsys.readouterr().err.strip().endswith(f"sweep.resume={trials.folder} search.confirm=2")
    )


@pytest.mark.slow(seconds=2)
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("search.confirm=1",), "search.confirm=1"),
        (("search.confirm=0",), "search.confirm=0"),
        (("search.confirm=2", "seed=1,2"), "search.confirm=2: .* varies seed"),
        (
            ("search.confirm=2", "sweep.baseline='optim.lr=0.1'"),
            "search.confirm=2: .* sweep.baseline",
        ),
        (
            ("search.confirm=2", "search.pruner=none", "optimized_metric=images_per_sec"),
            "search.confirm=2: .* speed",
        ),
        (
            ("search.confirm=2", "train.max_steps=5", "train.evaluate_every=0"),
            "search.confirm=2: .* speed",
        ),
        (
            ("search.confirm=2", "parallel=ddp", "parallel.devices=3", "data.batch_size=6,9"),
            "search.confirm=2: .*data.batch_size",
        ),
    ],
)
def test_search_confirm_is_refused_when_best_and_default_settings_cannot_be_compared(
    overrides: tuple[str, ...], named: str
) -> None:
    def check(*words: str) -> list[Any]:
        command, points = expand(parse("-m", "search=optuna", *tiny("data.batch_size=8", *words)))
        return check_confirmation(command.config, points[0].tree, read_space(command))

    assert len(check("search.confirm=2")) == 1
    assert check() == []
    with pytest.raises(ValueError, match=named):
        check(*overrides)


@pytest.mark.parametrize(
    ("seeds", "stopped_by", "code", "skipped"),
    [(None, None, 0, False), (2, None, 1, True), (2, signal.SIGINT, 130, False)],
)
def test_search_confirm_does_not_start_when_not_requested_or_when_the_search_failed(
    capsys: pytest.CaptureFixture[str],
    confirmations: list[Confirmation],
    seeds: int | None,
    stopped_by: int | None,
    code: int,
    skipped: bool,
) -> None:
    search: Any = SimpleNamespace(stopped_by=stopped_by)
    assert _confirm(search, seeds, code) == code
    assert capsys.readouterr().err.startswith("confirm      skipped") == skipped
    assert confirmations == []


@pytest.mark.slow(seconds=25)
@pytest.mark.processes
@pytest.mark.nightly
def test_killed_search_confirm_finishes_and_reports_on_new_seeds_when_resumed(
    tmp_path: Path, train: Train
) -> None:
    folder = tmp_path / "search"
    words = (
        "search=optuna",
        "search.n_trials=2",
        "search.confirm=2",
        "parallel=single",
        f"hydra.sweep.dir={folder}",
    )
    running = train.start("-m", *words, folder=folder)
    ended = running.wait_for(lambda: next(folder.glob("confirm_*/*/result.json"), None))
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    kept = {path: path.read_bytes() for path in (*folder.glob("[01]/result.json"), ended)}
    done = train("-m", f"sweep.resume={folder}", folder=folder, defaults=False)
    assert done.returncode == 0, done.output
    assert {path: path.read_bytes() for path in kept} == kept, "a finished job ran again"
    jobs = read_jobs(ended.parents[1])
    assert [job.status for job in jobs.jobs] == ["done"] * 4
    seeds_of_trials = {load_config(folder / job.folder).seed for job in read_jobs(folder).jobs}
    seeds = {load_config(jobs.folder / job.folder).seed for job in jobs.jobs}
    assert len(seeds) == 2 and not seeds & seeds_of_trials
    report = json.loads((jobs.folder / "report.json").read_text())
    [group] = report["settings"]
    assert (group["metric"], group["blocks"], [len(of["values"]) for of in group["settings"]]) == (
        "val/acc_best",
        2,
        [2, 2],
    )
    default = load_config(jobs.folder / "0_default_block_0").optim
    assert isinstance(default, OptimConfig)
    assert group["baseline"] == f"optim.lr={default.lr}, optim.weight_decay={default.weight_decay}"
    assert report["lead"]["sentence"] in done.stdout
    best = read_jobs(folder).jobs[int(jobs.folder.name.partition("_")[2])]
    assert (
        load_config(jobs.folder / "1_best_block_0").optim == load_config(folder / best.folder).optim
    )
