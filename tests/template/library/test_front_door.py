"""Tests of train.py as a process."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.template.runs import ROOT, run_python
from timm_parallel.testing.ranks import RANK_VARIABLES

TRAIN = ROOT / "train.py"

# Script that runs train.py and then prints which of torch, timm and torchvision were imported.
SPY = """
import runpy, sys
sys.argv = sys.argv[1:]
code = 0
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as leave:
    code = leave.code or 0
print("\\nimported:", *sorted({"torch", "timm", "torchvision"} & set(sys.modules)))
sys.exit(code)
"""


def run_process(
    *words: str, cwd: Path, spy: bool = True
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run train.py, and return the finished process and its seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["PYTHONPATH"] = str(ROOT)
    program = ("-c", SPY, str(TRAIN)) if spy else (str(TRAIN),)
    started = time.monotonic()
    done = run_python(*program, *words, cwd=cwd, environment=environment)
    return done, time.monotonic() - started


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("modle=resnet18", "modle=resnet18"),
        (
            "parallel=ddp parallel.devices=2 data.batch_size=63 parallel.accelerator=cpu",
            "data.batch_size=63",
        ),
        ("model.name=resnet81", "resnet18"),
        ("data=folder data.root=/missing", "/missing/train"),
    ],
)
def test_invalid_command_fails_quickly_without_importing_torch(
    tmp_path: Path, command: str, named: str
) -> None:
    done, seconds = run_process(*command.split(" "), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr
    assert done.stdout.split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []
    assert seconds < 10, (
        "expected about 1 s on an idle machine; more than 10 s suggests an import of torch"
    )


@pytest.mark.processes
def test_help_shows_options_and_commands_without_importing_torch(tmp_path: Path) -> None:
    done, _ = run_process("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for group in ("model", "data", "parallel", "optim", "experiment", "debug"):
        options = sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
        assert re.search(rf"^{group}: {', '.join(options)}$", done.stdout, re.MULTILINE), group
    assert len(re.findall(r"^\s+python train\.py", done.stdout, re.MULTILINE)) >= 3
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(seconds=1)
def test_cfg_job_shows_all_keys_without_importing_torch(tmp_path: Path) -> None:
    done, _ = run_process("--cfg", "job", "parallel=ddp", "optim.lr=0.25", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("  strategy: ddp", "  lr: 0.25", "  smoothing: 0.0", "seed: 42"):
        assert line in done.stdout.splitlines(), line
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(seconds=1)
def test_bash_completion_installs_and_lists_parallel_strategies(tmp_path: Path) -> None:
    done, _ = run_process("--shell-completion", "install=bash", cwd=tmp_path, spy=False)
    assert done.returncode == 0, done.stderr
    assert "COMP_WORDBREAKS" in done.stdout
    environment = {"COMP_LINE": "python train.py parallel=", "COMP_POINT": "25"}
    environment["PATH"] = os.environ["PATH"]
    words = (str(TRAIN), "--shell-completion", "query=bash")
    done = run_python(*words, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert {"parallel=ddp", "parallel=dp", "parallel=single"} <= set(done.stdout.split())
    assert list(tmp_path.iterdir()) == []
