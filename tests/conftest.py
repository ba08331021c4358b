"""How tests start runs: as a command in processes of its own (`train`), or as ranks forked here (`in_ranks`, `run_warm`).

What depends on how processes start, end and are watched over is tried with commands; the rest in ranks, which are cheaper.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

# Tests take all of these from here.
from commands import ROOT, Finished, Running, Train  # noqa: F401
from configs import TINY, conf, parse, plain, read_lines, resolved, tiny, without_times  # noqa: F401
from filelock import FileLock
from ranks import RANK_VARIABLES, in_ranks, run_warm, train_warm, warm_processes, warm_ranks  # noqa: F401

import train as entry
from src.engine.machine import hardware

Refuse = Callable[..., str]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n logical`: one more than there are cores, since tests also wait, for watchdogs and for what they have ended."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else hardware.cores() + 1


gc.disable()  # while tests and what they import are collected, in which it finds nothing: a quarter of that time


def pytest_collection_finish() -> None:
    """What is imported stays, so the collector need not look at it again."""
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """The rows of a matrix that its sample leaves out are slow: each is quick, but they are many."""
    sample = item.get_closest_marker("sample")
    if sample is not None and isinstance(item, pytest.Function):
        row = max(item.callspec.indices.values())
        if row % sample.args[0]:
            item.add_marker(pytest.mark.slow(seconds=0.3))


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: one that begins last is waited for."""
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        slow = item.get_closest_marker("slow")
        quick = 2 if item.get_closest_marker("processes") else 0.2
        seconds[item.path] += slow.kwargs.get("seconds", 7) if slow else quick
    items.sort(key=lambda item: -seconds[item.path])


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """matplotlib builds its font list once instead of once per home."""
    return tmp_path_factory.mktemp("matplotlib")


@pytest.fixture
def train(tmp_path: Path, caches: Path) -> Iterator[Train]:
    starter = Train(tmp_path, caches)
    yield starter
    starter.close()


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Runs train.py's main here, in an empty folder, on a machine without CUDA; returns the one line it refuses with."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    monkeypatch.setattr(subprocess, "Popen", _no_child)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        capfd.readouterr()
        try:
            code = entry.main()
        except SystemExit as leave:  # argparse
            code = leave.code
        out, err = capfd.readouterr()
        assert code == 2, f"{words} ended with {code}: {err or out}"
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1, err
        assert err.startswith("train.py: ")
        assert out == ""
        assert list(here.iterdir()) == [], "a refused command leaves no folder"
        return err

    return run


def _no_child(*words: object, **options: object) -> None:
    raise AssertionError(f"a refused command started a process: {words}")


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's plots are most of its time."""
    monkeypatch.setattr("src.engine.report.plots.draw", lambda group: [])


@pytest.fixture(scope="module")
def train_shared(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Iterator[Train]:
    """`train` for runs that several tests of a module look at."""
    starter = Train(tmp_path_factory.mktemp("shared"), caches)
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Finished:
    """One ordinary run for all workers, for tests that look at what a run leaves. Copy the folder before changing it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    record = shared / "finished_run.json"
    with FileLock(shared / "finished_run.lock", timeout=300):
        if not record.exists():
            starter = Train(tmp_path_factory.mktemp("finished"), caches)
            words = ("parallel=single", "optim.lr=3e-3", "data.limit_train=1256", "checkpoint.every_steps=25")
            done = starter(*words)
            starter.close()
            assert done.returncode == 0, done.output
            record.write_text(json.dumps(asdict(done), default=str), encoding="utf-8")
    values = json.loads(record.read_text(encoding="utf-8"))
    return Finished(**{**values, "folder": Path(values["folder"])})
