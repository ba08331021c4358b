"""Whatever goes wrong, the first cause is what people read: no echo of it, and no wait that failed meanwhile."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from conftest import resolved

from src.engine.launch import node, nodes, supervisor, torchrun, watchdog
from src.engine.launch.failure import failure_record
from src.engine.launch.heartbeat import Heartbeat, Heartbeats
from src.engine.launch.job import conclude, prepare, record_end
from src.engine.launch.supervisor import Ended
from src.engine.machine.ranks import Place, Ranks
from src.engine.record.result import read_result


def recorded(error: Exception, folder: Path) -> dict[str, Any]:
    try:
        raise error
    except Exception as caught:
        return failure_record(caught, resolved("parallel=single"), Ranks(), folder / "log")


def test_a_file_whose_name_sounds_like_gloo_is_no_lost_connection(tmp_path: Path) -> None:
    for error in (FileNotFoundError("/data/igloo/1.png"), RuntimeError("/data/igloo/1.png: an odd image")):
        record = recorded(error, tmp_path)
        assert not record["is_echo"] and "/data/igloo/1.png" in record["reason"]
        assert "lost its connection" not in record["reason"]
    said = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
    for words in (said, "Gloo connectFullMesh failed with timeout"):
        record = recorded(RuntimeError(words), tmp_path)
        assert record["is_echo"] and "lost its connection to another rank" in record["reason"]


def test_a_device_without_memory_is_no_lost_connection(tmp_path: Path) -> None:
    kind = type("DistBackendError", (RuntimeError,), {})
    record = recorded(kind("NCCL error: Cuda failure 2 'out of memory'"), tmp_path)
    assert (record["status"], record["is_echo"]) == ("out_of_memory", False)
    assert recorded(kind("NCCL error: remote process exited"), tmp_path)["is_echo"]


def test_a_refusal_is_said_also_where_a_rank_comes_too_late_to_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    monkeypatch.setattr(torchrun, "open_store", lambda ranks: HashStore())
    monkeypatch.setattr(nodes, "ANSWER_SECONDS", 0.05)
    torchrun.refuse_followers(Ranks(0, 2, 0, 2))  # raises nothing: the caller goes on to say it


def test_a_node_that_leaves_before_the_ranks_start_is_no_riddle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it should have told stays out: the store's own error is all there is to say."""
    from torch.distributed import DistStoreError

    config = resolved("parallel=ddp", "parallel.devices=2")
    prepare(config, tmp_path)

    def meet(place: Place, seconds: float) -> None:
        raise DistStoreError("wait timeout after 300000ms, keys: /facts/1")

    monkeypatch.setattr(node, "find_place", lambda: Place(0, 2))
    monkeypatch.setattr(node, "_meet", meet)
    assert node.main(tmp_path, tmp_path) == 1
    assert capsys.readouterr().err == "node: wait timeout after 300000ms, keys: /facts/1\n"
    result = read_result(tmp_path)
    assert (result.status, result.reason) == ("failed", "wait timeout after 300000ms, keys: /facts/1")


@pytest.mark.parametrize(
    ("codes", "stopped_by"), [({0: 143, 1: 143}, 15), ({1: 138}, 10), ({0: 143, 1: 1}, None), ({0: 1}, None)]
)
def test_ranks_that_a_signal_has_stopped_are_a_stopped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[int, int], stopped_by: int | None
) -> None:
    monkeypatch.setattr(supervisor, "_run_child", lambda *given: Ended(exit_codes=codes))
    assert supervisor.run_ranks(resolved("parallel=single"), tmp_path).signal == stopped_by


DEAF = """
import os, signal, sys, time
signal.signal(int(sys.argv[1]), signal.SIG_IGN)
os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_does_not_leave_after_a_signal_is_killed(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)
    command = [sys.executable, "-c", DEAF, str(int(number))]
    ended = supervisor._run_child(command, resolved("parallel=single").parallel)
    assert (ended.signal, ended.exit_codes) == (number, {0: -signal.SIGKILL})


def test_a_lost_node_ends_the_rank_also_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written down any more; waiting for the node would hang."""

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    place = Ranks(0, 2, 0, 1, node=0, nodes=2)
    dog = watchdog.Watchdog(resolved("parallel=single").parallel, tmp_path, place, None, Full())  # type: ignore[arg-type]
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog.threading, "Timer", MagicMock())
    with pytest.raises(Left):
        dog._end_without(Heartbeat(1, "nodeb", node=1))
    with pytest.raises(Left):
        dog._end(100.0)


def test_nodes_that_come_while_another_thread_looks_do_no_harm(tmp_path: Path) -> None:
    """The watchdog reads what the thread of heartbeats writes; an error there would end the watchdog unseen."""
    heartbeats = Heartbeats(Ranks(0, 2, 0, 1, node=0, nodes=2), None, tmp_path)

    class Store:
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> str:
            return json.dumps({"rank": int(key.partition("/")[2]), "ticks": 1})

    over = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not over.is_set():
                heartbeats.silent_node()
        except BaseException as error:
            errors.append(error)

    watching = threading.Thread(target=look)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        watching.start()
        for other in range(1, 3000):
            heartbeats._look_at(other, Store())  # type: ignore[arg-type]
    finally:
        over.set()
        watching.join()
        sys.setswitchinterval(before)
    assert errors == []


@pytest.mark.parametrize(("status", "code"), [("done", 0), (None, 130)])
def test_a_signal_that_finds_the_ranks_of_a_finished_run_leaving_has_stopped_nothing(
    tmp_path: Path, status: str | None, code: int
) -> None:
    config = resolved("parallel=single")
    if status is not None:
        record_end(config, tmp_path, status, "")
    assert conclude(config, tmp_path, Ended(signal=signal.SIGINT, exit_codes={0: 130})) == code
    assert read_result(tmp_path).status == (status or "interrupted")
