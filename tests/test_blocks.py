"""A sweep with repeats is a design of randomised complete blocks, drawn anew and written down."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from src.engine.config.compose import compose_command, read_frozen
from src.engine.launch.resume import with_saved_overrides
from src.engine.record.jobs import Job, Jobs, read_jobs
from src.engine.record.result import Result, write_result
from src.engine.sweep.blocks import check_blocks, freeze_jobs
from src.engine.sweep.points import Point, expand
from src.engine.sweep.sweep import Sweep
from src.schema import SweepConfig

SMALL = ("model=tiny", "print_config=false", "parallel.threads_per_device=1")


def points(*overrides: str) -> list[Point]:
    return expand(get_args_parser().parse_args(["-m", *SMALL, *overrides]))[1]


@pytest.fixture(scope="module")
def five() -> list[Point]:
    """Five points that run on two cores, and one that cannot: single on two devices."""
    return points("parallel=ddp,dp,single", "parallel.devices=2,1", "seed=7")


def blocks_of(jobs: Jobs) -> list[list[Job]]:
    """Jobs block by block, in run order."""
    numbers = sorted({job.block for job in jobs.jobs if job.block is not None})
    return [[job for job in jobs.jobs if job.block == number] for number in numbers]


def frozen(folder: Path, points: list[Point], repeats: int = 4, **settings: Any) -> Jobs:
    folder.mkdir(exist_ok=True)
    freeze_jobs(folder, points, SweepConfig(repeats=repeats, **settings))
    return read_jobs(folder)


def test_each_block_runs_every_point_once_and_blocks_follow_one_another(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    ran = [job for job in jobs.jobs if job.status != "skipped"]
    assert [job.position for job in jobs.jobs] == list(range(len(jobs.jobs))) == [job.id for job in jobs.jobs]
    assert [job.block for job in ran] == [None, *[0] * 5, *[1] * 5, *[2] * 5, *[3] * 5, None]
    for block in blocks_of(jobs):
        runnable = [tuple(job.overrides) for job in block if job.status != "skipped"]
        assert sorted(runnable) == sorted(tuple(point.overrides) for point in five if not point.reason)
    assert sum(job.status == "skipped" for job in jobs.jobs) == 1, "said once, not once a block"


def test_orders_differ_between_blocks_and_between_sweeps_and_follow_from_what_is_recorded(
    tmp_path: Path, five: list[Point]
) -> None:
    drawn = [frozen(tmp_path / str(number), five) for number in range(2)]
    orders = [[[job.name for job in block if job.status != "skipped"] for block in blocks_of(jobs)] for jobs in drawn]
    assert drawn[0].order_seed != drawn[1].order_seed
    assert orders[0] != orders[1]
    assert len({tuple(order) for order in orders[0]}) > 1
    assert json.loads((tmp_path / "0" / "jobs.json").read_text())["order_seed"] == drawn[0].order_seed
    (tmp_path / "again").mkdir()
    again = freeze_jobs(tmp_path / "again", five, SweepConfig(repeats=4), drawn[0].order_seed)
    assert [job.name for job in again.jobs] == [job.name for job in drawn[0].jobs]


def test_without_shuffle_every_block_has_the_written_order(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five, shuffle=False)
    written = [point.overrides for point in five if not point.reason]
    assert jobs.order_seed is None
    for block in blocks_of(jobs):
        assert [job.overrides for job in block if job.status != "skipped"] == written


def test_block_b_has_the_seed_plus_b_and_is_else_the_first_blocks_copy(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    first = {tuple(job.overrides): job for job in blocks_of(jobs)[0]}
    for job in jobs.jobs:
        if job.status == "skipped":
            continue
        twin = first[tuple(job.overrides)]
        own, its = ((tmp_path / it.folder / "config.yaml").read_text() for it in (job, twin))
        assert job.seed == 7 + (job.block or 0)
        assert own == its.replace(str(tmp_path / twin.folder), str(tmp_path / job.folder)).replace(
            "\nseed: 7", f"\nseed: {job.seed}"
        )
    assert read_frozen(tmp_path / jobs.jobs[-2].folder).seed == 10


def test_a_later_block_reads_no_yaml_of_the_project(
    tmp_path: Path, five: list[Point], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = frozen(tmp_path, five, repeats=1)
    for job in jobs.jobs:  # as if conf/ had changed since: what is frozen says 9
        path = tmp_path / job.folder / "config.yaml"
        if path.exists():
            path.write_text(path.read_text().replace("epochs: 8", "epochs: 9"))
    from src.engine.sweep import blocks

    blocks.append_block(jobs)
    assert [read_frozen(tmp_path / job.folder).train.epochs for job in blocks_of(jobs)[1]] == [9] * 5


def test_hydras_own_files_of_a_later_block_tell_its_seed_too(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five, repeats=2)
    later = tmp_path / blocks_of(jobs)[1][0].folder
    assert OmegaConf.load(later / ".hydra" / "config.yaml").seed == 8
    resumed = with_saved_overrides(get_args_parser().parse_args([f"resume={later}"]))
    assert [word for word in resumed.overrides if word.startswith("seed=")][-1] == "seed=8"


def test_the_baseline_runs_first_and_last_and_belongs_to_no_block(tmp_path: Path, five: list[Point]) -> None:
    jobs = frozen(tmp_path, five)
    first, last = jobs.jobs[0], jobs.jobs[-1]
    assert [first.block, last.block] == [None, None]
    assert [first.folder, last.folder] == ["baseline_first", "baseline_last"]
    assert read_frozen(tmp_path / first.folder) == read_frozen(tmp_path / last.folder)
    assert read_frozen(tmp_path / first.folder).parallel.strategy == "single"
    assert json.loads((tmp_path / "jobs.json").read_text())["baseline_repeated"] == [first.id, last.id]


SPEEDS = {"single": 100.0, "dp": 120.0, "ddp": 180.0}


def run_all(jobs: Jobs, noise: float, failing: str = "", noisy: str = "", on: str = "") -> list[int | None]:
    """Run a sweep without its processes: each job leaves a speed that is off by up to `noise`. The blocks, in run order.

    `noisy`: a strategy whose speeds are off by up to a half; `on`: the accelerator that is recorded.
    """
    ran, draw, sweep = [], random.Random(1), Sweep(jobs)
    while job := next(iter(sweep.waiting()), None):
        config = read_frozen(jobs.folder / job.folder)
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
def test_auto_repeats_until_the_intervals_are_narrow_enough_or_there_are_enough_blocks(
    tmp_path: Path, five: list[Point], noise: float, blocks: int
) -> None:
    """Blocks differ by half their speed: taken out, that costs no block."""
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=6)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    ran = run_all(jobs, noise)
    assert ran == [None, *(block for block in range(blocks) for _ in range(5)), None]
    seeds = {job.seed for job in jobs.jobs if job.block == blocks - 1}
    assert seeds == {7 + blocks - 1}


@pytest.mark.parametrize(("on", "blocks"), [("cpu", 3), pytest.param("cuda", 4, marks=pytest.mark.slow)])
def test_auto_goes_on_only_for_ratios_that_the_report_states(
    tmp_path: Path, five: list[Point], on: str, blocks: int
) -> None:
    """dp over CPU threads is compared with nothing, so its noise costs no block; on CUDA it does."""
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=4)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    assert max(block or 0 for block in run_all(jobs, 0.001, noisy="dp", on=on)) == blocks - 1


@pytest.mark.slow
def test_auto_repeats_no_point_that_failed_in_the_first_block(tmp_path: Path, five: list[Point]) -> None:
    for point in five:
        point.config.sweep = SweepConfig(repeats="auto", max_repeats=4)
    jobs = freeze_jobs(tmp_path, five, five[0].config.sweep, order_seed=1)
    run_all(jobs, 0.1, failing="dp")
    assert [sum("parallel=dp" in job.overrides for job in block) for block in blocks_of(jobs)] == [2, 2, 2, 0]


@pytest.mark.parametrize("word", ["sweep.repeats=often", "sweep.repeats=0", "sweep.precision=0", "sweep.max_repeats=1"])
def test_a_design_that_cannot_be_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        points(word, "parallel=single,ddp")


def test_a_swept_seed_is_refused_where_blocks_have_seeds_of_their_own() -> None:
    swept = points("seed=1,2")
    with pytest.raises(ValueError, match=r"sweep\.repeats=3: .*seed is swept"):
        check_blocks(swept, SweepConfig(repeats=3))
    check_blocks(swept, SweepConfig())
    with pytest.raises(ValueError, match="seed="):
        check_blocks(points("seed=9223372036854775807"), SweepConfig(repeats=2))


def test_jobs_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    job = {"id": 0, "name": "x", "folder": "0", "overrides": [], "repeat": 2, "status": "done"}
    head = {"format": 1, "command": "train.py -m", "created": "2026-01-01T00:00:00", "status": "done"}
    (tmp_path / "jobs.json").write_text(json.dumps({**head, "jobs": [job]}))
    assert read_jobs(tmp_path).jobs[0].block == 2


@pytest.mark.slow
@pytest.mark.parametrize("devices", [0, 8])
def test_the_benchmarks_are_long_enough_whatever_the_batch(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak scaling on eight devices has four steps an epoch."""
    from src.engine.machine import hardware

    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: tuple(range(devices)))
    for name in ("compare", "scaling_strong", "scaling_weak", "buckets", "small_layers"):
        words = ["-m", f"experiment={name}", "parallel.devices=1"]
        config = compose_command(get_args_parser().parse_args(words)).config
        train = config.train
        assert train.max_steps == (600 if devices else 40)
        assert train.epochs * (1257 // 256) >= train.max_steps
        assert int(config.sweep.repeats) >= 3
