"""Building blocks of `make gpu-check`: a row of its report, a part with its time limit, and
commands that end in time.
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
# Simulated devices (make test-simulated) show no speed, no real memory and no compiled kernels.
SIMULATED = "SIMCUDA" in os.environ


@dataclass
class Row:
    """A line of the report. `wrong`: the figure is not what it must be."""

    what: str
    figure: str
    wrong: bool = False


# Takes the seconds that it may use.
Check = Callable[[float], list[Row]]


@dataclass(frozen=True)
class Part:
    """A check that returns rows within `seconds`."""

    name: str
    seconds: float
    run: Check
    needs_full: bool = False  # only with FULL=1
    devices: int = 1
    simulated: bool = True  # False: simulated devices cannot show it


@dataclass(frozen=True)
class Done:
    """A command that has ended. `code` is None if it was ended at its time limit."""

    code: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Run(Done):
    """A command of train.py with its run or sweep folder."""

    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return self.read("result.json")

    @property
    def statuses(self) -> list[str]:
        """Status of each job of a sweep."""
        return [job["status"] for job in self.read("jobs.json").get("jobs", [])]

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder; an empty dictionary if it is missing."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class Clock:
    """Remaining seconds of a part."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(1.0, self._until - time.monotonic())


def python(
    arguments: list[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Done:
    """Run a Python command for at most `seconds`. Prints the end of its output if it fails."""
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
    """Make a temporary folder for the runs of a part."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        yield Path(folder)


def train(
    folder: Path,
    *overrides: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    sweep: bool = False,
) -> Run:
    """Run train.py with a tiny model on CUDA in `folder`, which may be a sweep folder. Later
    overrides win.
    """
    words = [
        "model=tiny",
        "print_config=false",
        "parallel.accelerator=cuda",
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
    """Return a part that runs the tests marked `gpu` of these files or test names, with a row per
    test.
    """

    def run(seconds: float) -> list[Row]:
        # Other installed plugins are not loaded.
        plain = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
        done = python(["-m", "pytest", "-m", "gpu", "-vv", "--tb=short", *plain, *names], seconds)
        rows = [Row(test, verdict, verdict != "passed") for test, verdict in outcomes(done.output)]
        if done.code is None:
            rest = f"the tests after {rows[-1].what if rows else 'none'}"
            rows.append(Row(rest, f"not run within {seconds:.0f} s", True))
        return rows or [Row(" ".join(names), "no test ran", True)]

    return run


def outcomes(output: str) -> list[tuple[str, str]]:
    """Parse the output of `pytest -v`: (test, passed, failed or error) per line."""
    lines = (re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR)\b", line) for line in output.splitlines())
    return [(line[1].rpartition("/")[2], line[2].lower()) for line in lines if line is not None]


def same(what: str, value: Any, expected: Any) -> Row:
    """Compare a figure with the value that it must have."""
    figure = str(value) if value == expected else f"{value}, expected {expected}"
    return Row(what, figure, value != expected)


def near(what: str, value: float | None, expected: float | None, tolerance: float) -> Row:
    """Compare a figure with an expected one, within an absolute tolerance."""
    if value is None or expected is None:
        return Row(what, f"{value}, expected {expected}", True)
    difference = abs(value - expected)
    return Row(
        what, f"{value:.5f} and {expected:.5f}, difference {difference:.1e}", difference > tolerance
    )
