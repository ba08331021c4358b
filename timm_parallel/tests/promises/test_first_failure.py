"""An error message shows the first cause of a failure, not the errors that follow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.distributed import DistStoreError, HashStore

from timm_parallel.errors import ConnectError, UnreadableImageError, UnsentBatchError
from timm_parallel.faults import watchdog
from timm_parallel.faults.failure import (
    RankExits,
    failure_record,
    first_failure,
    publish_failure,
    published_failures,
    record_of,
    write_failure,
)
from timm_parallel.faults.watchdog import Heartbeat
from timm_parallel.keys import ResolvedConfig
from timm_parallel.launch import job, node, rendezvous, torchrun
from timm_parallel.launch.job import conclude, prepare, record_end
from timm_parallel.machine.ranks import NodeAddress, Ranks
from timm_parallel.machine.signals import heeded_signals, signal_handlers
from timm_parallel.parallel.group import TorchProcessGroup
from timm_parallel.record.result import read_result
from timm_parallel.testing.configs import resolved


@cache
def single() -> ResolvedConfig:
    return resolved("parallel=single")


def recorded(error: Exception, folder: Path, config: Any = None) -> dict[str, Any]:
    try:
        raise error
    except Exception as caught:
        return failure_record(caught, config or single(), Ranks(), folder / "log")


Nccl: Any = type("DistBackendError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (FileNotFoundError("/data/igloo/1.png"), False),
        (RuntimeError("/data/igloo/1.png: an odd image"), False),
        (Nccl("NCCL error: Cuda failure 2 'out of memory'"), False),
        (RuntimeError("[../third_party/gloo/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("Gloo connectFullMesh failed with timeout"), True),
        (Nccl("NCCL error: remote process exited"), True),
    ],
)
def test_only_an_error_of_a_process_group_is_reported_as_a_lost_connection(
    tmp_path: Path, error: Exception, is_lost: bool
) -> None:
    record = recorded(error, tmp_path)
    assert record["is_echo"] == is_lost
    assert ("lost its connection to another rank" in record["reason"]) == is_lost


@pytest.mark.parametrize("kind", [UnreadableImageError, UnsentBatchError])
def test_failure_reason_has_the_class_of_an_error_of_a_loader_worker_once(
    tmp_path: Path, kind: type[Exception]
) -> None:
    try:
        raise kind("cat.png: torn")
    except Exception as error:
        caught = ExceptionWrapper((kind, error, error.__traceback__), "in a loader worker")
    with pytest.raises(kind) as raised:
        caught.reraise()
    record = recorded(raised.value, tmp_path)
    assert record["reason"] == f"rank 0: {kind.__name__}: cat.png: torn"
    assert record["shows_traceback"] is False


IN_REPLICA = (
    "Caught OutOfMemoryError in replica 1 on device 2.\nOriginal Traceback (most recent "
    "call last):\n  File x\n"
)
OF_ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB"
)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (torch.OutOfMemoryError(OF_ALLOCATOR), "cuda:3"),
        (torch.OutOfMemoryError(f"{IN_REPLICA}torch.OutOfMemoryError: out of memory"), "cuda:2"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "cuda:5",
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "cpu"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            ),
            "cpu",
        ),
        (MemoryError(), "cpu"),
    ],
)
def test_failure_record_of_an_out_of_memory_error_names_the_full_device(
    error: Exception, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the one that the strategy has chosen according to parallel.device_ids."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    config = resolved("parallel=single")
    config.parallel.accelerator = "cuda"
    record = recorded(error, tmp_path, config)
    assert record["status"] == "out_of_memory"
    assert f" on {device} with " in record["reason"]


@pytest.mark.parametrize("failing", ["init_process_group", "barrier"])
def test_connection_failure_of_nccl_is_not_reported_as_the_exit_of_another_rank(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects in the first collective. If another rank was killed before, its death is the
    first failure.
    """

    def fail(*given: Any, **named: Any) -> None:
        raise torch.distributed.DistBackendError("unhandled system error")

    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **named: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, failing, fail)
    config = resolved("parallel=ddp", "parallel.devices=2")
    with pytest.raises(ConnectError) as failure:
        TorchProcessGroup(config.parallel, Ranks(0, 2, 0, 2), HashStore(), torch.device("cpu"))
    record = recorded(failure.value, tmp_path)
    assert "exited" not in record["reason"] and "unhandled system error" in record["reason"]
    (tmp_path / "logs").mkdir()
    write_failure(tmp_path, record)
    assert first_failure(tmp_path, RankExits(exit_codes={0: 1}))["rank"] == 0
    assert first_failure(tmp_path, RankExits(exit_codes={0: 1, 1: -signal.SIGKILL}))["rank"] == 1


def test_refuse_followers_does_not_raise_when_another_rank_never_responds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchrun, "open_store", lambda ranks: HashStore())
    monkeypatch.setattr(rendezvous, "REFUSAL_SECONDS", 0.05)
    # refuse_followers must not raise an error, because the caller prints the refusal of the config.
    torchrun.refuse_followers(Ranks(0, 2, 0, 2), "seed=x: expected an integer")


def test_result_json_has_the_torch_store_error_when_another_node_never_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other node sends no information about itself, so the error of the torch store is the only
    known cause.
    """
    prepare(resolved("parallel=ddp", "parallel.devices=2"), tmp_path)
    reason = "wait timeout after 300000ms, keys: /facts/1"

    def meet(place: NodeAddress, seconds: float) -> None:
        raise DistStoreError(reason)

    monkeypatch.setattr(node, "find_address", lambda: NodeAddress(0, 2))
    monkeypatch.setattr(node, "_meet", meet)
    assert node.main(tmp_path, tmp_path) == 1
    assert capsys.readouterr().err == f"node: {reason}\n"
    result = read_result(tmp_path)
    assert (result.status, result.reason) == ("failed", reason)


FULL = """
import os, sys
from pathlib import Path
from timm_parallel.faults import failure

def full(path, value):
    raise OSError(28, "No space left on device")

failure.write_json = full
record = failure.record_of(0, Path(sys.argv[1]), "the disk is full")
failure.report_failure(record)
failure.write_failure(Path(sys.argv[1]), record)
os._exit(1)
"""


@pytest.mark.processes
def test_failure_reason_is_printed_and_recorded_when_the_failure_record_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = single()
    run_child = job._run_child
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    monkeypatch.setattr(job, "_run_child", lambda *given: run_child(command, config.parallel))
    assert job.run_job(config, tmp_path) == 1
    assert read_result(tmp_path).reason == "the disk is full"
    assert capsys.readouterr().err.splitlines()[0] == "Failed: the disk is full"


def test_failure_reason_is_printed_when_result_json_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, result: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "write_result", full)
    ended = RankExits(
        exit_codes={0: 1}, records=[record_of(0, tmp_path, "step_24.pt: could not be written")]
    )
    assert conclude(single(), tmp_path, ended) == 1
    assert "step_24.pt: could not be written" in capsys.readouterr().err.splitlines()[0]


def test_failure_reason_in_the_torch_store_is_not_replaced_by_an_exit_code(
    tmp_path: Path,
) -> None:
    store = HashStore()
    for reason in ("the disk is full", "exited early with exit code 1"):
        publish_failure(store, record_of(1, tmp_path, reason))
    assert [record["reason"] for record in published_failures(store, 2)] == ["the disk is full"]


def test_failure_record_in_the_torch_store_contains_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher prints the record from the store if the disk is full."""
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery")
    store = HashStore()
    publish_failure(store, record_of(0, tmp_path, "no access with correct-horse-battery"))
    [record] = published_failures(store, 1)
    assert record["reason"] == "no access with ${oc.env:API_TOKEN}"


@pytest.mark.parametrize(
    ("codes", "stopped_by"),
    [({0: 143, 1: 143}, 15), ({1: 138}, 10), ({0: 143, 1: 1}, None), ({0: 1}, None)],
)
def test_run_ranks_reports_a_stop_signal_only_when_no_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[int, int], stopped_by: int | None
) -> None:
    monkeypatch.setattr(job, "_run_child", lambda *given: RankExits(exit_codes=codes))
    assert job.run_ranks(single(), tmp_path).signal == stopped_by


DEAF = """
import os, signal, sys, time
signal.signal(int(sys.argv[1]), signal.SIG_IGN)
os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_that_is_ignored_when_a_command_starts_stays_ignored(number: signal.Signals) -> None:
    """`nohup` starts a command with SIGHUP ignored. A script starts a background command with
    SIGINT ignored.
    """
    received: list[int] = []
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        with signal_handlers(lambda number, frame: received.append(number)):
            for each in (number, signal.SIGTERM):
                os.kill(os.getpid(), each)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(number) == signal.SIG_IGN
        assert number not in heeded_signals()
    finally:
        signal.signal(number, previous)


@pytest.mark.processes
def test_two_simultaneous_signals_start_only_one_kill_timer_for_a_child_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program `timeout` sends a signal to the process and also to its process group. The second
    signal may arrive while the handler of the first signal starts the kill timer.
    """
    starts = []

    class Timer(threading.Timer):
        def start(self) -> None:
            starts.append(self)
            if len(starts) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super().start()

    monkeypatch.setattr(job, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(job.threading, "Timer", Timer)
    command = [sys.executable, "-c", DEAF, str(int(signal.SIGTERM))]
    ended = job._run_child(command, single().parallel)
    assert (ended.signal, ended.exit_codes) == (signal.SIGTERM, {0: -signal.SIGKILL})
    assert len(starts) == 1


def test_watchdog_ends_the_rank_after_a_node_loss_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog cannot write its failure record to a full disk. It must end the rank without
    waiting for the lost node.
    """

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    place = Ranks(0, 2, 0, 1, node=0, nodes=2)
    dog = watchdog.Watchdog(single().parallel, tmp_path, place, None, Full())  # type: ignore[arg-type]
    monkeypatch.setattr(watchdog, "exit_at_once", leave)
    monkeypatch.setattr(watchdog.threading, "Timer", MagicMock())
    with pytest.raises(Left):
        dog._end_without(Heartbeat(1, "nodeb", node=1))
    with pytest.raises(Left):
        dog._end(100.0)


@pytest.mark.parametrize(("status", "code"), [("done", 0), (None, 130)])
@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_result_status_stays_done_when_a_signal_or_an_exit_code_follows(
    tmp_path: Path, status: str | None, code: int, number: int | None
) -> None:
    config = single()
    if status is not None:
        record_end(config, tmp_path, status, "")
    # Python exits with 120 if it cannot write to the console at the end.
    ended = RankExits(signal=number, exit_codes={0: 130 if number else 120})
    assert conclude(config, tmp_path, ended) == (code if number or status else 1)
    assert read_result(tmp_path).status == (status or ("interrupted" if number else "failed"))


def test_stopped_run_suggests_resume_only_when_a_checkpoint_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = RankExits(signal=signal.SIGINT, exit_codes={0: 130})
    conclude(single(), tmp_path, ended)
    line = capsys.readouterr().err
    assert "same command" in line and "resume=" not in line
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    conclude(single(), tmp_path, ended)
    line = capsys.readouterr().err
    assert line.startswith("Stopped by SIGINT. ") and "resume=" in line


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
@pytest.mark.parametrize("has_another_run", [False, True])
def test_rest_of_a_deleted_run_folder_is_removed_unless_another_run_has_its_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    has_another_run: bool,
    number: signal.Signals | None,
) -> None:
    """A rank may write a file while `rm -rf` deletes the folder, which then stays."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    write_failure(folder, record_of(0, folder, "no space"))
    if has_another_run:
        (folder / "config.yaml").touch()
    ended = RankExits(signal=number, exit_codes={0: 1}, folder_problem="the folder was deleted")
    assert conclude(single(), folder, ended) == (1 if number is None else 128 + number)
    assert capsys.readouterr().err == "Failed: the folder was deleted\n"
    assert folder.exists() == has_another_run
    assert not (folder / "result.json").exists()
