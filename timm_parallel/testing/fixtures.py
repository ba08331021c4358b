"""Fixtures that start runs: as a command in new processes (`train`), or as ranks forked here
(`in_ranks`, `run_warm`).

Tests of how processes start, end or are supervised use commands; other tests use forked ranks,
which are faster.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock

from src.app import app
from timm_parallel.entry import run_command
from timm_parallel.machine import hardware
from timm_parallel.testing.commands import Finished, Refuse, Train
from timm_parallel.testing.ranks import RANK_VARIABLES

# A script starts `make test &` with Ctrl-C ignored, and every command of a test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many images set it. Each worker and each command of a test would compile the same files again,
# which takes four times as long as collecting compiled tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# First: xdist, which pytest loads after this plugin, has a hook of its own.
@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return cores + 1 for `-n logical`, because tests also wait for watchdogs and for processes to
    end.
    """
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else hardware.cores() + 1


# While tests and what they import are collected, in which it finds nothing: a quarter of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that the garbage collector skips them."""
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark parameter rows that `sample` leaves out as nightly."""
    sample = item.get_closest_marker("sample")
    if sample is not None and isinstance(item, pytest.Function):
        row = max(item.callspec.indices.values())
        if row % sample.args[0]:
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no worker starts a slow file when the other workers have
    finished.
    """
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        slow = item.get_closest_marker("slow")
        quick = 2 if item.get_closest_marker("processes") else 0.2
        seconds[item.path] += slow.kwargs.get("seconds", 7) if slow else quick
    items.sort(key=lambda item: -seconds[item.path])


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share one matplotlib cache, so that its font list is built once instead of once per home
    folder.
    """
    return tmp_path_factory.mktemp("matplotlib")


@pytest.fixture
def train(tmp_path: Path, caches: Path) -> Iterator[Train]:
    starter = Train(tmp_path, caches)
    yield starter
    starter.close()


@pytest.fixture
def refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refuse:
    """Return a function that runs main of train.py in an empty folder without CUDA and returns its
    one-line error.
    """
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    monkeypatch.setattr(subprocess, "Popen", _no_child)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        capfd.readouterr()
        try:
            code = run_command(app)
        except SystemExit as leave:  # argparse
            code = leave.code
        out, err = capfd.readouterr()
        assert code == 2, f"{arguments} ended with {code}: {err or out}"
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1, err
        assert err.startswith("train.py: ")
        assert out == ""
        assert list(here.iterdir()) == [], "expected a refused command to create no files"
        return err

    return run


def _no_child(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a refused command started a process: {arguments}")


@pytest.fixture(scope="module")
def train_shared(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Iterator[Train]:
    """Start runs like `train`, for results that several tests of a module read."""
    starter = Train(tmp_path_factory.mktemp("shared"), caches)
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Finished:
    """Train one run that the tests of all workers share. A test must copy the folder before
    changing it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    record = shared / "finished_run.json"
    with FileLock(shared / "finished_run.lock", timeout=300):
        if not record.exists():
            starter = Train(tmp_path_factory.mktemp("finished"), caches)
            arguments = (
                "parallel=single",
                "optim.lr=3e-3",
                "data.limit_train=1256",
                "checkpoint.every_steps=25",
            )
            done = starter(*arguments)
            starter.close()
            assert done.returncode == 0, done.output
            record.write_text(json.dumps(asdict(done), default=str), encoding="utf-8")
    values = json.loads(record.read_text(encoding="utf-8"))
    return Finished(**{**values, "folder": Path(values["folder"])})
