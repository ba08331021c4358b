"""Several nodes are one run: who is who, what each of them has, and tensors that reach all of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import in_ranks, resolved

from src.engine.config.compose import freeze
from src.engine.launch import node, torchrun
from src.engine.launch.nodes import Facts, fit_to_nodes
from src.engine.launch.rendezvous import listen_towards
from src.engine.machine.ranks import Place, Ranks, ranks_from_environment, tasks_per_node
from src.parallel.packing import as_bytes, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import Store

SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def test_a_task_of_srun_knows_its_place() -> None:
    assert ranks_from_environment(SRUN) == Ranks(4, 5, 1, 2, 0, node=1, nodes=2)


def test_what_an_agent_says_counts_before_what_srun_says() -> None:
    """One task per node, each of which starts ranks of its own."""
    place = Ranks(3, 4, 1, 2, 0, node=1, nodes=2)
    assert ranks_from_environment(SRUN | TORCHRUN) == place
    assert ranks_from_environment(SRUN | TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}) == place


@pytest.mark.parametrize("one", [{}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "4"}])
def test_one_task_is_an_ordinary_run(one: dict[str, str]) -> None:
    assert ranks_from_environment(one) is None


@pytest.mark.parametrize("missing", sorted(set(SRUN) - {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}))
def test_half_of_what_srun_says_is_refused_by_name(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        ranks_from_environment({key: value for key, value in SRUN.items() if key != missing})


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("", []), ("two", [])])
def test_slurm_s_way_to_count_tasks(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def facts(*nodes: tuple[int, int, int]) -> list[Facts]:
    """(ranks, cores, CUDA devices) of each node, one process each."""
    return [
        Facts(node, f"host{node}", ranks, list(range(cores)), [f"gpu{node}{index}" for index in range(devices)])
        for node, (ranks, cores, devices) in enumerate(nodes)
    ]


def test_threads_follow_the_node_with_the_fewest_cores() -> None:
    config = resolved("parallel=ddp", "parallel.devices=2")
    asked = resolved("parallel=ddp", "parallel.devices=2").parallel
    asked.threads_per_device = "auto"
    fit_to_nodes(config, asked, facts((1, 16, 0), (1, 4, 0)))
    assert (config.parallel.threads_per_device, config.cluster.nodes) == (4, 2)
    asked.threads_per_device = 3
    config.parallel.threads_per_device = 3
    fit_to_nodes(config, asked, facts((1, 16, 0), (1, 4, 0)))
    assert config.parallel.threads_per_device == 3


def test_tasks_of_srun_that_have_a_core_and_a_device_each_are_counted_together() -> None:
    config = resolved("parallel=ddp", "parallel.devices=2")
    asked = resolved("parallel=ddp", "parallel.devices=2").parallel
    asked.threads_per_device, config.parallel.accelerator, config.parallel.backend = "auto", "cuda", "nccl"
    tasks = [Facts(0, "host", 2, [0, 1, 2], ["gpu0"]), Facts(0, "host", 2, [3, 4, 5], ["gpu1"])]
    fit_to_nodes(config, asked, tasks)
    assert config.parallel.threads_per_device == 3
    with pytest.raises(ValueError, match="2 ranks on host, which has 1 CUDA"):
        fit_to_nodes(config, asked, [tasks[0], tasks[0]])


def test_a_node_without_the_devices_is_named() -> None:
    config = resolved("parallel=ddp", "parallel.devices=2")
    asked = resolved("parallel=ddp", "parallel.devices=2").parallel
    asked.accelerator = "auto"
    with pytest.raises(ValueError, match="host1 has CUDA devices, host0 has none"):
        fit_to_nodes(config, asked, facts((1, 4, 0), (1, 4, 1)))
    config.parallel.accelerator, config.parallel.backend = "cuda", "nccl"
    with pytest.raises(ValueError, match="1 ranks on host1, which has 0"):
        fit_to_nodes(config, asked, facts((1, 4, 1), (1, 4, 0)))


def test_loopback_leads_to_another_node_only_where_its_address_says_so() -> None:
    """As 127.0.0.1 of two nodes that are one machine; a node's own name often leads there, and no name at all does."""
    assert set(listen_towards("127.0.0.1").values()) == {"lo"}
    assert listen_towards("localhost") == listen_towards("") == {}


def test_a_restart_goes_on_in_the_folder_of_its_own_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may have had the same --rdzv-id; and the first attempt may have failed before it had a folder."""
    from torch.distributed import HashStore, PrefixStore

    first, second = Ranks(0, 2, 0, 2), Ranks(0, 2, 0, 2, restart_count=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "101")
    monkeypatch.setattr(torchrun, "_run_and_say", lambda *given: 0)
    for job in ("one", "other"):
        agent = HashStore()
        monkeypatch.setattr(
            torchrun, "open_store", lambda ranks, agent=agent: PrefixStore(str(ranks.restart_count), agent)
        )
        assert torchrun.remembered_folder(second) is None
        torchrun.lead(lambda *given: None, resolved("parallel=ddp", "parallel.devices=2"), tmp_path / job, first)
        assert torchrun.remembered_folder(second) == (tmp_path / job).resolve()
        assert torchrun.remembered_folder(first) is None


STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "empty": torch.empty(0, 3), "half": torch.ones(3).bfloat16()},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0]}]},
    "scaler": None,
    "progress": {"step": 3, "best": float("-inf")},
    "flags": torch.tensor([True, False]),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def test_a_state_is_put_together_as_it_was() -> None:
    tensors: list[torch.Tensor] = []
    shape = pack(STATE, tensors)
    sent = iter(tensors)

    def receive(dtype: torch.dtype, size: list[int]) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        as_bytes(tensor).copy_(as_bytes(next(sent).contiguous()))
        return tensor

    assert same(STATE, unpack(shape, receive))


def _share(ranks: Ranks, store: Store) -> bool:
    from src.parallel import build_strategy

    strategy = build_strategy(resolved("parallel=ddp", "parallel.devices=2").parallel, ranks, store)
    got = strategy.share_state(STATE if ranks.rank == 0 else None)
    strategy.close()
    return same(STATE, got)


@pytest.mark.processes
def test_rank_0_s_state_reaches_the_other_ranks() -> None:
    assert in_ranks(_share, 2) == [True, True]


def _train(ranks: Ranks, store: Store, folder: str, words: tuple[str, ...]) -> tuple[dict[str, Any], list[int]]:
    from pathlib import Path

    from src.engine.record.result import read_result
    from src.run.lifecycle import Training

    config = resolved("parallel=ddp", "parallel.devices=2", "train.evaluate_every=0", "data.limit_train=64", *words)
    run = Training(config, Path(folder), ranks, store)
    if ranks.rank == 1:
        run.saved_at -= 1e6  # its clock says that it is high time; rank 0's decides
    saved: list[int] = []
    ordinary = run.save

    def save(is_best: bool) -> None:
        saved.append(run.progress.step)
        ordinary(is_best)

    run.save = save  # type: ignore[method-assign]
    run.train()
    result = read_result(Path(folder))
    return {**result.communication, "parameters": result.parameters}, saved


@pytest.mark.processes
@pytest.mark.sample(3)
@pytest.mark.parametrize(("hook", "bytes_per_value"), [("bf16", 2), ("fp16", 2), ("null", 4)])
def test_a_hook_sends_half_the_bytes_and_says_so(tmp_path: Any, hook: str, bytes_per_value: int) -> None:
    found, _ = in_ranks(_train, 2, str(tmp_path), ("train.epochs=1", f"parallel.comm_hook={hook}"))
    assert found[0]["bytes_per_step"] == bytes_per_value * found[0]["parameters"]


@pytest.mark.processes
@pytest.mark.sample(2)
@pytest.mark.parametrize(("minutes", "steps"), [("1e-9", [1, 2, 3, 4]), ("1000", [4])])
def test_rank_0_s_clock_decides_when_minutes_are_over(tmp_path: Any, minutes: str, steps: list[int]) -> None:
    words = ("train.epochs=1", "train.log_every=1", "data.batch_size=16", f"checkpoint.every_minutes={minutes}")
    (_, first), (_, second) = in_ranks(_train, 2, str(tmp_path), words)
    assert first == second == steps


@pytest.mark.parametrize(("is_seen", "seconds"), [(True, 1234), (False, 300)])
def test_a_node_waits_for_the_first_one_as_long_as_the_job_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool, seconds: int
) -> None:
    """Where it sees the job's config; its own disk may have none yet."""
    if is_seen:
        freeze(resolved("parallel=ddp", "parallel.devices=2", "parallel.start_timeout=1234"), tmp_path)
    waited: list[float] = []

    def find_nobody(place: Place, timeout: float) -> None:
        waited.append(timeout)
        raise ValueError("no node 0")

    monkeypatch.setattr(node, "find_place", lambda: Place(1, 2, "nodea", 29500))
    monkeypatch.setattr(node, "Rendezvous", find_nobody)
    assert node.main(tmp_path / "run", tmp_path) == 2
    assert waited == [seconds]


@pytest.mark.parametrize(
    ("words", "variable", "is_refused"),
    [
        ("torchrun --nnodes=1:2 train.py", None, True),
        ("torchrun --nnodes 1:2 --nproc-per-node 1 train.py", None, True),
        ("python -m torch.distributed.run -nnodes 2 train.py", None, False),
        ("torchrun --nnodes=2:2 train.py", None, False),
        ("torchrun train.py", "1:4", True),
        ("torchrun --nnodes=2 train.py", "1:4", False),
        ("torchrun train.py", None, False),
    ],
)
def test_a_changing_number_of_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, variable: str | None, is_refused: bool
) -> None:
    """torchrun would start the ranks again whenever a node comes or goes, and count no restart."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(torchrun.psutil, "Process", lambda pid: SimpleNamespace(cmdline=words.split))
    monkeypatch.delenv("PET_NNODES", raising=False)
    if variable is not None:
        monkeypatch.setenv("PET_NNODES", variable)
    with pytest.raises(ValueError, match=r"--nnodes=1:.: a run has one number") if is_refused else nullcontext():
        torchrun._refuse_elastic_nodes()


@pytest.mark.parametrize(
    ("signals", "job", "is_told"),
    [("SIGTERM,SIGINT", "7", True), ("SIGTERM,SIGUSR1", "7", False), ("SIGTERM", None, False), (None, "7", False)],
)
def test_torchrun_that_would_die_of_slurms_warning_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: str | None,
    job: str | None,
    is_told: bool,
) -> None:
    for name, value in (("TORCHELASTIC_SIGNALS_TO_HANDLE", signals), ("SLURM_JOB_ID", job)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    torchrun._advise_on_signals()
    assert ("--signals-to-handle SIGTERM,SIGINT,SIGUSR1" in capsys.readouterr().err) == is_told
