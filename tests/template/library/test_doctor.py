"""Tests of the diagnoses of scripts/doctor.py on simulated machines and on this machine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.template.runs import ROOT
from timm_parallel.lab import doctor as examination
from timm_parallel.lab.doctor import (
    GIB,
    Finding,
    MachineReport,
    advice,
    as_text,
    findings_of,
    probe,
    strategies_to_try,
    try_strategy,
)
from timm_parallel.machine.hardware import CudaDevice, Driver
from timm_parallel.record.result import Result, write_result
from timm_parallel.testing.commands import Train

pytestmark = pytest.mark.portable


def facts(gpus: int = 0, **changes: Any) -> MachineReport:
    """Build the report of a machine without problems. `changes` replaces fields of the report."""
    saying = {"version": "2.14.1", "timm": "1.0.31", "cuda": "13.0", "mps": False}
    saying |= {"devices": gpus}
    return MachineReport(
        **{
            "cuda": Driver(
                tuple(CudaDevice(n, "a GPU", 80 * GIB, f"GPU-{n}") for n in range(gpus))
            ),
            "driver": "580.1" if gpus else None,
            "torch": saying,
            "cores": 16,
            "shm": 8 * GIB,
            "disk": 100 * GIB,
            **changes,
        }
    )


def remedies(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.remedy for finding in findings if finding.remedy}


@pytest.mark.parametrize(
    ("gpus", "cores", "tried"),
    [
        (0, 8, {"single": 1, "dp": 2, "ddp": 2, "fsdp": 2}),
        (0, 1, {"single": 1}),
        (1, 8, {"single": 1}),
        (4, 8, {"single": 1, "dp": 4, "ddp": 4, "fsdp": 4}),
    ],
)
def test_doctor_tries_what_could_run_and_suggests_no_remedy_without_a_problem(
    gpus: int, cores: int, tried: dict[str, int]
) -> None:
    machine = facts(gpus, cores=cores)
    assert strategies_to_try(machine) == tried
    assert remedies(findings_of(machine)) == {}


@pytest.mark.parametrize(
    ("changes", "name", "remedy", "stops"),
    [
        ({"torch": {"error": "ImportError: libcudart"}}, "torch", "--force-reinstall", True),
        ({"can_write": False}, "disk", "paths.output_dir", True),
        ({"disk": GIB}, "disk", "free space", False),
        ({"shm": 2**26}, "/dev/shm", "--shm-size", False),
    ],
)
def test_doctor_reports_broken_torch_disk_or_shared_memory_with_a_remedy(
    changes: dict[str, Any], name: str, remedy: str, stops: bool
) -> None:
    machine = facts(0, **changes)
    findings = findings_of(machine)
    assert list(remedies(findings)) == [name]
    assert remedy in remedies(findings)[name]
    assert any(finding.stops for finding in findings) is stops
    assert (strategies_to_try(machine) == {}) is stops
    assert ("Training cannot start" in as_text(machine, findings)) is stops


def test_doctor_names_remedy_or_reason_of_the_driver_when_no_gpu_can_be_used() -> None:
    machine = facts(2)
    machine.torch["devices"] = 0
    assert "--force-reinstall" in remedies(findings_of(machine))["GPUs"]
    machine = facts(0, cuda=Driver(problem="cuInit failed (CUDA_VISIBLE_DEVICES=7)"))
    finding = next(finding for finding in findings_of(machine) if finding.name == "GPUs")
    assert "cuInit failed" in finding.text and finding.remedy and not finding.stops


@pytest.mark.parametrize(
    ("gpus", "failed", "shm", "command"),
    [
        (4, (), 8 * GIB, "parallel=ddp parallel.devices=4"),
        (4, ("ddp",), 8 * GIB, "parallel=single parallel.devices=1"),
        (1, (), 8 * GIB, "parallel=single parallel.devices=1"),
        (0, (), None, "parallel=single parallel.devices=1"),
        (0, (), 2**26, "parallel=single parallel.devices=1 data.workers=0"),
    ],
)
def test_doctor_report_ends_with_training_command(
    gpus: int, failed: tuple[str, ...], shm: int | None, command: str
) -> None:
    machine = facts(gpus, shm=shm)
    machine.tries = {
        name: "rank 1 was killed" if name in failed else "" for name in ("single", "dp", "ddp")
    }
    findings = findings_of(machine)
    assert advice(machine) == f"python train.py {command}"
    assert as_text(machine, findings).endswith(f"Start with:  python train.py {command}")
    assert set(failed) <= set(remedies(findings))
    machine.tries["single"] = "Failed: rank 0: …"
    assert any(finding.stops for finding in findings_of(machine))


@pytest.mark.parametrize(
    "reason", ["rank 0: RuntimeError: no kernel", None], ids=["failed", "refused"]
)
def test_doctor_trial_run_returns_the_failure_reason_or_the_last_line_of_output(
    monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if reason is not None:
            [folder] = [
                word.partition("=")[2] for word in command if word.startswith("hydra.run.dir=")
            ]
            Path(folder).mkdir()
            write_result(Path(folder), Result("failed", reason))
        return subprocess.CompletedProcess(command, 1, "", "something else\nthe last line\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert try_strategy("ddp", 2) == (reason or "the last line")


def test_quick_doctor_trains_no_step_and_suggests_all_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def record(strategy: str, devices: int) -> str:
        tried.append(strategy)
        return ""

    monkeypatch.setattr(examination, "MachineReport", lambda: facts(4))
    monkeypatch.setattr(examination, "try_strategy", record)
    assert examination.examine(as_json=True, quick=True) == 0
    quick = capsys.readouterr()
    assert tried == [] and "quick=true" not in quick.err
    assert json.loads(quick.out)["command"] == "python train.py parallel=ddp parallel.devices=4"
    # The whole check names the way to leave the steps out in its first line.
    assert examination.examine(as_json=True) == 0
    assert tried == ["single", "dp", "ddp", "fsdp"]
    assert "quick=true" in capsys.readouterr().err.splitlines()[0]


def test_doctor_reports_the_error_when_a_probe_process_fails() -> None:
    assert "no_such" in probe("timm_parallel.lab.no_such")["error"]


@pytest.mark.slow(seconds=25)
@pytest.mark.nightly
def test_doctor_script_prints_can_train_and_a_command_on_this_machine(train: Train) -> None:
    done = train.start_command(
        [sys.executable, "scripts/doctor.py", "--json"], train.base, timeout=600
    ).finish()
    assert done.returncode == 0, done.output
    findings = json.loads(done.stdout)
    assert findings["can_train"]
    assert findings["command"].startswith("python train.py parallel=")
    assert "single" in findings["facts"]["tries"] and "error" not in findings["facts"]["torch"]
    assert {field.name for field in dataclasses.fields(MachineReport)} == set(findings["facts"])
    assert (ROOT / "scripts" / "doctor.py").exists()
