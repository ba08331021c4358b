"""Tests of train.accumulate=auto. If a rank runs out of memory, all ranks start again. They halve
the batch and accumulate the gradients of twice as many batches.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.template.runs import FAULTY, fault_environment, resolved, run_warm, tiny
from timm_parallel import checked_configs
from timm_parallel.checked_configs import check_task, evaluation_config
from timm_parallel.config.compose import (
    compose_command,
    load_config,
    save_config,
    save_hydra_files,
)
from timm_parallel.config.resolve import halve_batches, resolve
from timm_parallel.faults.failure import RankExits
from timm_parallel.keys import ResolvedConfig
from timm_parallel.lab.jobs.folders import config_folder, write_job_folder
from timm_parallel.lab.report.collect import collect
from timm_parallel.launch import job
from timm_parallel.launch.resume import (
    check_resumable,
    compose_run,
    folder_to_resume,
    keep_chosen,
)
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import Job, read_result
from timm_parallel.testing.commands import Train
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import warm_ranks

DDP = ("parallel=ddp", "parallel.devices=2", "train.epochs=1")
NO_MEMORY = "no_memory:1:2:the forward pass"


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with train.accumulate=auto on two ranks, and return the run folder. In the first
    attempt, rank 1 runs out of memory in step 2.
    """
    base = tmp_path_factory.mktemp("halved")
    folder, attempts = base / "run", []

    def run_ranks(config: ResolvedConfig, folder: Path, start_rank: object = None) -> RankExits:
        attempts.append(config.train.accumulate)
        if len(attempts) > 1:
            return warm_ranks(config, folder)
        environment, first = (
            fault_environment(NO_MEMORY, base / "mark"),
            FAULTY / "sitecustomize.py",
        )
        return warm_ranks(config, folder, environment, first)

    command = compose_command(parse(*tiny(*DDP, "train.accumulate=auto", "train.log_every=1")))
    check_task(command.config)
    folder.mkdir()
    save_hydra_files(command.tree, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "run_ranks", run_ranks)
        assert job.run_job(resolve(command.config), folder) == 0
    assert attempts == [1, 2]
    return folder


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
def test_accumulate_auto_trains_like_train_accumulate_by_hand_and_is_reported_as_asked_for(
    halved: Path, tmp_path: Path
) -> None:
    by_hand = run_warm(tmp_path / "run", *DDP, "data.batch_size=16", "train.accumulate=2")
    found, expected = read_result(halved), read_result(by_hand)
    assert (found.status, found.accumulate, found.batch_size) == ("done", 2, 16)
    assert (found.steps, found.samples_seen) == (6, 192)
    assert found.parameters_hash == expected.parameters_hash
    assert found.parameters_hash is not None
    (record,) = collect([halved])
    assert record.config["train.accumulate"] == 1
    assert record.config["data.batch_size"] == record.integer("batch_size") == 32


@pytest.mark.processes
def test_resumed_run_keeps_the_number_of_batches_that_accumulate_auto_found(halved: Path) -> None:
    for again in ((), ("train.accumulate=auto", "data.batch_size=32")):
        command = compose_run(parse(f"resume={halved}", "train.epochs=2", *again))
        config = resolve(command.config)
        folder = folder_to_resume(config, command.config)
        assert folder == halved
        config = keep_chosen(config, load_config(halved), command.config.train.accumulate == "auto")
        assert (config.train.accumulate, config.data.batch_size) == (2, 16)
        check_resumable(config, halved)


def test_resumed_sweep_job_keeps_the_number_of_batches_that_accumulate_auto_found(
    tmp_path: Path,
) -> None:
    job = Job(0, "auto", "0", [], configuration=0, seed=42)
    source = config_folder(tmp_path, job)
    command = compose_command(parse(*tiny(*DDP, "train.accumulate=auto")))
    save_hydra_files(command.tree, source)
    save_config(resolve(command.config), source)
    folder = write_job_folder(tmp_path, job)
    half = halve_batches(load_config(folder))
    assert half is not None
    save_config(half, folder)
    # A job without a checkpoint forgets the halved batch and starts again with the whole batch.
    assert load_config(write_job_folder(tmp_path, job)).train.accumulate == 1
    save_config(half, folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.pt").touch()
    assert load_config(write_job_folder(tmp_path, job)).train.accumulate == 2


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (("data.batch_size=32",), [(16, 2), (8, 4), (4, 8), (2, 16)]),
        (("data.batch_size=null", "data.batch_size_per_device=4"), [(4, 2), (2, 4)]),
        (("data.batch_size=16", "data.augment.mixup=0.8"), [(8, 2), (4, 4)]),
    ],
)
def test_accumulate_auto_halves_batches_until_a_rank_has_one_image(
    overrides: tuple[str, ...], sizes: list[tuple[int, int]]
) -> None:
    half = halve_batches(resolved(*DDP, *overrides))
    found = []
    while half is not None:
        found.append((half.global_batch, half.train.accumulate))
        half = halve_batches(half)
    assert found == sizes


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.slow
def test_accumulate_auto_error_names_keys_to_change_when_one_image_exceeds_the_memory(
    train: Train,
) -> None:
    done = train(
        *DDP,
        "train.accumulate=auto",
        "data.batch_size=8",
        environment=fault_environment(NO_MEMORY, train.base / "mark"),
    )
    assert done.returncode == 1, done.output
    assert (done.result["status"], done.result["accumulate"]) == ("out_of_memory", 4)
    assert "model.grad_checkpointing=true" in done.result["reason"]
    assert "data.batch_size=" not in done.result["reason"]
    assert load_config(done.folder).data.batch_size == 2
    assert len((train.base / "mark").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (("parallel=ddp",), 2),
        (("cluster=slurm", "cluster.nodes=2", "cluster.gpus=1"), None),
    ],
)
def test_accumulate_auto_is_refused_if_ranks_cannot_start_again_and_ignored_in_evaluation(
    tmp_path: Path,
    overrides: tuple[str, ...],
    world_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose_command(parse(*tiny(*overrides, "train.accumulate=auto"))).config
    with pytest.raises(ValueError, match=r"train\.accumulate=1"):
        resolve(config, world_size)
    words = ["experiment=finetune", f"data.root={tmp_path}", "parallel=ddp"]
    monkeypatch.setattr(
        checked_configs, "ranks_from_environment", lambda environment: Ranks(0, 2, 0, 2)
    )
    evaluation = evaluation_config(None, words)
    assert (evaluation.train.accumulate, evaluation.parallel.devices) == (1, 2)
