"""Classes that start commands as processes for tests. When a test ends, all processes that it
started must have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from timm_parallel.machine.platform import STOP_SIGNALS
from timm_parallel.machine.ranks import NEEDED
from timm_parallel.testing.configs import merged, read_lines

Refuse = Callable[..., str]
NOT_HANDED_ON = (
    *NEEDED,
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "RUN_STARTED_AT",
    "COLUMNS",
)


@dataclass
class Finished:
    """Exit code, output, run folder and duration of a command that has ended."""

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
    """Command that still runs. The output of the command goes to files, because a pipe that nothing
    reads would fill and block the command.
    """

    process: subprocess.Popen[str]
    folder: Path
    output: Path
    timeout: float
    started: float = field(default_factory=time.monotonic)

    def workers(self) -> dict[int, psutil.Process]:
        """Return the rank processes that the command has started so far, as a dictionary from rank
        number to process.
        """
        workers = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if (
                    "timm_parallel.rank" in child.cmdline()
                    and child.parent().pid == self.process.pid
                ):
                    workers[int(child.environ().get("RANK", "0"))] = child
            except (psutil.NoSuchProcess, AttributeError):
                continue
        return workers

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Call the function `condition` every 50 ms until it returns a true value, and return that
        value.

        The test fails if the command ends or exceeds its time limit first.
        """
        while not (value := condition()):
            if self.process.poll() is not None or time.monotonic() - self.started > self.timeout:
                pytest.fail(
                    f"the command ended or timed out before {condition}: {self.finish().output}"
                )
            time.sleep(0.05)
        return value

    def wait_for_steps(self) -> None:
        """Wait until metrics.jsonl of the run contains a line."""
        log = self.folder / "metrics.jsonl"
        self.wait_for(lambda: log.exists() and log.stat().st_size > 0)

    def signal(self, number: int) -> Finished:
        """Send a signal to the command, but not to its child processes, and wait until the command
        ends. The field `seconds` of the result is the time since the signal.
        """
        self.process.send_signal(number)
        self.started = time.monotonic()
        return self.finish()

    def finish(self) -> Finished:
        """Wait until the command ends, and return its exit code and output. If the command exceeds
        its time limit, kill its process group and fail the test.
        """
        left = self.timeout - (time.monotonic() - self.started)
        try:
            code = self.process.wait(timeout=max(0.1, left))
        except subprocess.TimeoutExpired:
            _kill_group(self.process)
            pytest.fail(
                f"the command did not end within {self.timeout} s:\n{self._finished(-1).output}"
            )
        return self._finished(code)

    def _finished(self, code: int) -> Finished:
        out, err = (self.output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        return Finished(code, out, err, self.folder, time.monotonic() - self.started)


class Train:
    """Starter of `train.py` and other commands for a test. All commands use a home folder and a
    temporary folder of the test. `close` fails the test if any of the started processes still runs.

    `root`: folder of the project, in which commands start. `tiny_run`: overrides of a tiny training
    run.
    """

    def __init__(self, base: Path, caches: Path, root: Path, tiny_run: Sequence[str]) -> None:
        self.base, self.root, self.tiny_run, self.count = base, root, tiny_run, 0
        self.home = base / "home"
        # Keep the path of the temporary folder short. Loader workers create sockets in this folder,
        # and the path of a socket has at most 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="train_"))
        self.home.mkdir()
        kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        self.environment = {
            **kept,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "MPLCONFIGDIR": str(caches),
        }
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *overrides: str, **options: Any) -> Finished:
        """Start train.py with the options of the method `start`, wait until the command ends, and
        return its exit code and output.
        """
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
        """Start train.py and return the running command.

        `form` selects plain python, or torchrun with `ranks` ranks. `folder` is the run folder, by
        default `<base>/run`. `defaults` adds the overrides of a tiny training run to the command
        line.
        """
        folder = folder or self.base / "run"
        words = [*overrides]
        if defaults:
            words = merged(*self.tiny_run, f"hydra.run.dir={folder}", *overrides)
        starter = {
            "python": [sys.executable],
            "torchrun": [
                str(Path(sys.executable).parent / "torchrun"),
                "--nproc-per-node",
                str(ranks),
            ],
        }[form]
        if form == "torchrun":
            # With port 0, torchrun chooses a free port, so that concurrent tests do not collide.
            starter += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return self.start_command(
            [*starter, "train.py", *words], folder, environment or {}, timeout
        )

    def start_command(
        self,
        command: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        timeout: float = 300,
    ) -> Running:
        """Start any command in the root folder of the project, and return the running command."""
        self.count += 1
        output = self.base / f"command_{self.count}"
        with (
            open(output.with_suffix(".out"), "w") as out,
            open(output.with_suffix(".err"), "w") as err,
        ):
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        self._started.append(process)
        return Running(process, folder, output, timeout)

    def left(self) -> list[psutil.Process]:
        """Return the processes that this test has started and that still run. Descendants are
        included.
        """
        running = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("HOME") == str(self.home) or str(
                    self.base
                ) in " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return running

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """Wait up to `seconds` until all processes of this test have ended. Return the processes
        that still run.
        """
        until = time.monotonic() + seconds
        while (running := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return running

    def close(self) -> None:
        """Kill all processes that this test has started and that still run. Fail the test if there
        were any.
        """
        left = self.left_after(2)
        words = [f"{process.pid}: {' '.join(process.cmdline())}" for process in left]
        for process in left:
            process.kill()
        for started in self._started:
            if started.poll() is None:
                _kill_group(started)
        shutil.rmtree(self.temporary, ignore_errors=True)
        assert not words, f"still running after the test: {words}"


def heed_signals() -> None:
    """Reset the stop signals to their default action in a new child process. A shell or `nohup` may
    have set them to be ignored, and train.py would then ignore them too.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the running processes that belong to a run folder. Most of them have the folder in
    their command line. A sweep job that is forked from a server has the command line of the server,
    and is recognized by an open file in the folder.
    """
    running = []
    for process in psutil.process_iter():
        try:
            opened = (
                [file.path for file in process.open_files()]
                if "--serve" in process.cmdline()
                else []
            )
            if any(str(folder) in text for text in (*process.cmdline(), *opened)):
                running.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return running


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
