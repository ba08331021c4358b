"""Tests of sweeps with repeats, which are randomized complete block designs. Each repeat runs every
configuration once, in random order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from timm_parallel.config.compose import load_config
from timm_parallel.keys import SweepConfig
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.sweep.blocks import append_block, check_blocks, freeze_jobs
from timm_parallel.lab.sweep.points import Point, expand
from timm_parallel.launch.resume import compose_run
from timm_parallel.patches import hydra_parser
from timm_parallel.record.jobs import Job, Jobs, read_jobs

ONE_THREAD = "parallel.threads_per_device=1"


def points(*overrides: str) -> list[Point]:
    return expand(hydra_parser().parse_args(["-m", ONE_THREAD, *overrides]))[1]


@pytest.fixture(scope="module")
def five() -> list[Point]:
    """Compose a sweep on two cores with six configurations. Five of them can run, but
    parallel=single cannot use two devices.
    """
    return points("parallel=ddp,dp,single", "parallel.devices=2,1", "seed=7")


def blocks_of(jobs: Jobs) -> list[list[Job]]:
    """Return a list with the jobs of each repeat, in the order in which the jobs run."""
    return [[job for job in jobs.jobs if job.block == number] for number in range(jobs.num_blocks)]


def frozen(folder: Path, points: list[Point], repeats: int = 4) -> Jobs:
    folder.mkdir(exist_ok=True)
    freeze_jobs(folder, points, SweepConfig(repeats=repeats))
    return read_jobs(folder)


@pytest.mark.slow(seconds=1)
def test_sweep_repeat_runs_every_configuration_once_before_the_next_repeat(
    tmp_path: Path, five: list[Point]
) -> None:
    jobs = frozen(tmp_path, five)
    ran = [job for job in jobs.jobs if job.status != "skipped"]
    assert [job.id for job in jobs.jobs] == list(range(len(jobs.jobs)))
    assert [job.block for job in ran] == [*[0] * 5, *[1] * 5, *[2] * 5, *[3] * 5]
    for block in blocks_of(jobs):
        runnable = [tuple(job.overrides) for job in block if job.status != "skipped"]
        assert sorted(runnable) == sorted(
            tuple(point.overrides) for point in five if not point.reason
        )
    assert sum(job.status == "skipped" for job in jobs.jobs) == 1, (
        "the impossible configuration must be skipped once, not in each block"
    )


@pytest.mark.slow(seconds=3)
def test_each_repeat_of_a_sweep_has_a_random_order_that_order_seed_reproduces(
    tmp_path: Path, five: list[Point]
) -> None:
    drawn = [frozen(tmp_path / str(number), five) for number in range(2)]
    orders = [
        [[job.name for job in block if job.status != "skipped"] for block in blocks_of(jobs)]
        for jobs in drawn
    ]
    assert drawn[0].order_seed != drawn[1].order_seed
    assert orders[0] != orders[1]
    assert len({tuple(order) for order in orders[0]}) > 1
    assert (
        json.loads((tmp_path / "0" / "jobs.json").read_text())["order_seed"] == drawn[0].order_seed
    )
    (tmp_path / "again").mkdir()
    again = freeze_jobs(tmp_path / "again", five, SweepConfig(repeats=4), drawn[0].order_seed)
    assert [job.name for job in again.jobs] == [job.name for job in drawn[0].jobs]


@pytest.mark.slow(seconds=3)
def test_added_sweep_repeat_uses_saved_configs_instead_of_the_current_files_in_conf(
    tmp_path: Path, five: list[Point]
) -> None:
    jobs = frozen(tmp_path, five, repeats=1)
    # Edit the saved configs, so that they differ from the current files in conf/.
    for path in tmp_path.glob("configs/*/config.yaml"):
        path.write_text(path.read_text().replace("epochs: 3", "epochs: 9"))
    append_block(jobs)
    assert [
        load_config(write_job_folder(tmp_path, job)).train.epochs for job in blocks_of(jobs)[1]
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


@pytest.mark.slow(seconds=2)
def test_hydra_config_of_second_sweep_repeat_records_the_seed_of_that_repeat(
    tmp_path: Path, five: list[Point]
) -> None:
    jobs = frozen(tmp_path, five, repeats=2)
    later = write_job_folder(tmp_path, blocks_of(jobs)[1][0])
    assert OmegaConf.load(later / ".hydra" / "config.yaml").seed == 8
    assert compose_run(hydra_parser().parse_args([f"resume={later}"])).config.seed == 8


@pytest.mark.parametrize("value", ["many", "0"])
def test_invalid_value_of_sweep_repeats_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^sweep\.repeats={value}: .*$"):
        points(f"sweep.repeats={value}", "parallel=single,ddp")


def test_sweep_over_seed_is_refused_when_sweep_repeats_is_greater_than_1() -> None:
    swept = points("seed=1,2")
    with pytest.raises(ValueError, match=r"sweep\.repeats=3: .*seed"):
        check_blocks(swept, SweepConfig(repeats=3))
    check_blocks(swept, SweepConfig())


def test_sweep_is_refused_when_no_configuration_matches_sweep_baseline() -> None:
    swept = points("optim.lr=0.1,0.2")
    check_blocks(swept, SweepConfig(baseline="optim.lr=2e-1"))
    with pytest.raises(
        ValueError, match=r"^sweep\.baseline=optim\.lr=9: .*optim\.lr=0\.1; optim\.lr=0\.2$"
    ):
        check_blocks(swept, SweepConfig(baseline="optim.lr=9"))
