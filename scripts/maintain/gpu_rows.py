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
from collections.abc import Callable
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


def python(arguments: list[str], seconds: float) -> Done:
    """Run a Python command with a time limit in seconds. Print the end of its output if it
    fails.
    """
    more = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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
                env={**os.environ, **more},
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        file.seek(0)
        output = file.read()
    if code != 0:
        print(f"{' '.join(arguments)}: exit code {code}\n{output[-6000:]}", flush=True)
    return Done(code, output)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run or sweep. Return an empty dictionary if the file is missing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


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
