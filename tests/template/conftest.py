"""Fixtures of the tests that train the template."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock

from tests.template.runs import ROOT, TINY
from timm_parallel.testing.commands import Finished, Train


@pytest.fixture(scope="session")
def tiny_run() -> tuple[str, ...]:
    return TINY


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Finished:
    """Train one run, and return its exit code, output and run folder. Tests in all workers share
    this run, so a test must copy the folder before changing files.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    record = shared / "finished_run.json"
    with FileLock(shared / "finished_run.lock", timeout=300):
        if not record.exists():
            starter = Train(tmp_path_factory.mktemp("finished"), caches, ROOT, TINY)
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
