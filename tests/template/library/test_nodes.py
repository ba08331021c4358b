"""Ranks of several nodes and launchers: rank variables, comparison of the nodes, and errors."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from src.app import app
from tests.template.runs import parts_of, resolved, run_warm, train_run
from timm_parallel.config.compose import save_config
from timm_parallel.entry import run_command
from timm_parallel.faults.failure import (
    failure_of_exit_code,
    publish_failure,
    published_failures,
    record_of,
)
from timm_parallel.launch import job, node, rendezvous, torchrun
from timm_parallel.launch.job import RankExits
from timm_parallel.launch.rendezvous import (
    NodeInventory,
    collect_inventories,
    fit_to_nodes,
    listen_towards,
    publish_inventory,
)
from timm_parallel.machine.files import lock_folder
from timm_parallel.machine.imports import slow_imports
from timm_parallel.machine.ranks import (
    NEEDED,
    NodeAddress,
    Ranks,
    host_name,
    ranks_from_environment,
)
from timm_parallel.machine.signals import signal_handlers, stop_handler
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.run.run import Training
from timm_parallel.testing.commands import Finished, Refuse, Train
from timm_parallel.testing.configs import without_times
from timm_parallel.testing.ranks import in_ranks

SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
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


TWO = ("parallel=ddp", "parallel.devices=2")
OF_SRUN = Ranks(4, 7, 1, 3, 0, node=1, nodes=3)
OF_TORCHRUN = Ranks(3, 4, 1, 2, 0, node=1, nodes=2)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (SRUN, OF_SRUN),
        # Here srun starts an agent of torchrun per node, and each agent starts the ranks.
        ({**SRUN, **TORCHRUN}, OF_TORCHRUN),
        ({**SRUN, **TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, OF_TORCHRUN),
        # A wrapper script under mpirun sets the variables of torchrun for each process.
        ({**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "4"}, OF_TORCHRUN),
        # With --mpi=pmi2, srun sets the variables of MPI in addition to its own.
        ({**SRUN, "PMI_SIZE": "7", "PMI_RANK": "4"}, OF_SRUN),
    ],
)
def test_ranks_are_those_of_torchrun_or_else_of_several_tasks_of_srun(
    environment: dict[str, str], ranks: Ranks | None
) -> None:
    assert ranks_from_environment(environment) == ranks


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"},
            r"^PMI_SIZE=4: .*python train\.py.* torchrun or srun",
        ),
        # In a Slurm allocation, mpirun itself starts one process per node with srun. So the
        # variables of srun are set too.
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "8"}, "^OMPI_COMM_WORLD_SIZE=8: .* torchrun or srun"),
        *(
            ({key: value for key, value in SRUN.items() if key != missing}, missing)
            for missing in SRUN
            if missing not in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
        ),
    ],
)
def test_ranks_of_mpirun_or_without_a_variable_of_slurm_are_refused(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ranks_from_environment(environment)


def facts(*nodes: tuple[int, int, int]) -> list[NodeInventory]:
    return [
        NodeInventory(
            node,
            f"host{node}",
            ranks,
            list(range(cores)),
            [f"gpu{node}{index}" for index in range(devices)],
        )
        for node, (ranks, cores, devices) in enumerate(nodes)
    ]


def test_threads_fit_the_node_with_fewest_cores_and_each_node_needs_cuda_if_one_has_it() -> None:
    config = resolved(*TWO)
    asked = resolved(*TWO).parallel
    for threads, expected in (("auto", 4), (3, 3)):
        asked.threads_per_device = threads  # type: ignore[assignment]
        config.parallel.threads_per_device = 3
        fit_to_nodes(config, asked, facts((1, 16, 0), (1, 4, 0)))
        assert (config.parallel.threads_per_device, config.cluster.nodes) == (expected, 2)
    asked.accelerator = "auto"
    with pytest.raises(ValueError, match="host1 has CUDA devices, host0 has none"):
        fit_to_nodes(config, asked, facts((1, 4, 0), (1, 4, 1)))
    config.parallel.accelerator, config.parallel.backend = "cuda", "nccl"
    with pytest.raises(ValueError, match="1 ranks on host1, which has 0"):
        fit_to_nodes(config, asked, facts((1, 4, 1), (1, 4, 0)))


def test_srun_tasks_share_the_cores_of_their_node_and_need_one_gpu_per_rank() -> None:
    config = resolved(*TWO)
    asked = resolved(*TWO).parallel
    asked.threads_per_device, config.parallel.accelerator, config.parallel.backend = (
        "auto",  # type: ignore[assignment]
        "cuda",
        "nccl",
    )
    tasks = [
        NodeInventory(0, "host", 2, [0, 1, 2], ["gpu0"]),
        NodeInventory(0, "host", 2, [3, 4, 5], ["gpu1"]),
    ]
    fit_to_nodes(config, asked, tasks)
    assert config.parallel.threads_per_device == 3
    with pytest.raises(ValueError, match="2 ranks on host, which has 1 CUDA"):
        fit_to_nodes(config, asked, [tasks[0], tasks[0]])


def test_rendezvous_at_127_0_0_1_listens_only_on_the_loopback_interface() -> None:
    """The address 127.0.0.1 is used for nodes that are simulated on one machine. A host name or
    an empty name may resolve to this address, but must not restrict the rendezvous.
    """
    assert set(listen_towards("127.0.0.1").values()) == {"lo"}
    assert listen_towards("localhost") == listen_towards("") == {}


def test_ranks_that_torchrun_restarts_reuse_only_the_run_folder_of_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two torchrun jobs may have the same --rdzv-id. The first attempt of a job may also have
    failed before it created a run folder.
    """
    first, second = Ranks(0, 2, 0, 2), Ranks(0, 2, 0, 2, restart_count=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "101")
    monkeypatch.setattr(torchrun, "_run_and_report", lambda *given: 0)
    for name in ("first", "second"):
        agent = HashStore()
        monkeypatch.setattr(
            torchrun,
            "open_store",
            lambda ranks, agent=agent: PrefixStore(str(ranks.restart_count), agent),
        )
        assert torchrun.remembered_folder(second) is None
        torchrun.run_rank_zero(resolved(*TWO), tmp_path / name, first)
        assert torchrun.remembered_folder(second) == (tmp_path / name).resolve()
        assert torchrun.remembered_folder(first) is None


# Use the version of the installed package, because torch.__version__ also contains the build, such
# as +cpu.
TORCH = version("torch")
ARGUMENTS = ["model=tiny", "train.epochs=4", "hub.token=abcdefgh"]


def test_error_names_the_hosts_whose_overrides_library_versions_or_code_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    for node_ in range(3):
        monkeypatch.setattr(rendezvous, "host_name", lambda node_=node_: f"host{node_}")
        publish_inventory(store, node_, node_, 1, ARGUMENTS)
    third = collect_inventories(store, 3, 5)[2]
    for key, here in (("train.epochs", "4"), ("torch", TORCH), ("src/schema.py", "")):
        changed = replace(third, software={**third.software, key: "8"})
        store.set("facts/2", json.dumps(asdict(changed)))
        with pytest.raises(ValueError, match="give all nodes the same") as refusal:
            collect_inventories(store, 3, 5)
        assert f"{key}={here}" in str(refusal.value) and " on node 0" in str(refusal.value)
        assert f"{key}=8 on node 2 (host2)" in str(refusal.value)


@pytest.mark.slow(seconds=2)
def test_rank_0_fails_when_ranks_are_missing_after_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    monkeypatch.setattr(torchrun, "open_store", lambda ranks: store)
    config = resolved(*TWO, "parallel.start_timeout=1")
    since = time.monotonic()
    with pytest.raises(ValueError, match=r"^rank 1 \(of 0 to 1\): .* parallel\.start_timeout=1 s"):
        torchrun.negotiate(config, config.parallel, Ranks(0, 2, 0, 1, node=0, nodes=2))
    assert time.monotonic() - since < 10


@pytest.mark.parametrize(
    ("place", "is_printed"), [((1, 2, 0, 1, 0, 1, 2), True), ((1, 2, 1, 2), False)]
)
def test_config_error_of_a_torchrun_job_is_printed_once_on_each_node(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: tuple[int, ...],
    is_printed: bool,
) -> None:
    """Rank 0 prints the error on its node, and the first rank of each other node there."""
    store, errors = HashStore(), []
    monkeypatch.setattr(sys, "argv", ["train.py", "modle=tiny"])
    monkeypatch.setattr(torchrun, "open_store", lambda ranks: store)
    # Pretend that the other rank has already read the error. Otherwise rank 0 would wait for this
    # rank.
    store.set("left/1", "")
    for ranks in (Ranks(0, 2), Ranks(*place)):
        monkeypatch.setattr(
            "timm_parallel.entry.ranks_from_environment", lambda environment, ranks=ranks: ranks
        )
        assert run_command(app) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0].count("\n") == errors[0].count("did you mean model") == 1
    assert errors[1] == (errors[0] if is_printed else "")


def test_config_error_is_printed_in_one_line_when_rank_0_cannot_reach_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_store(ranks: Ranks) -> Store:
        raise ValueError("node0:29500: node 0 cannot listen on this address")

    monkeypatch.setattr(sys, "argv", ["train.py", "modle=tiny"])
    monkeypatch.setattr(torchrun, "open_store", open_store)
    monkeypatch.setattr(
        "timm_parallel.entry.ranks_from_environment", lambda environment: Ranks(0, 2)
    )
    assert run_command(app) == 2
    assert capsys.readouterr().err == (
        "train.py: node0:29500: node 0 cannot listen on this address\n"
    )


def test_ctrl_c_before_a_rank_of_torchrun_handles_signals_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(arguments: list[str]) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(
        "timm_parallel.entry.ranks_from_environment", lambda environment: Ranks(0, 2)
    )
    monkeypatch.setattr("timm_parallel.entry.parse_command_line", interrupt)
    assert run_command(app) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "train.py: stopped by SIGINT\n"


def test_second_stop_signal_ends_train_py_when_an_import_drops_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch imports numpy in native code, which drops every exception of this import."""

    def parse(arguments: list[str]) -> None:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("expected the second signal to raise")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr("timm_parallel.entry.ranks_from_environment", lambda environment: None)
    monkeypatch.setattr("timm_parallel.entry.parse_command_line", parse)
    assert run_command(app) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "train.py: stopped by SIGTERM\n"


def test_stop_signal_waits_while_torch_is_imported() -> None:
    """Native code of the import drops the exception of a signal handler."""
    seen: list[int] = []
    with signal_handlers(lambda number, frame: seen.append(number)):
        with slow_imports():
            signal.raise_signal(signal.SIGTERM)
            assert not seen
        assert seen == [signal.SIGTERM]


def _build_other_data(ranks: Ranks, store: Store, change: str) -> str:
    config = resolved(*TWO, "data=synthetic")
    if change == "num_classes":
        config.data.kwargs = {"num_classes": 10 - ranks.rank}
    elif ranks.rank == 1:
        draw = np.random.default_rng
        np.random.default_rng = lambda seed: draw(7)  # type: ignore[assignment, misc]
    try:
        parts_of(config, ranks, store).strategy.group.close()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "part"),
    [("num_classes", "class 9=class_9 on rank 0"), ("labels", "train names and labels=")],
)
def test_ddp_ranks_refuse_a_dataset_that_differs_from_the_dataset_of_rank_0(
    change: str, part: str
) -> None:
    first, second = in_ranks(_build_other_data, 2, change)
    assert first == second
    assert part in first and "on rank 0 (" in first and "on rank 1 (" in first


def _train(
    ranks: Ranks, store: Store, folder: str, overrides: tuple[str, ...]
) -> tuple[dict[str, Any], list[int]]:
    config = resolved(*TWO, "train.evaluate_every=0", "data.limit_train=64", *overrides)
    saved: list[int] = []
    save_if_due, save = Training._save_if_due, Training._save

    def with_fast_clock(training: Training) -> None:
        # By the clock of rank 1, a checkpoint is overdue. Only the clock of rank 0 may decide.
        training._saved_at -= 1e6 * ranks.rank
        save_if_due(training)

    def noted(training: Training, is_best: bool = False) -> None:
        saved.append(training.parts.progress.step)
        save(training, is_best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_save_if_due", with_fast_clock)
        patch.setattr(Training, "_save", noted)
        train_run(config, Path(folder), ranks, store)
    result = read_result(Path(folder))
    return {**result.communication, "parameters": result.parameters}, saved


@pytest.mark.slow(seconds=1)
def test_recorded_bytes_are_four_per_value_and_every_minutes_follows_the_clock_of_rank_0(
    tmp_path: Path,
) -> None:
    words = ("train.epochs=1", "data.batch_size=16", "checkpoint.every_minutes=1000")
    (result, first), (_, second) = in_ranks(_train, 2, str(tmp_path), (*words, "train.log_every=1"))
    assert result["bytes_per_step"] == 4 * result["parameters"]
    # A checkpoint at the end only.
    assert first == second == [4]


@pytest.mark.parametrize(("is_seen", "seconds"), [(True, 1234), (False, 300)])
def test_second_node_waits_for_node_0_no_longer_than_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool, seconds: int
) -> None:
    """The timeout comes from the saved config of the job. If the nodes share no disk, the second
    node cannot read this config and uses the default timeout.
    """
    if is_seen:
        save_config(resolved(*TWO, "parallel.start_timeout=1234"), tmp_path)
    waited: list[float] = []

    def find_no_node_0(place: NodeAddress, timeout: float) -> None:
        waited.append(timeout)
        raise ValueError("no node 0")

    monkeypatch.setattr(node, "find_address", lambda: NodeAddress(1, 2, "nodea", 29500))
    monkeypatch.setattr(node, "Rendezvous", find_no_node_0)
    assert node.main(tmp_path / "run", tmp_path) == 2
    assert waited == [seconds]


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the run folder of a requeued Slurm job with ID 7. The fake node 0 starts no ranks."""
    save_config(resolved(*TWO, "parallel.start_timeout=61"), tmp_path)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node, "find_address", NodeAddress)
    monkeypatch.setattr(node, "run_node_zero", lambda config, folder, place: 0)
    monkeypatch.setattr(node, "POLL_SECONDS", 0.05)
    return tmp_path


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("held_for", "code"), [(0.5, 0), (2.0, node.NODE_LOST)])
def test_requeued_slurm_job_waits_until_the_previous_attempt_unlocks_the_run_folder(
    requeued: Path, capsys: pytest.CaptureFixture[str], held_for: float, code: int
) -> None:
    """The previous attempt still runs if only the slurmd of its node died. After waiting for
    start_timeout - 60 s, the job requeues itself.
    """
    with ExitStack() as earlier:
        earlier.enter_context(lock_folder(requeued))
        release = threading.Timer(held_for, earlier.close)
        release.start()
        assert node.main(requeued, requeued) == code
        release.join()
    lines = capsys.readouterr().err.splitlines()
    assert "of Slurm job 7" in lines[0] and "waiting up to 1 s" in lines[0]
    assert len(lines) == (1 if code == 0 else 2)


@pytest.mark.parametrize(
    ("variable", "value"), [("SLURM_JOB_ID", "8"), ("SLURM_RESTART_COUNT", "0")]
)
def test_slurm_job_is_refused_when_another_job_has_locked_the_run_folder(
    requeued: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    with lock_folder(requeued):
        monkeypatch.setenv(variable, value)
        assert node.main(requeued, requeued) == 2


@pytest.mark.parametrize(
    ("restarts", "saved", "code"),
    [("0", "", 138), ("1", "step_4.pt", 138), ("1", "step_2.pt", 1)],
)
def test_restarted_slurm_job_fails_at_the_time_limit_when_no_new_checkpoint_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, saved: str, code: int
) -> None:
    """The first attempt of a job is only interrupted, because the time limit may come before the
    first checkpoint. A restarted job that saves `step_2.pt` again has made no progress.
    """
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_2.pt").touch()

    def run_ranks(*given: Any, **start: Any) -> RankExits:
        time.sleep(0.01)
        if saved:
            (tmp_path / "checkpoints" / saved).write_text("newer")
        return RankExits(signal=10)

    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(job, "run_ranks", run_ranks)
    assert node.run_node_zero(resolved(*TWO), tmp_path, NodeAddress()) == code
    result = read_result(tmp_path)
    assert result.status == ("failed" if code == 1 else "interrupted")
    assert ("cluster.time" in result.reason) == (code == 1)


@pytest.mark.processes
def test_node_0_waits_for_the_launcher_of_another_node_to_report_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    killed = failure_of_exit_code(tmp_path, 1, -signal.SIGKILL, 0)

    def run_ranks(*given: Any, **start: Any) -> RankExits:
        publish_failure(store, record_of(0, tmp_path, "lost its connection", is_echo=True))
        threading.Timer(0.2, publish_failure, (store, killed)).start()
        return RankExits(exit_codes={0: 1})

    monkeypatch.setattr(job, "run_ranks", run_ranks)
    monkeypatch.setattr(node, "_meet", lambda *given: SimpleNamespace(store=None))
    monkeypatch.setattr(node, "ranks_store", lambda *given: store)
    for name in ("collect_inventories", "check_nodes", "share_config"):
        monkeypatch.setattr(node, name, lambda *given: None)
    assert node.run_node_zero(resolved(*TWO), tmp_path, NodeAddress(0, 2)) == 1
    assert read_result(tmp_path).reason == killed["reason"]


@pytest.mark.processes
def test_launcher_of_another_node_reports_its_killed_rank_with_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    killed = RankExits(exit_codes={1: -signal.SIGKILL})
    monkeypatch.setattr(node, "_meet", lambda *given: SimpleNamespace(store=None))
    monkeypatch.setattr(node, "receive_config", lambda *given: (resolved(*TWO), tmp_path))
    monkeypatch.setattr(node, "run_ranks", lambda *given: killed)
    monkeypatch.setattr(node, "ranks_store", lambda *given: store)
    assert node.run_follower_node(tmp_path, NodeAddress(1, 2)) == 1
    [record] = published_failures(store, 2)
    reason = f"rank 1 was killed by SIGKILL on {host_name()}"
    assert (record["rank"], record["reason"].startswith(reason)) == (1, True)
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("restarts", "code", "status"), [("0", 138, "interrupted"), ("1", 1, "failed")]
)
def test_slurm_time_limit_signal_before_the_ranks_start_sets_the_status_in_result_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, code: int, status: str
) -> None:
    """Without a signal handler, the signal would kill the process while it still imports torch.
    Slurm would then requeue the job again and again.
    """
    save_config(resolved("parallel=single"), tmp_path)
    monkeypatch.setattr(node, "find_address", NodeAddress)
    # Clear the stop request that the training of an earlier test in this process may have left.
    monkeypatch.setattr(stop_handler, "request", None)
    monkeypatch.setattr(stop_handler, "heard_at", None)
    monkeypatch.setattr(
        job, "run_ranks", lambda *given, **start: signal.raise_signal(signal.SIGUSR1)
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    before = signal.getsignal(signal.SIGUSR1)
    assert node.main(tmp_path, tmp_path) == code
    assert read_result(tmp_path).status == status
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("command", "variable", "is_refused"),
    [
        ("torchrun --nnodes=1:2 train.py", None, True),
        ("torchrun --nnodes=2:2 train.py", None, False),
        ("torchrun train.py", "1:4", True),
        ("torchrun --nnodes=2 train.py", "1:4", False),
        ("torchrun train.py", None, False),
    ],
)
def test_torchrun_is_refused_when_nnodes_is_a_range(
    monkeypatch: pytest.MonkeyPatch, command: str, variable: str | None, is_refused: bool
) -> None:
    """With a range of nodes, torchrun restarts the ranks whenever a node joins or leaves.
    torchrun does not count these restarts.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(
        torchrun.psutil, "Process", lambda pid: SimpleNamespace(cmdline=command.split)
    )
    monkeypatch.delenv("PET_NNODES", raising=False)
    if variable is not None:
        monkeypatch.setenv("PET_NNODES", variable)
    with pytest.raises(ValueError, match=r"--nnodes=1:.") if is_refused else nullcontext():
        torchrun._refuse_elastic_nodes()


@pytest.mark.slow(seconds=10)
def test_run_of_two_torchrun_ranks_writes_each_record_once_and_equals_that_of_python(
    train: Train, tmp_path: Path
) -> None:
    done = train("parallel=ddp", form="torchrun")
    assert done.returncode == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("folder"))
    done = replace(done, folder=Path(line.split()[-1]))
    folder, result = done.folder, done.result
    assert [path.parent for path in folder.rglob(".hydra")] == [folder]
    writers = {path.name.split(".")[-2] for path in folder.rglob("events.out.tfevents.*")}
    assert len(writers) == 1, "expected TensorBoard files from one process"
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert list(folder.rglob("*.tmp")) == []
    assert (result["status"], result["strategy"], result["backend"]) == ("done", "ddp", "gloo")
    assert [result[key] for key in ("devices", "world_size", "processes")] == [2, 2, 2]
    assert result["proof"]["hashes_equal"] is True
    assert result["proof"]["parameters_hash_start"] != result["parameters_hash"]
    assert [entry["device"] for entry in result["memory"]] == ["cpu:0", "cpu:1"]
    temporary = [path.name for path in train.temporary.iterdir()]
    assert all(name.startswith("torchelastic_") for name in temporary), (
        "expected no files except the log folder of torchrun"
    )
    other = Finished(0, "", "", run_warm(tmp_path / "python", *TWO), 0.0)
    assert without_times(done.metrics) == without_times(other.metrics)
    assert done.result["parameters_hash"] == other.result["parameters_hash"]
    weights, others = (
        checkpoint.load(each.folder / "checkpoints" / "last.pt")["model"] for each in (done, other)
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_sweep_is_refused_under_torchrun(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        monkeypatch.setenv(name, {"RANK": "0", "LOCAL_RANK": "0"}.get(name, "2"))
    monkeypatch.setattr("timm_parallel.entry.refuse_followers", lambda ranks, reason: None)
    assert "python train.py -m" in refuse("-m", "parallel=ddp")
