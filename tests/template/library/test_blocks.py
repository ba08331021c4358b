"""Configs and repeats of sweeps, which run every configuration once in random order."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.template.runs import tiny
from timm_parallel.config.compose import Command, compose_command, load_config
from timm_parallel.config.explain import explain
from timm_parallel.keys import SweepConfig
from timm_parallel.lab.analysis.sequential import FIRST
from timm_parallel.lab.analysis.settings import can_stop
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.multirun import count_runs
from timm_parallel.lab.report.report import compare
from timm_parallel.lab.report.sentences import sentence
from timm_parallel.lab.sweep.points import Composer, Point, expand
from timm_parallel.lab.sweep.sweep import (
    Sweep,
    append_block,
    check_blocks,
    count_repeats,
    freeze_jobs,
    reset_unfinished,
)
from timm_parallel.launch.resume import compose_run
from timm_parallel.patches import hydra_parser
from timm_parallel.record.result import Job, Jobs, Result, read_jobs
from timm_parallel.testing.configs import conf, parse


def points(*overrides: str) -> list[Point]:
    small = ("model=tiny", "print_config=false", "parallel.threads_per_device=1")
    return expand(parse("-m", *small, *overrides))[1]


@pytest.fixture(scope="module")
def five() -> list[Point]:
    """Compose a sweep on two cores with six configurations. Five of them can run, but
    parallel=single cannot use two devices.
    """
    return points("parallel=ddp,dp,single", "parallel.devices=2,1", "seed=7")


def blocks_of(jobs: Jobs) -> list[list[Job]]:
    return [[job for job in jobs.jobs if job.block == number] for number in range(jobs.num_blocks)]


def frozen(folder: Path, points: list[Point], repeats: int = 4) -> Jobs:
    folder.mkdir(exist_ok=True)
    freeze_jobs(folder, points, SweepConfig(repeats=repeats))
    return read_jobs(folder)


@pytest.mark.slow(seconds=3)
def test_sweep_repeat_runs_every_saved_config_once_with_a_seed_in_a_random_order(
    tmp_path: Path, five: list[Point]
) -> None:
    jobs, other = frozen(tmp_path, five), frozen(tmp_path / "other", five)
    orders = [[job.name for job in block] for block in blocks_of(jobs)]
    assert len({tuple(order) for order in orders}) > 1
    assert orders != [[job.name for job in block] for block in blocks_of(other)]
    assert json.loads((tmp_path / "jobs.json").read_text())["order_seed"] == jobs.order_seed
    assert jobs.order_seed != other.order_seed
    (tmp_path / "again").mkdir()
    again = freeze_jobs(tmp_path / "again", five, SweepConfig(repeats=4), jobs.order_seed)
    assert [job.name for job in again.jobs] == [job.name for job in jobs.jobs]
    ran = [job for job in jobs.jobs if job.status != "skipped"]
    assert [job.id for job in jobs.jobs] == list(range(len(jobs.jobs)))
    assert [job.block for job in ran] == [*[0] * 5, *[1] * 5, *[2] * 5, *[3] * 5]
    for block in blocks_of(jobs):
        runnable = [tuple(job.overrides) for job in block if job.status != "skipped"]
        assert sorted(runnable) == sorted(
            tuple(point.overrides) for point in five if not point.reason
        )
    assert sum(job.status == "skipped" for job in jobs.jobs) == 1
    later = write_job_folder(tmp_path, blocks_of(jobs)[1][0])
    assert OmegaConf.load(later / ".hydra" / "config.yaml").seed == 8
    assert compose_run(hydra_parser().parse_args([f"resume={later}"])).config.seed == 8
    # Edit the saved configs, so that they differ from the current files in conf/.
    for path in tmp_path.glob("configs/*/config.yaml"):
        path.write_text(path.read_text().replace("epochs: 8", "epochs: 9"))
    append_block(jobs, range(6))
    assert [
        load_config(write_job_folder(tmp_path, job)).train.epochs for job in blocks_of(jobs)[4]
    ] == [9] * 5


@pytest.mark.slow(seconds=3)
def test_sweep_jobs_have_different_folders_when_hydra_sweep_subdir_is_equal_for_all(
    tmp_path: Path,
) -> None:
    jobs = frozen(
        tmp_path, points("optim.lr=0.1,0.2", "parallel=single", "hydra.sweep.subdir=a/b"), repeats=2
    )
    assert {
        job.folder: load_config(write_job_folder(tmp_path, job)).optim.lr for job in jobs.jobs
    } == {
        "a/b_block_0": 0.1,
        "a/b_block_0_1": 0.2,
        "a/b_block_1": 0.1,
        "a/b_block_1_1": 0.2,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("seed=1,2", None),
        ('optim.lr=0.1,0.2 sweep.baseline="optim.lr=2e-1"', None),
        ("optim.lr=0.1,0.2 sweep.repeats=auto", None),
        ("parallel=single,ddp sweep.repeats=many", r"^sweep\.repeats=many: .*$"),
        ("parallel=single,ddp sweep.repeats=0", r"^sweep\.repeats=0: .*$"),
        ("seed=1,2 sweep.repeats=3", r"sweep\.repeats=3: .*seed"),
        (
            'optim.lr=0.1,0.2 sweep.baseline="optim.lr=9"',
            r"^sweep\.baseline=optim\.lr=9: .*optim\.lr=0\.1; optim\.lr=0\.2$",
        ),
        (
            "optim.lr=0.1,0.2 sweep.repeats=auto cluster=slurm",
            r"^sweep\.repeats=auto: cluster=slurm .* number$",
        ),
    ],
)
def test_sweep_is_refused_in_one_line_only_with_unsuitable_repeats_or_baseline(
    overrides: str, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        swept = points(*overrides.split())
        check_blocks(swept, swept[0].config.sweep)


# Accuracy of each learning rate in repeat 0 to 11: the baseline, one that is better, one that is
# unlikely to be decided, one that is decided late, and one that may be better.
NOISE = [0.01 * math.sin(1 + 7 * seed) for seed in range(12)]
ACCURACIES: dict[float, Callable[[int], float | None]] = {
    0.1: lambda seed: 0.7,
    0.2: lambda seed: 0.8 + NOISE[seed],
    0.3: lambda seed: 0.7 + NOISE[seed] - NOISE[3 - seed % 4],
    0.4: lambda seed: 0.708 + NOISE[seed],
    0.5: lambda seed: 0.7 + 0.02 * (seed % 2 == 0),
    0.6: lambda seed: 0.7,
}


def auto_sweep(folder: Path, rates: str = "0.1,0.2,0.3,0.4", **changes: object) -> Path:
    overrides = [f"optim.lr={rates}", "parallel=single", 'sweep.baseline="optim.lr=0.1"']
    swept = points(*overrides, *(f"sweep.{key}={value}" for key, value in changes.items()))
    folder.mkdir(exist_ok=True)
    freeze_jobs(folder, swept, swept[0].config.sweep, order_seed=3)
    return folder


def end(folder: Path, job: Job, value: float | None, commit: str | None = None) -> None:
    """Write the config and the result of a job without training. None: its loss was not finite."""
    config = (folder / f"configs/{job.configuration}/config.yaml").read_text()
    (folder / job.folder / "config.yaml").write_text(
        config.replace("\nseed: 42\n", f"\nseed: {job.seed}\n")
    )
    job.status = "done" if value is not None else "not_finite"
    result = Result(
        status=job.status,
        strategy="single",
        accelerator="cpu",
        devices=1,
        metrics={"acc": {"lower_is_better": False, "is_proportion": True}},
        val={"acc": value} if value is not None else {},
        commit=commit,
    )
    (folder / job.folder / "result.json").write_text(json.dumps(asdict(result)))


def run_sweep(folder: Path, lost: float | None = None) -> Jobs:
    """Run the jobs of a sweep without training, as its runner does, until none waits. Read
    jobs.json again before each repeat, as after a kill. `lost`: learning rate whose runs diverge.
    """
    while True:
        jobs = read_jobs(folder)
        reset_unfinished(jobs)
        waiting = Sweep(jobs).waiting()
        for job in waiting:
            assert job.seed is not None
            rate = rate_of(job)
            end(folder, job, None if rate == lost else ACCURACIES[rate](job.seed - 42))
        jobs.write()
        if not waiting or lost is not None:
            return jobs


def rate_of(job: Job) -> float:
    return next(
        float(text.partition("=")[2]) for text in job.overrides if text.startswith("optim.lr=")
    )


def seeds_of(jobs: Jobs) -> dict[float, int]:
    return dict(sorted(Counter(rate_of(job) for job in jobs.jobs).items()))


@pytest.mark.slow(seconds=3)
def test_sweep_ends_at_its_largest_number_of_repeats_when_its_code_changes(tmp_path: Path) -> None:
    folder = auto_sweep(tmp_path, "0.1,0.5", max_repeats=6)
    while waiting := Sweep(jobs := read_jobs(folder)).waiting():
        assert jobs.num_blocks <= 6
        for job in waiting:
            assert job.seed is not None
            commit = "old" if job.block < 2 else "new"
            end(folder, job, ACCURACIES[rate_of(job)](job.seed - 42), commit)
        jobs.write()
    assert seeds_of(jobs) == {0.1: 6, 0.5: 6}
    # No repeat has the old code any more.
    assert not any(group.undecided for group in compare([folder]).settings)


def test_number_of_repeats_is_open_only_for_settings_that_are_compared_with_a_baseline() -> None:
    swept = points("optim.lr=0.1,0.2")
    of_auto = SweepConfig(baseline="optim.lr=0.1")
    for settings, expected in (
        (of_auto, (FIRST, 12)),
        (replace(of_auto, max_repeats=6), (FIRST, 6)),
        (replace(of_auto, repeats=3), (3, 3)),
        (SweepConfig(), (1, 1)),
    ):
        assert count_repeats(swept, settings) == expected, settings
    assert count_runs(swept, of_auto) == "8 to 24 runs (2 configurations × 4 to 12 repeats)"
    swept[0].config.cluster.scheduler = "slurm"
    assert count_repeats(swept, of_auto) == (1, 1)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([{"optim.lr": 0.1}, {"optim.lr": 0.2}], True),
        ([{"optim.lr": 0.1}], False),
        ([{"optim.lr": 0.1, "seed": 1}, {"optim.lr": 0.2, "seed": 2}], False),
        ([{"optim.lr": 0.1, "data.fold": 1}, {"optim.lr": 0.1, "data.fold": 2}], False),
        ([{"parallel.strategy": "single"}, {"parallel.strategy": "ddp"}], False),
        (
            [
                {"optim.lr": rate, "train.max_steps": 9, "train.evaluate_every": 0}
                for rate in (0.1, 0.2)
            ],
            False,
        ),
    ],
)
def test_sweep_adds_repeats_only_if_settings_are_compared_by_a_metric(
    configs: list[dict[str, object]], expected: bool
) -> None:
    assert can_stop(configs) == expected


@pytest.mark.slow(seconds=3)
def test_sweep_adds_repeats_of_the_settings_that_are_not_decided_and_of_the_baseline(
    tmp_path: Path,
) -> None:
    folder = auto_sweep(tmp_path)
    jobs = run_sweep(folder)
    seeds = seeds_of(jobs)
    assert seeds[0.2] == seeds[0.3] == FIRST < seeds[0.4]
    assert seeds[0.1] == seeds[0.4]
    for rate in seeds:
        of_rate = [(job.block, job.seed) for job in jobs.jobs if rate_of(job) == rate]
        assert of_rate == [(block, 42 + block) for block in range(seeds[rate])]
    [group] = compare([folder]).settings
    # The interval of a setting is that of its own stop.
    assert {contrast.a: contrast.n for contrast in group.contrasts} == {
        f"optim.lr={rate}": seeds[rate] for rate in (0.2, 0.3, 0.4)
    }
    assert group.contrasts[0].verdict == "supported"


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(("key", "repeats"), [("max_repeats", 6), ("repeats", 4)])
def test_sweep_ends_at_its_largest_or_fixed_number_of_repeats(
    tmp_path: Path, key: str, repeats: int
) -> None:
    folder = auto_sweep(tmp_path, "0.1,0.5", **{key: repeats})
    jobs = run_sweep(folder)
    assert seeds_of(jobs) == {0.1: repeats, 0.5: repeats}
    [group] = compare([folder]).settings
    # Only the last of all possible repeats tells which difference could have been shown.
    assert group.contrasts[0].detectable is not None and not group.undecided
    assert bool(group.stops) == (key == "max_repeats"), "a fixed number is tested once"


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("rates", "lost"), [("0.1,0.6,0.5", 0.1), ("0.1,0.4", 0.4)])
def test_sweep_that_lost_all_runs_of_a_setting_or_of_the_baseline_adds_no_repeat(
    tmp_path: Path, rates: str, lost: float
) -> None:
    folder = auto_sweep(tmp_path, rates)
    run_sweep(folder, lost)
    assert Sweep(read_jobs(folder)).waiting() == []


@pytest.mark.slow(seconds=2)
def test_sweep_that_was_killed_in_a_repeat_adds_the_same_repeats_in_the_same_order(
    tmp_path: Path,
) -> None:
    whole = run_sweep(auto_sweep(tmp_path / "whole", "0.1,0.4"))
    folder = auto_sweep(tmp_path / "killed", "0.1,0.4")
    jobs = read_jobs(folder)
    for job in jobs.jobs:
        assert job.seed is not None
        end(folder, job, ACCURACIES[rate_of(job)](job.seed - 42))
    jobs.write()
    # The kill comes after the folders of the next repeat, and before jobs.json names them.
    append_block(jobs, {0, 1})
    assert len(read_jobs(folder).jobs) == 2 * FIRST
    again = run_sweep(folder)
    # Then a job of the last repeat is killed while it runs.
    again.jobs[-1].status = "running"
    (folder / again.jobs[-1].folder / "result.json").unlink()
    again.write()
    again = run_sweep(folder)
    assert [(job.name, job.seed) for job in again.jobs] == [
        (job.name, job.seed) for job in whole.jobs
    ]


def test_report_of_a_sweep_that_was_stopped_in_its_first_repeats_advises_to_continue_it(
    tmp_path: Path,
) -> None:
    folder = auto_sweep(tmp_path, "0.1,0.4")
    jobs = read_jobs(folder)
    for job in jobs.jobs:
        if job.block < 2:
            assert job.seed is not None
            end(folder, job, ACCURACIES[rate_of(job)](job.seed - 42))
    jobs.write()
    [few] = compare([folder]).recommendations[0].findings
    assert few.kind == "too_few_repeats"
    assert "Continue the sweep for an answer." in sentence(few)


def composed(word: str, command: Command, composer: Composer | None) -> str:
    try:
        if composer is None:
            return OmegaConf.to_yaml(command.loader.load_sweep_config(command.tree, [word]))
        return OmegaConf.to_yaml(composer.compose([word]))
    except HydraException as error:
        return explain(error, [word])


@pytest.mark.parametrize(
    "word", ["optim.lr=0.5", "seed=7", "optim.unknown=1", "tags=[1,x]", "parallel=ddp"]
)
def test_sweep_composer_matches_full_hydra_composition_without_schema_in_defaults(
    tmp_path: Path, word: str
) -> None:
    main = "defaults: [_self_, {parallel: single}]\noptim: {lr: '0.1'}\nseed: 1\ntags: [1]\n"
    folder = conf(
        tmp_path, main=main, parallel__single="strategy: single\n", parallel__ddp="strategy: ddp\n"
    )
    command = compose_command(parse("-m", "--config-path", str(folder), "--config-name", "main"))
    assert composed(word, command, Composer(command)) == composed(word, command, None)


@pytest.mark.slow(seconds=1)
def test_sweep_composer_runs_full_hydra_composition_once_per_choice_of_config_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full: list[list[str]] = []
    load = ConfigLoaderImpl.load_sweep_config

    def counted(loader: Any, tree: DictConfig, overrides: list[str]) -> DictConfig:
        full.append(overrides)
        return load(loader, tree, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    words = (
        "optim.lr=1e-3,1e-4",
        "model=tiny,vit_tiny",
        "seed=1,2",
        "parallel=single",
        "+optim.kwargs.eps=1e-6",
    )
    _, points = expand(parse("-m", *words))
    assert len(points) == 8
    assert full == [["model=tiny", "parallel=single"], ["model=vit_tiny", "parallel=single"]]


def test_sweep_of_data_image_size_accepts_height_width_pairs_next_to_single_numbers() -> None:
    words = tiny(
        "parallel=single", "parallel.accelerator=cpu", "data.image_size=[16,24],[24,16],32"
    )
    _, points = expand(parse("-m", *words))
    sizes = [vars(point.config.data)["image_size"] for point in points]
    assert sizes == [[16, 24], [24, 16], 32]
