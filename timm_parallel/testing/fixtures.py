"""Pytest plugin with fixtures that start training runs of a project.

A conftest.py of the project overrides the fixture `app`, and `tiny_run` if it wants to. The fixture
`train` starts a run as a command in new processes. Tests of how processes start, end or are
supervised use this fixture. Other tests fork ranks with `in_ranks` or `train_warm`, which is
faster.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from timm_parallel.app import App
from timm_parallel.entry import run_command
from timm_parallel.machine import hardware
from timm_parallel.testing.commands import Refuse, Train
from timm_parallel.testing.ranks import RANK_VARIABLES, name_project

# Make stop signals work again. A shell that starts `make test &` lets the tests ignore SIGINT, and
# nohup lets them ignore SIGHUP, and every command that a test starts would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Fork processes, as Python before 3.14 does on Linux. A pool of a test would otherwise start the
# fork server before timm_parallel/testing/ranks.py tells the server which modules to import.
if sys.platform == "linux":
    multiprocessing.set_start_method("fork", force=True)

# Let Python write bytecode files. Many container images forbid this, and each test worker and each
# command of a test would compile the same files again. Collecting the tests would take four times
# as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# The nightly tests are divided among so many days. The number of the day in the year is a variable,
# so that all test workers have the same one after midnight too.
DAYS = 7
os.environ.setdefault("TESTS_OF_DAY", str(date.today().timetuple().tm_yday))


# Run this hook first. Otherwise the hook of pytest-xdist, which is loaded later, would decide the
# number of workers.
@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the number of test workers for `-n logical`: the CPU cores that this process may use.
    xdist would count all cores of the machine, also in a container that may use only a few. More
    workers than cores are slower: each of them imports torch.
    """
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else hardware.cores()


# Disable garbage collection while pytest imports test modules. The collector would take a quarter
# of this time and find no garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude all objects that exist after test collection from garbage collection, and turn the
    collector on again. Most of these objects live until the end, so searching them would waste
    time. By now, conftest.py has imported the project, which forked ranks import too.
    """
    gc.freeze()
    gc.enable()
    name_project()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a parameter set of a test as nightly if the marker `sample` leaves it out. `sample(n)`
    keeps every n-th parameter set in the ordinary test run.
    """
    sample = item.get_closest_marker("sample")
    if sample is not None and isinstance(item, pytest.Function):
        row = max(item.callspec.indices.values())
        if row % sample.args[0]:
            item.add_marker(pytest.mark.nightly)


# Run around all other hooks of this name: before the option -m selects tests, and after it.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the nightly tests of today. Sort the selected tests so that files with slow tests run
    first. Otherwise one worker could start a slow file when all other workers have finished.
    """
    _mark_today([item for item in items if item.get_closest_marker("nightly")])
    yield
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += _seconds(item)
    items.sort(key=lambda item: -seconds[item.path])


def _mark_today(nightly: list[pytest.Item]) -> None:
    """Divide the nightly tests among DAYS days that take about equally long, and mark those of
    today, so that a week of daily CI runs covers all of them.
    """
    # Keep parameter sets with the same first value together, because they share a training.
    shared: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in nightly:
        shared[item.nodeid.partition("-")[0]].append(item)
    days = [0.0] * DAYS
    by_length = sorted((-sum(map(_seconds, group)), name) for name, group in shared.items())
    for seconds, name in by_length:
        day = days.index(min(days))
        days[day] -= seconds
        if day == int(os.environ["TESTS_OF_DAY"]) % DAYS:
            for item in shared[name]:
                item.add_marker(pytest.mark.today)


def _seconds(item: pytest.Item) -> float:
    """Return about how long a test takes, according to its markers."""
    slow = item.get_closest_marker("slow")
    if slow is None:
        return 2 if item.get_closest_marker("processes") else 0.2
    return float(slow.kwargs.get("seconds", 7))


@pytest.fixture(scope="session")
def app() -> App:
    """Return the project under test."""
    raise NotImplementedError("a conftest.py must override the fixture app")


@pytest.fixture(scope="session")
def tiny_run(app: App) -> tuple[str, ...]:
    """Return the overrides of a training run of a few seconds."""
    return app.trial


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a matplotlib cache folder that all commands share. Without it, each command would
    build a font list, because each test has an empty home folder.
    """
    return tmp_path_factory.mktemp("matplotlib")


@pytest.fixture
def train(tmp_path: Path, caches: Path, app: App, tiny_run: tuple[str, ...]) -> Iterator[Train]:
    starter = Train(tmp_path, caches, app.root, tiny_run)
    yield starter
    starter.close()


@pytest.fixture
def refuse(
    app: App,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Refuse:
    """Return a function that runs main of train.py in an empty folder with arguments that must be
    refused. The function checks the exit code 2 and that no file was created, and returns the
    one-line error. No CUDA devices are visible.
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
            code: str | int | None = run_command(app)
        # Hydra's argument parser reports an error by SystemExit.
        except SystemExit as leave:
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
def train_shared(
    tmp_path_factory: pytest.TempPathFactory,
    caches: Path,
    app: App,
    tiny_run: tuple[str, ...],
) -> Iterator[Train]:
    """Yield an object that starts train.py, like that of the fixture `train`. The runs of this
    object are kept until the last test of a module has ended.
    """
    starter = Train(tmp_path_factory.mktemp("shared"), caches, app.root, tiny_run)
    yield starter
    starter.close()


@pytest.fixture
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the drawing of plots in reports by a function that draws nothing, because plots take
    most of the time of a report. Tests that use the fixture `plots` still draw them.
    """
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("timm_parallel.lab.report.plots.draw", lambda group: [])


@pytest.fixture
def plots() -> None:
    """Let a test of a module that uses `without_plots` draw plots."""
