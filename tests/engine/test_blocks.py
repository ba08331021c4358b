"""A sweep with repeats is a randomized complete block design. Each block runs every configuration in random order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from src.engine.config.compose import compose_command, load_config
from src.engine.keys import SweepConfig
from src.engine.launch.resume import compose_run
from src.engine.record.jobs import Job, Jobs, read_jobs
from src.engine.record.result import Result, write_result
from src.engine.sweep.blocks import check_blocks, freeze_jobs
from src.engine.sweep.points import Point, expand
from src.engine.sweep.sweep import Sweep

SMALL = ("model=tiny", "print_config=false", "parallel.threads_per_device=1")


def points(*overrides: str) -> list[Point]:
    return expand(get_args_parser().parse_args(["-m", *SMALL, *overrides]))[1]


@pytest.fixture(scope="module")
def five() -> list[Point]:
    """Expand a sweep of five configurations that can run on two cores, and single on two devices, which cannot."""
    return points("parallel=ddp,dp,single", "parallel.devices=2,1", "seed=7")


def blocks_of(jobs: Jobs) -> list[list[Job]]:
    """Return the jobs of each block in run order."""
    numbers = sorted({job.block for job in jobs.jobs if job.block is not None})
    return [[job for job in jobs.jobs if job.block == number] for number in numbers]


def frozen(folder: Path, points: list[Point], repeats: int = 4, **settings: Any) -> Jobs:
    folder.mkdir(exist_ok=True)
    freeze_jobs(folder, points, SweepConfig(repeats=repeats, **settings))
    return read_jobs(folder)


def test_sweep_repeat_runs_every_configuration_once_before_the_next_repeat(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    ran = [job for job in jobs.jobs if job.status != "skipped"]
    assert [job.position for job in jobs.jobs] == list(range(len(jobs.jobs))) == [job.id for job in jobs.jobs]
    assert [job.block for job in ran] == [None, *[0] * 5, *[1] * 5, *[2] * 5, *[3] * 5, None]
    for block in blocks_of(jobs):
        runnable = [tuple(job.overrides) for job in block if job.status != "skipped"]
        assert sorted(runnable) == sorted(tuple(point.overrides) for point in five if not point.reason)
    assert sum(job.status == "skipped" for job in jobs.jobs) == 1, (
        "the impossible configuration must be skipped once, not in each block"
    )


def test_sweep_repeats_run_in_random_orders_that_order_seed_reproduces(tmp_path: Path, five: list[Point]) -> None:
    drawn = [frozen(tmp_path / str(number), five) for number in range(2)]
    orders = [[[job.name for job in block if job.status != "skipped"] for block in blocks_of(jobs)] for jobs in drawn]
    assert drawn[0].order_seed != drawn[1].order_seed
    assert orders[0] != orders[1]
    assert len({tuple(order) for order in orders[0]}) > 1
    assert json.loads((tmp_path / "0" / "jobs.json").read_text())["order_seed"] == drawn[0].order_seed
    (tmp_path / "again").mkdir()
    again = freeze_jobs(tmp_path / "again", five, SweepConfig(repeats=4), drawn[0].order_seed)
    assert [job.name for job in again.jobs] == [job.name for job in drawn[0].jobs]


def test_sweep_repeats_keep_command_line_order_when_shuffle_is_false(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five, shuffle=False)
    written = [point.overrides for point in five if not point.reason]
    assert jobs.order_seed is None
    for block in blocks_of(jobs):
        assert [job.overrides for job in block if job.status != "skipped"] == written


def test_sweep_repeat_n_has_the_seed_of_the_first_repeat_plus_n(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    first = {tuple(job.overrides): job for job in blocks_of(jobs)[0]}
    for job in jobs.jobs:
        if job.status == "skipped":
            continue
        twin = first[tuple(job.overrides)]
        text = (tmp_path / job.folder / "config.yaml").read_text()
        first_text = (tmp_path / twin.folder / "config.yaml").read_text()
        assert job.seed == 7 + (job.block or 0)
        renamed = first_text.replace(str(tmp_path / twin.folder), str(tmp_path / job.folder))
        assert text == renamed.replace("\nseed: 7", f"\nseed: {job.seed}")
    assert load_config(tmp_path / jobs.jobs[-2].folder).seed == 10


def test_added_sweep_repeat_copies_saved_job_configs_instead_of_composing_conf_again(
    tmp_path: Path, five: list[Point], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = frozen(tmp_path, five, repeats=1)
    for job in jobs.jobs:  # the saved config differs from conf/
        path = tmp_path / job.folder / "config.yaml"
        if path.exists():
            path.write_text(path.read_text().replace("epochs: 8", "epochs: 9"))
    from src.engine.sweep import blocks

    blocks.append_block(jobs)
    blocks.write_folders(jobs)
    assert [load_config(tmp_path / job.folder).train.epochs for job in blocks_of(jobs)[1]] == [9] * 5


def test_hydra_config_of_second_sweep_repeat_records_the_seed_of_that_repeat(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five, repeats=2)
    later = tmp_path / blocks_of(jobs)[1][0].folder
    assert OmegaConf.load(later / ".hydra" / "config.yaml").seed == 8
    assert compose_run(get_args_parser().parse_args([f"resume={later}"])).config.seed == 8


def test_sweep_baseline_runs_once_before_and_once_after_all_repeats(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    first, last = jobs.jobs[0], jobs.jobs[-1]
    assert [first.block, last.block] == [None, None]
    assert [first.folder, last.folder] == ["baseline_first", "baseline_last"]
    assert load_config(tmp_path / first.folder) == load_config(tmp_path / last.folder)
    assert load_config(tmp_path / first.folder).parallel.strategy == "single"
    assert json.loads((tmp_path / "jobs.json").read_text())["baseline_repeated"] == [first.id, last.id]


SPEEDS = {"single": 100.0, "dp": 120.0, "ddp": 180.0}


def run_all(jobs: Jobs, noise: float, failing: str = "", noisy: str = "", on: str = "") -> list[int | None]:
    """Run a sweep without processes, record a speed with relative `noise` per job, and return the blocks in run order.

    `noisy`: a strategy with a relative noise of 0.5; `on`: the recorded accelerator.
    """
    ran, draw, sweep = [], random.Random(1), Sweep(jobs)
    while job := next(iter(sweep.waiting()), None):
        config = load_config(jobs.folder / job.folder)
        kind, devices = config.parallel.strategy, int(config.parallel.devices)
        job.status = "failed" if kind == failing else "done"
        reach = 0.5 if kind == noisy else noise
        speed = SPEEDS[kind] * (1 + (config.seed % 3) / 2) * (1 + draw.uniform(-reach, reach))
        speeds = {"images_per_sec": speed}
        result = Result(job.status, strategy=kind, devices=devices, accelerator=on, throughput=speeds)
        write_result(jobs.folder / job.folder, result)
        jobs.write()
        ran.append(job.block)
    return ran


@pytest.mark.parametrize(("noise", "blocks"), [(0.001, 3), pytest.param(0.1, 6, marks=pytest.mark.slow)])
def test_sweep_repeats_auto_adds_repeats_until_intervals_are_narrow_or_max_repeats(
    tmp_path: Path, five: list[Point], noise: float, blocks: int
) -> None:
    """Blocks differ by half their speed. This does not add blocks, because the analysis removes block effects."""
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=6)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    ran = run_all(jobs, noise)
    assert ran == [None, *(block for block in range(blocks) for _ in range(5)), None]
    seeds = {job.seed for job in jobs.jobs if job.block == blocks - 1}
    assert seeds == {7 + blocks - 1}


@pytest.mark.parametrize(("on", "blocks"), [("cpu", 3), pytest.param("cuda", 4, marks=pytest.mark.slow)])
def test_sweep_repeats_auto_adds_repeats_for_noisy_dp_on_cuda_but_not_on_cpu(
    tmp_path: Path, five: list[Point], on: str, blocks: int
) -> None:
    """dp on CPU is not compared, so its noise does not add blocks. The noise of dp on CUDA does."""
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=4)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    assert max(block or 0 for block in run_all(jobs, 0.001, noisy="dp", on=on)) == blocks - 1


@pytest.mark.slow
def test_sweep_repeats_auto_adds_no_repeats_of_failed_configurations(tmp_path: Path, five: list[Point]) -> None:
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=4)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    run_all(jobs, 0.1, failing="dp")
    assert [sum("parallel=dp" in job.overrides for job in block) for block in blocks_of(jobs)] == [2, 2, 2, 0]


@pytest.mark.parametrize("word", ["sweep.repeats=often", "sweep.repeats=0", "sweep.precision=0", "sweep.max_repeats=1"])
def test_invalid_sweep_repeats_precision_or_max_repeats_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        points(word, "parallel=single,ddp")


def test_sweep_over_seed_is_refused_when_sweep_repeats_is_greater_than_1() -> None:
    swept = points("seed=1,2")
    with pytest.raises(ValueError, match=r"sweep\.repeats=3: .*seed"):
        check_blocks(swept, SweepConfig(repeats=3))
    check_blocks(swept, SweepConfig())


def test_sweep_is_refused_when_no_configuration_matches_sweep_baseline() -> None:
    swept = points("optim.lr=0.1,0.2")
    check_blocks(swept, SweepConfig(baseline="optim.lr=2e-1"))
    with pytest.raises(ValueError, match=r"^sweep\.baseline=optim\.lr=9: .*optim\.lr=0\.1; optim\.lr=0\.2$"):
        check_blocks(swept, SweepConfig(baseline="optim.lr=9"))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [0, 8])
def test_benchmark_experiments_have_enough_epochs_for_their_max_steps(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weak scaling on eight devices has four steps per epoch."""
    from src.engine.machine import hardware

    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: tuple(range(devices)))
    for name in ("compare", "scaling_strong", "scaling_weak", "buckets", "small_layers"):
        words = ["-m", f"experiment={name}", "parallel.devices=1"]
        config = compose_command(get_args_parser().parse_args(words)).config
        train = config.train
        assert train.max_steps == (600 if devices else 40)
        assert train.epochs * (1257 // 256) >= train.max_steps
        assert int(config.sweep.repeats) >= 3
