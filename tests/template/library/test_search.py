"""Hyper-parameter search: space, errors, pruning, failed trials and a resume."""

from __future__ import annotations

import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from src.schema import Config
from tests.template.runs import run_python
from timm_parallel.keys import SearchConfig
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.search import search as module
from timm_parallel.lab.search.search import Follower, Search
from timm_parallel.lab.search.space import (
    check_space,
    freeze_search,
    natural_direction,
    parse_space,
    read_search,
    read_space,
)
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.runner import Runner
from timm_parallel.patches import hydra_parser
from timm_parallel.record.result import (
    SEARCH,
    Job,
    Jobs,
    Result,
    new_jobs,
    read_jobs,
    read_result,
    write_result,
)
from timm_parallel.testing.commands import processes_of

ROOT = Path(__file__).parents[3]
SMALL = (
    "model=tiny",
    "print_config=false",
    "optim.warmup_epochs=0",
    "data.limit_train=64",
    "train.epochs=2",
    "parallel.threads_per_device=1",
)


def space_of(*overrides: str) -> dict[str, Any]:
    """Parse and check the search space of a command line: key -> dimension."""
    command, points = expand(hydra_parser().parse_args(["-m", "search=optuna", *SMALL, *overrides]))
    space = read_space(command)
    check_space(command.config, points[0].tree, space)
    return {dimension.name: dimension for dimension in space}


def search(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    if folder.exists():
        words = (*overrides, f"sweep.resume={folder}")
    else:
        words = (*overrides, "search=optuna", *SMALL, f"hydra.sweep.dir={folder}")
    return run_python("train.py", "-m", *words)


def test_search_space_is_parsed_from_hydra_sweep_syntax() -> None:
    space = {
        dimension.name: dimension
        for dimension in parse_space(
            {
                "a": "interval(0,1)",
                "b": "tag(log,interval(1e-4,1e-1))",
                "c": "range(1,4)",
                "d": "choice(x,y)",
                "e": "p,q",
                "f": "int(interval(1,8))",
                "+g.h": "1,2",
            }
        )
    }
    known = {name: dimension.distribution for name, dimension in space.items()}
    assert known["a"] == FloatDistribution(0, 1)
    assert known["b"] == FloatDistribution(1e-4, 1e-1, log=True)
    assert known["c"] == IntDistribution(1, 3), "the end of a range is excluded"
    assert known["d"] == CategoricalDistribution(("x", "y"))
    assert known["e"] == CategoricalDistribution(("p", "q"))
    assert known["f"] == IntDistribution(1, 8)
    assert space["g.h"].override("2") == "+g.h=2"


@pytest.mark.slow(seconds=4)
def test_command_line_overrides_of_a_search_add_change_and_remove_searched_keys() -> None:
    space = space_of(
        "optim.lr=interval(0.1,0.2)", "optim.weight_decay=0.1", "train.smoothing=interval(0,0.2)"
    )
    assert set(space) == {"optim.lr", "train.smoothing"}
    assert space["optim.lr"].distribution.low == 0.1


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("search.n_jobs=0", "search.n_jobs=0"),
        ("search.direction=minimize", "search.direction=minimize"),
        ("optim.lr=interval(-1,1)", "optim.lr"),
        ("train.epochs=interval(1,3)", r"int\(interval"),
        ("optim.opt=adamw,nonsense", "no such optimizer$"),
        ("optim.lr=tag(log,foo,interval(0.1,1))", " foo;"),
        ("optim.lr=interval(0.2,0.1)", "optim.lr=interval"),
        ("optim.weight_decay=int(interval(0.1,0.9))", "single value 0"),
        ("model=tiny,resnet18", "group"),
        ("model=glob(*)", "group"),
        ("+search.params.optim.lr=glob(*)", "optim.lr=glob"),
        ("hydra.run.dir=a,b", "hydra.run.dir"),
        ("search.sampler=grid", "search.sampler=grid"),
        ("search.sampler=gird", "search.sampler=gird"),
        ("search.n_trials=0", "search.n_trials=0"),
        ("sweep.repeats=2", "sweep.repeats"),
        ("sweep.dry_run=true", "sweep.dry_run"),
        ("optimized_metric=images_per_sec", "search.pruner=none"),
        ("+search.params.optim.lrr=interval(0,1)", "optim.lrr"),
        ("parallel.devices=2,3 parallel=single", "single uses one device"),
    ],
)
def test_search_is_refused_when_a_setting_is_invalid(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        space_of(*override.split(" "))


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("overrides", "objective", "direction"),
    [
        ((), "val/acc_best", "maximize"),
        (("checkpoint.metric=val/loss",), "val/loss_best", "minimize"),
        (("checkpoint.metric=val/acc_ema", "model.ema.decay=0.9"), "val/acc_best", "maximize"),
        (("checkpoint.metric=val/loss", "optimized_metric=val/acc"), "val/acc", "maximize"),
    ],
)
def test_search_optimizes_optimized_metric_if_set_and_otherwise_checkpoint_metric(
    tmp_path: Path, overrides: tuple[str, ...], objective: str, direction: str
) -> None:
    command, points = expand(hydra_parser().parse_args(["-m", "search=optuna", *SMALL, *overrides]))
    space = read_space(command)
    check_space(command.config, points[0].tree, space)
    assert command.config.objective == objective
    assert natural_direction(command.config) == direction
    freeze_search(tmp_path, points[0].tree, space)
    assert read_search(tmp_path)[0].optimized_metric == objective


@pytest.mark.parametrize("text", ["search: [", "- 1", None])
def test_error_names_search_yaml_when_the_file_is_damaged_or_missing(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / SEARCH).write_text(text)
    with pytest.raises(ValueError, match=r"search\.yaml: "):
        read_search(tmp_path)


@pytest.mark.slow(seconds=1)
def test_search_starts_no_more_trials_after_too_many_failures_or_non_finite_objectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        *("optim.lr=interval(0.1,0.2)", "search.max_failure_rate=0.25"),
        *("search.study_name=x", "search.direction=maximize", "search.seed=1"),
    )
    command, points = expand(hydra_parser().parse_args(["-m", "search=optuna", *SMALL, *words]))
    freeze_search(tmp_path, points[0].tree, read_space(command))
    searched = Search(new_jobs(tmp_path), 4, 1, is_new=True)
    for status in ("done", "failed"):
        [job] = searched.waiting()
        searched.watch(job)
        job.status = status
        write_result(tmp_path / job.folder, Result(status, objective=math.inf))
        searched.ended(job)
    assert not searched.waiting() and not searched.waiting()
    assert capsys.readouterr().err.count("2 of 4 trials have failed") == 1
    assert [job.status for job in searched.jobs.jobs] == ["not_finite", "failed", *["waiting"] * 2]
    assert {trial.state for trial in searched.study.trials} == {TrialState.FAIL}


def test_search_does_not_continue_another_search_in_its_database(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db"
    settings = SearchConfig(study_name="x", direction="maximize", sampler="tpe", storage=storage)
    module.open_study(tmp_path, Config(search=settings), is_new=True)
    with pytest.raises(ValueError, match=r"^search.study_name=x: "):
        module.open_study(tmp_path, Config(search=settings), is_new=True)


class Trial:
    """Fake Optuna trial that asks to be pruned when its last reported value is below `bar`."""

    def __init__(self, bar: float) -> None:
        self.bar, self.reported = bar, {}  # type: float, dict[int, float]

    def report(self, value: float, step: int) -> None:
        self.reported[step] = value

    def should_prune(self) -> bool:
        return self.reported[max(self.reported)] < self.bar


def test_search_reports_each_evaluation_to_optuna_once_and_gives_a_reason_for_pruning(
    tmp_path: Path,
) -> None:
    path, trial = tmp_path / "metrics.jsonl", Trial(bar=0.5)
    follow = Follower(trial, path, "val/acc")  # type: ignore[arg-type]
    assert follow() == ""
    with open(path, "a") as file:
        file.write(
            '{"step": 7, "train/loss": 2.0}\n{"step": 9, "val/acc": 0.6}\n{"step": 18, "val/a'
        )
    assert follow() == ""
    assert trial.reported == {1: 0.6}, "an incomplete line is not a value"
    with open(path, "a") as file:
        file.write('cc": 0.4}\n')
    assert "val/acc 0.4000" in follow()
    assert trial.reported == {1: 0.6, 2: 0.4}
    # After a resume, the trial is not pruned before its next evaluation.
    follow = Follower(trial, path, "val/acc")  # type: ignore[arg-type]
    assert follow() == ""
    with open(path, "a") as file:
        file.write('{"step": 27, "val/acc": 0.3}\n')
    assert follow() != ""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("seconds", "works"), [(20.0, True), (0.2, False)])
def test_search_waits_for_a_locked_database_and_then_ends_with_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, works: bool
) -> None:
    monkeypatch.setattr(module, "LOCKED_SECONDS", seconds)
    config = Config(search=SearchConfig(study_name="x", direction="maximize", sampler="random"))
    opened = module.open_study(tmp_path, config, is_new=True)
    trial = opened.ask()
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    if works:
        threading.Timer(1, lambda: other.execute("COMMIT")).start()
    search = Search.__new__(Search)
    search.jobs = Jobs(tmp_path, "", [Job(0, "trial 0", "0", [], status="running")])

    def report(runner: Runner) -> int:
        trial.report(0.5, step=1)
        return 0

    monkeypatch.setattr(Runner, "run", report)
    if works:
        assert search.run() == 0
        assert opened.trials[0].intermediate_values == {1: 0.5}
    else:
        with pytest.raises(ValueError, match=r"search\.storage: .*sweep\.resume=") as refusal:
            search.run()
        assert "\n" not in str(refusal.value)
        assert read_jobs(tmp_path).status == "interrupted"
    other.close()


@pytest.mark.slow(seconds=2)
def test_search_whose_database_fails_at_its_first_trial_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: Runner) -> int:
        raise StorageInternalError("locked")

    monkeypatch.setattr(Runner, "run", fail)
    folder = tmp_path / "search"
    words = ["-m", "search=optuna", *SMALL, f"hydra.sweep.dir={folder}"]
    with pytest.raises(ValueError, match=rf"sweep\.resume={folder}"):
        multirun(hydra_parser().parse_args(words))
    assert read_jobs(folder).status == "interrupted"


@pytest.mark.slow(seconds=2)
def test_trial_that_the_study_lists_as_failed_does_not_run_again_when_a_search_is_resumed(
    tmp_path: Path,
) -> None:
    """The search was killed before it wrote jobs.json, and the trial wrote no result."""
    command, points = expand(hydra_parser().parse_args(["-m", "search=optuna", *SMALL]))
    space = read_space(command)
    names = {"seed": 0, "direction": "maximize", "study_name": "x"}
    freeze_search(tmp_path, points[0].tree, space, **names)
    config = read_search(tmp_path)[0]
    opened = module.open_study(tmp_path, config, is_new=True)
    opened.tell(module.ask(opened, config.search, space, 0, 1), state=TrialState.FAIL)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").touch()
    jobs = Jobs(tmp_path, "", [Job(0, "trial 0", "0", ["optim.lr=0.1"], status="running")])
    assert Search(jobs, 1, 1, is_new=False).waiting() == []
    assert read_jobs(tmp_path).jobs[0].status == "failed"


def study(folder: Path) -> Any:
    import optuna

    return optuna.load_study(study_name=None, storage=f"sqlite:///{folder}/study.db")


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_search_ends_its_jobs_and_keeps_the_values_of_its_trials_when_resumed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "search"
    words = (
        "search.n_trials=4",
        "search.n_jobs=2",
        "parallel=single",
        "parallel.threads_per_device=1",
    )
    command = [
        sys.executable,
        "train.py",
        "-m",
        "search=optuna",
        *SMALL,
        *words,
        f"hydra.sweep.dir={folder}",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 300
    while (
        not all((folder / job / "metrics.jsonl").exists() for job in "12")
        and time.monotonic() < until
    ):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 5
    while (left := processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    asked = {trial.number: trial.params for trial in study(folder).get_trials()}
    done = search(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs, trials = read_jobs(folder).jobs, study(folder).get_trials()
    assert [job.id for job in jobs] == [trial.number for trial in trials] == list(range(4))
    # A trial that was killed while it was asked for may lack values.
    assert all(params.items() <= trials[number].params.items() for number, params in asked.items())
    assert len({trial.params["optim.lr"] for trial in trials}) == 4
    assert {job.status for job in jobs} <= {"done", "pruned"}
    if len(os.sched_getaffinity(0)) > 1:
        assert any(read_result(folder / job.folder).neighbours for job in jobs)


def searched_page(folder: Path, ends: list[tuple[str, float | None, str]]) -> str:
    """Write search.html for a study with a trial per (status, value, reason)."""
    import optuna

    from timm_parallel.lab.search.search import write_search_page

    jobs, searched, state = (
        Jobs(folder, "", []),
        optuna.create_study(direction="maximize"),
        optuna.trial.TrialState,
    )
    for number, (status, value, reason) in enumerate(ends):
        trial = searched.ask()
        trial.suggest_float("optim.lr", 1e-4, 1e-2, log=True)
        trial.report(0.1 * number, 1)
        pruned = state.PRUNED if status == "pruned" else state.FAIL
        searched.tell(trial, value) if value else searched.tell(trial, state=pruned)
        jobs.jobs.append(
            Job(
                number,
                "",
                str(number),
                [f"optim.lr={number}"],
                status=status,
                reason=reason,
                seconds=1.0,
            )
        )
    # A search fixes the metric in its folder.
    config = Config(
        optimized_metric="val/acc_best",
        search=SearchConfig(params={"optim.lr": ""}, direction="maximize", sampler="tpe"),
    )
    return write_search_page(jobs, searched, config).read_text()


@pytest.mark.slow(seconds=5)
def test_search_html_shows_best_trial_plot_and_trial_table(tmp_path: Path) -> None:
    ends = [
        ("done", 0.5, ""),
        ("pruned", None, "worse than the median"),
        ("done", 0.9, ""),
        ("failed", None, "<b>|"),
    ]
    html = searched_page(tmp_path, ends)
    assert 'Best: val/acc_best 0.9000 in trial <a href="2/">2</a>' in html
    assert "python train.py optim.lr=2" in html
    cells = [
        re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    ]
    assert [row[0] for row in cells if row][:2] == ["2", "0"], "the best trial is first"
    assert {row[0]: row[2] for row in cells if row} == {
        "0": "done",
        "1": "pruned",
        "2": "done",
        "3": "failed",
    }
    assert "worse than the median" in html
    assert "&lt;b&gt;|" in html
    figures = re.findall(r'<img alt="plot_(\w+)" src="data:image/svg\+xml;base64,', html)
    assert figures == ["slice"]


@pytest.mark.slow(seconds=2)
def test_search_html_names_the_first_of_equal_values_as_the_best(tmp_path: Path) -> None:
    """Optuna, which the console shows, does so too."""
    ends: list[tuple[str, float | None, str]]
    ends = [("done", value, "") for value in (0.5, 0.5, 0.75, 0.75)]
    assert 'in trial <a href="2/">2</a>' in searched_page(tmp_path, ends)


def test_search_html_shows_failure_reason_and_no_best_trial_when_all_trials_failed(
    tmp_path: Path,
) -> None:
    html = searched_page(tmp_path, [("failed", None, "out of memory")])
    assert "Best:" not in html
    assert "out of memory" in html
