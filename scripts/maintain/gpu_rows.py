"""Classes and functions for the checks of `make gpu-check`: rows of the report, checks with a time
limit, and commands that are ended at the limit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Accelerator of all checks. A dry run without a GPU replaces it.
ACCELERATOR = "cuda"


@dataclass
class Row:
    """A row of the report. `wrong` is True if the figure is not what it must be, and `is_run` is
    False if the figure is the reason why there is none.
    """

    what: str
    figure: str
    wrong: bool = False
    is_run: bool = True


# Function that runs a check within a number of seconds, and returns rows of the report.
Check = Callable[[float], list[Row]]


@dataclass(frozen=True)
class Part:
    """A check with a name and a time limit in seconds. It returns rows of the report."""

    name: str
    seconds: float
    run: Check
    # True if the check runs only with `make gpu-check FULL=1`.
    needs_full: bool = False
    # Least number of devices that the check needs.
    devices: int = 1
    # True if no other check may run at the same time, because this check measures time, needs all
    # memory of the device, or counts the processes on it.
    alone: bool = False


@dataclass(frozen=True)
class Done:
    """A command that has ended. `code` is its exit code, or None if it was ended at its time
    limit.
    """

    code: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Run(Done):
    """A command of train.py that has ended, with its run folder or sweep folder."""

    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return self.read("result.json")

    @property
    def statuses(self) -> list[str]:
        """Status of each job of the sweep, such as done or failed."""
        return [job["status"] for job in self.read("jobs.json").get("jobs", [])]

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run or sweep folder. Return an empty dictionary if the file is
        missing.
        """
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class Clock:
    """Seconds that are left of the time limit of a check."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(1.0, self._until - time.monotonic())


def python(
    arguments: list[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Done:
    """Run a Python command with a time limit in seconds. Print the end of its output if it
    fails.
    """
    variables = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **(environment or {}),
    }
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        try:
            code: int | None = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
                env=variables,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        file.seek(0)
        output = file.read()
    if code != 0:
        print(f"{' '.join(arguments)}: exit code {code}\n{output[-6000:]}", flush=True)
    return Done(code, output, time.monotonic() - began)


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary folder for the runs of a check, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        yield Path(folder)


def train(
    folder: Path,
    *overrides: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    sweep: bool = False,
) -> Run:
    """Run train.py with a tiny model on CUDA in a run folder or sweep folder. The given overrides
    replace the default ones.
    """
    words = [
        "model=tiny",
        "print_config=false",
        f"parallel.accelerator={ACCELERATOR}",
        "data.workers=0",
        *overrides,
    ]
    last = {word.partition("=")[0]: word for word in words}
    place = f"hydra.{'sweep' if sweep else 'run'}.dir={folder}"
    done = python(
        ["train.py", *(["-m"] if sweep else []), *last.values(), place], seconds, environment
    )
    return Run(done.code, done.output, done.seconds, folder)


def tests(*names: str) -> Check:
    """Return a check that runs pytest tests with the mark `gpu`, with a row for each test. The
    arguments are test files or names of tests.
    """

    def run(seconds: float) -> list[Row]:
        # Load pytest-timeout by the name of its entry point, because
        # PYTEST_DISABLE_PLUGIN_AUTOLOAD turns off all installed plugins. Where they are loaded
        # anyway, the name of its module would load it a second time, which pytest refuses.
        plain = ["-p", "no:cacheprovider", "-p", "timeout"]
        done = python(["-m", "pytest", "-m", "gpu", "-vv", "--tb=short", *plain, *names], seconds)
        rows = [
            Row(test, outcome, outcome in ("failed", "error"), is_run=outcome != "skipped")
            for test, outcome in outcomes(done.output)
        ]
        if done.code is None:
            rest = f"the tests after {rows[-1].what if rows else 'none'}"
            rows.append(Row(rest, f"not within {seconds:.0f} s", True, is_run=False))
        return rows or [Row(" ".join(names), "no test ran", True, is_run=False)]

    return run


def outcomes(output: str) -> list[tuple[str, str]]:
    """Parse the output of `pytest -v`. Return pairs (test, outcome) with the outcome passed,
    failed, error or skipped.
    """
    lines = (
        re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)
        for line in output.splitlines()
    )
    return [(line[1].rpartition("/")[2], line[2].lower()) for line in lines if line is not None]


def same(what: str, value: Any, expected: Any) -> Row:
    """Build a row of the report that shows a value. The row is marked as wrong if the value differs
    from the expected one.
    """
    figure = str(value) if value == expected else f"{value}, expected {expected}"
    return Row(what, figure, value != expected)


def near(what: str, value: float | None, expected: float | None, tolerance: float) -> Row:
    """Build a row of the report that shows a value. The row is marked as wrong if the value differs
    from the expected one by more than an absolute tolerance.
    """
    if value is None or expected is None:
        return Row(what, f"{value}, expected {expected}", True)
    difference = abs(value - expected)
    return Row(
        what, f"{value:.5f} and {expected:.5f}, difference {difference:.1e}", difference > tolerance
    )
