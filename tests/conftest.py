"""How tests start runs: as a command in processes of its own (`train`), or as ranks forked here.

A command takes three seconds of each core until its ranks have imported torch and timm. So what depends on how processes
start, end and are watched over is tried with commands; the rest in forks of a server that has everything imported:
`in_ranks` calls a function in them, `run_warm` trains a whole run, `warm_ranks` stands for the launcher's own start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import train as entry
from src.data.augment import Preprocessing
from src.engine.config.compose import compose_command
from src.engine.config.resolve import resolve
from src.engine.launch.job import prepare
from src.engine.launch.supervisor import Ended
from src.engine.machine import hardware
from src.engine.machine.ranks import NEEDED, Ranks
from src.schema import ResolvedConfig

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "print_config=false",
    "model=tiny",
    "parallel.threads_per_device=1",
    "data.limit_train=192",
    "data.batch_size=32",
    "optim.warmup_epochs=0",
    "train.epochs=2",
)
RANK_VARIABLES = (*NEEDED, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES")
Refuse = Callable[..., str]
NOT_HANDED_ON = (*NEEDED, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RUN_STARTED_AT", "COLUMNS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: one that begins last is waited for."""
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        slow = item.get_closest_marker("slow")
        seconds[item.path] += slow.kwargs.get("seconds", 7) if slow else 0.2
    items.sort(key=lambda item: -seconds[item.path])


def resolved(*overrides: str) -> ResolvedConfig:
    """The config of `python train.py <TINY> <overrides>`, ready to run here."""
    return resolve(compose_command(parse(*tiny(*overrides))).config)


def parse(*words: str) -> Any:
    """What Hydra's own parser makes of a command line."""
    from hydra._internal.utils import get_args_parser

    return get_args_parser().parse_args(list(words))


def conf(folder: Path, **files: str) -> Path:
    """A folder for --config-dir: file name (`__` for `/`) -> text."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def tiny(*overrides: str) -> list[str]:
    """TINY, in which later keys replace earlier ones."""
    chosen = {word.partition("=")[0]: word for word in (*TINY, *overrides)}
    return list(chosen.values())


def plain(channels: int, size: int, mean: float = 0.0, std: float = 1 / 255) -> Preprocessing:
    """The preprocessing of images that have their size; by default their values stay in 0..255."""
    return Preprocessing((channels, size, size), (mean,) * channels, (std,) * channels, 1.0, "center", "bilinear")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what depends on the clock or on memory; lines that then say nothing are left out."""
    timed = ("time", "train/images_per_sec", "train/images_per_sec_per_device", "train/data_wait", "seconds")
    kept = [{k: v for k, v in line.items() if k not in timed and not k.startswith("memory/")} for line in lines]
    return [line for line in kept if any("/" in key for key in line)]


@dataclass
class Finished:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path
    seconds: float

    @property
    def output(self) -> str:
        return f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")


@dataclass
class Running:
    """A command under way; its output goes to files, so that no pipe can fill up."""

    process: subprocess.Popen[str]
    folder: Path
    output: Path
    timeout: float
    started: float = field(default_factory=time.monotonic)

    def workers(self) -> dict[int, psutil.Process]:
        """The ranks started so far, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "src.run" in child.cmdline() and child.parent().pid == self.process.pid:
                    found[int(child.environ().get("RANK", "0"))] = child
            except (psutil.NoSuchProcess, AttributeError):
                continue
        return found

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """What `what` returns as soon as that is true."""
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() - self.started > self.timeout:
                pytest.fail(f"ended or too late before {what}: {self.finish().output}")
            time.sleep(0.05)
        return found

    def wait_for_steps(self) -> None:
        """Until steps have been logged, so training is under way."""
        log = self.folder / "metrics.jsonl"
        self.wait_for(lambda: log.exists() and log.stat().st_size > 0)

    def signal(self, number: int) -> Finished:
        """Send a signal to this process alone and wait for its end; `seconds` counts from the signal."""
        self.process.send_signal(number)
        self.started = time.monotonic()
        return self.finish()

    def finish(self) -> Finished:
        """Wait for the end; past the time limit everything is killed and the test fails."""
        left = self.timeout - (time.monotonic() - self.started)
        try:
            code = self.process.wait(timeout=max(0.1, left))
        except subprocess.TimeoutExpired:
            _kill_group(self.process)
            pytest.fail(f"did not end within {self.timeout} s:\n{self._finished(-1).output}")
        return self._finished(code)

    def _finished(self, code: int) -> Finished:
        out, err = (self.output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        return Finished(code, out, err, self.folder, time.monotonic() - self.started)


class Train:
    """Starts `train.py` with a home and a temporary folder of its own, below which nothing may run when the test ends."""

    def __init__(self, base: Path, caches: Path) -> None:
        self.base, self.count = base, 0
        self.home = base / "home"
        # Short: sockets of loader workers lie there, and a socket's path has at most 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="train_"))
        self.home.mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        self.environment = {**kept, "HOME": str(self.home), "TMPDIR": str(self.temporary), "MPLCONFIGDIR": str(caches)}
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *overrides: str, **options: Any) -> Finished:
        """Run to the end; options as in `start`."""
        return self.start(*overrides, **options).finish()

    def start(
        self,
        *overrides: str,
        form: str = "python",
        ranks: int = 2,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        timeout: float = 300,
        defaults: bool = True,
    ) -> Running:
        """`form` is python or torchrun (with `ranks`); the run folder is `<base>/run` unless given, or resumed."""
        folder = folder or self.base / "run"
        words = tiny(f"hydra.run.dir={folder}", *overrides) if defaults else list(overrides)
        starter = {
            "python": [sys.executable],
            "torchrun": [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", str(ranks)],
        }[form]
        if form == "torchrun":
            starter += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port
        return self.start_command([*starter, "train.py", *words], folder, environment or {}, timeout)

    def start_command(
        self, command: list[str], folder: Path, environment: dict[str, str] | None = None, timeout: float = 300
    ) -> Running:
        """Any command, from the project's root."""
        self.count += 1
        output = self.base / f"command_{self.count}"
        with open(output.with_suffix(".out"), "w") as out, open(output.with_suffix(".err"), "w") as err:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return Running(process, folder, output, timeout)

    def left(self) -> list[psutil.Process]:
        """Processes that this test started, directly or not, and that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("HOME") == str(self.home) or str(self.base) in " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return found

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """`left`, given up to `seconds` to be empty."""
        until = time.monotonic() + seconds
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """Kill what is left and complain about it."""
        left = self.left_after(2)
        words = [f"{process.pid}: {' '.join(process.cmdline())}" for process in left]
        for process in left:
            process.kill()
        for started in self._started:
            if started.poll() is None:
                _kill_group(started)
        shutil.rmtree(self.temporary, ignore_errors=True)
        assert not words, f"still running after the test: {words}"


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
def finished_run(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Iterator[Finished]:
    """One ordinary run, for tests that look at what a run leaves. Copy the folder before changing it."""
    starter = Train(tmp_path_factory.mktemp("finished"), caches)
    done = starter("parallel=single", "optim.lr=3e-3", "data.limit_train=1256", "checkpoint.every_steps=25")
    assert done.returncode == 0, done.output
    yield done
    starter.close()


def warm_processes() -> Any:
    """The context of multiprocessing whose processes are forked from a server that has done warm.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def in_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(ranks, store, *arguments)` in as many processes, which meet through a file; what each returned, by rank.

    Processes are forked from a server that has imported the project, so that a group of ranks costs no start-up. One
    that raises or dies fails the test with its traceback.
    """
    context = warm_processes()
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank, args=(function, rank, world_size, f"{folder}/store", answers, arguments), daemon=False
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            until = time.monotonic() + timeout
            while len(found) < world_size:
                rank, failure, value = _next_answer(answers, processes, until)
                assert failure is None, f"rank {rank}:\n{failure}"
                found[rank] = value
            for process in processes:
                process.join(timeout=10)
                assert process.exitcode == 0, f"exit code {process.exitcode}"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [found[rank] for rank in range(world_size)]


def _next_answer(answers: Any, processes: list[Any], until: float) -> tuple[int, str | None, Any]:
    while time.monotonic() < until:
        try:
            return answers.get(timeout=0.5)  # type: ignore[no-any-return]
        except queue.Empty:
            dead = [f"rank {i}: {p.exitcode}" for i, p in enumerate(processes) if p.exitcode not in (None, 0)]
            if dead:
                pytest.fail(f"died: {dead}")
    return pytest.fail("the ranks took too long")  # type: ignore[no-any-return]


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, path: str, answers: Any, arguments: tuple[Any, ...]
) -> None:
    import torch
    from torch.distributed import FileStore

    torch.set_num_threads(1)
    place = Ranks(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    try:
        answers.put((rank, None, function(place, FileStore(path, world_size), *arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))


def run_warm(folder: Path, *overrides: str) -> Path:
    """`python train.py <TINY> <overrides>` in warm ranks, into `folder`, which it returns; it must end well."""
    return train_warm(resolved(*overrides), folder)


def train_warm(config: ResolvedConfig, folder: Path) -> Path:
    """The run of a config in warm ranks, into `folder`, which it returns; it must end well."""
    prepare(config, folder)
    ended = warm_ranks(config, folder)
    console = (folder / "console.txt").read_text(encoding="utf-8")
    assert not ended.exit_codes, f"{ended}\n{console}"
    return folder


def warm_ranks(
    config: ResolvedConfig,
    folder: Path,
    rendezvous: object = None,
    environment: dict[str, str] | None = None,
    first: Path | None = None,
    timeout: float = 300,
) -> Ended:
    """Stands for `supervisor.run_ranks`: the same ranks on a prepared folder, in warm processes and without the agent.

    A rank that fails has the others ended, as by the agent. `first`: a Python file that each runs before anything else.
    What they print goes to `console.txt`.
    """
    from torch.distributed import TCPStore

    count = config.parallel.devices if config.parallel.has_ranks else 1
    given = {"RUN_STARTED_AT": str(time.time()), **(environment or {})}
    if config.parallel.has_ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if config.parallel.has_ranks else {}
        processes.append(warm_processes().Process(target=_warm_rank, args=(folder, given | own, first), daemon=False))
        processes[-1].start()
    until = time.monotonic() + timeout
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > until:
            for process in processes:
                process.terminate()
                process.join(timeout=30)
                process.kill()
        time.sleep(0.02)
    codes = {rank: int(process.exitcode or 0) for rank, process in enumerate(processes) if process.exitcode}
    return Ended(exit_codes=codes, world_size=count)


def _warm_rank(folder: Path, environment: dict[str, str], first: Path | None) -> None:
    from src.engine.launch.leaving import leave
    from src.engine.launch.rank import main
    from src.run import run

    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    console = os.open(folder / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(console, 1), os.dup2(console, 2)
    multiprocessing.set_start_method("fork", force=True)  # as in a rank, for its loader workers
    if first is not None:
        spec = importlib.util.spec_from_file_location(first.stem, first)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    leave(main(folder, run))
