"""The doctor's judgement, over machines that are not at hand, and one visit to this one."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
from conftest import ROOT, Train

from src.engine.doctor import look
from src.engine.doctor.examine import (
    GIB,
    Finding,
    advice,
    as_dict,
    as_text,
    findings_of,
    findings_of_tries,
    strategies_to_try,
)
from src.engine.doctor.look import Facts

pytestmark = pytest.mark.portable

GPU = {"name": "a GPU", "memory": 80 * GIB}
RAN = {"devices": 1, "seconds": 5.0}


def facts(gpus: int = 0, **changes: Any) -> Facts:
    """A machine on which everything is well."""
    saying = {"version": "2.14.1", "cuda": "13.0", "backends": ["gloo", "nccl"], "mps": False}
    saying |= {"devices": ["a GPU"] * gpus, "peers": gpus * (gpus - 1), "pairs": gpus * (gpus - 1)}
    return Facts(
        **{
            "python": "3.12.1",
            "libraries": {"torch": ("2.14.1", "2.14.1"), "timm": ("1.0.31", "1.0.31")},
            "devices": [GPU] * gpus,
            "visible": gpus,
            "driver": "580.1" if gpus else None,
            "driver_cuda": "13.0" if gpus else None,
            "torch": saying,
            "timm": {"version": "1.0.31"},
            "cores": 16,
            "memory": 64 * GIB,
            "shm": 8 * GIB,
            "open_files": 4096,
            "disk": 100 * GIB,
            "rendezvous": {"said": "here"},
            **changes,
        }
    )


def remedies(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.remedy for finding in found if finding.remedy}


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_nothing_is_mended_that_is_well(gpus: int) -> None:
    assert remedies(findings_of(facts(gpus))) == {}


@pytest.mark.parametrize(
    ("gpus", "cores", "tried"),
    [
        (0, 8, {"single": 1, "dp": 2, "ddp": 2}),
        (0, 1, {"single": 1}),
        (1, 8, {"single": 1}),
        (4, 8, {"single": 1, "dp": 4, "ddp": 4}),
    ],
)
def test_what_could_run_is_tried(gpus: int, cores: int, tried: dict[str, int]) -> None:
    machine = facts(gpus, cores=cores)
    assert strategies_to_try(machine, findings_of(machine)) == tried


@pytest.mark.parametrize(
    ("changes", "name", "said", "stops"),
    [
        ({"python": "3.9.2"}, "Python", "3.11 to 3.13", True),
        ({"python": "3.14.0"}, "Python", "3.11 to 3.13", True),
        ({"libraries": {"torch": ("2.14.1", "2.14.1"), "timm": (None, "1.0.31")}}, "libraries", "pip install -r", True),
        ({"libraries": {"torch": ("2.4.0", "2.14.1")}}, "libraries", "supports torch 2.11 to 2.14", False),
        ({"torch": {"error": "ImportError: libcudart"}}, "torch", "--force-reinstall", True),
        ({"timm": {"error": "operator torchvision::nms does not exist"}}, "torch", "different builds", True),
        ({"can_write": False}, "disk", "paths.output_dir", True),
        ({"disk": GIB}, "disk", "make room", False),
        ({"shm": 2**26}, "/dev/shm", "--shm-size", False),
        ({"open_files": 256}, "open files", "ulimit -n", False),
        ({"memory": GIB}, "memory", "smaller batch", False),
        ({"rendezvous": {"error": "cannot listen"}}, "loopback", "127.0.0.1", False),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(changes: dict[str, Any], name: str, said: str, stops: bool) -> None:
    machine = facts(0, **changes)
    found = findings_of(machine)
    assert list(remedies(found)) == [name]
    assert said in remedies(found)[name]
    assert as_dict(machine, found)["can_train"] is not stops
    assert (strategies_to_try(machine, found) == {}) is stops
    assert ("Training cannot start" in as_text(machine, found)) is stops


@pytest.mark.parametrize(
    ("driver_cuda", "built", "visible", "remedy"),
    [
        ("12.8", "13.0", 2, "/whl/cu126"),
        ("12.0", "13.0", 2, "/whl/cu126"),
        ("11.8", "13.0", 2, "update the driver"),
        ("12.2", None, 2, "/whl/cu126"),
        ("13.0", None, 2, "/whl/cu130"),
        ("13.0", "13.2", 2, "--gpus all"),  # minor versions do not matter
        ("13.0", "13.0", 0, "CUDA_VISIBLE_DEVICES"),
        ("13.0", "13.0", 2, "--gpus all"),
    ],
)
def test_a_torch_that_sees_no_gpu_gets_its_remedy(
    driver_cuda: str, built: str | None, visible: int, remedy: str
) -> None:
    machine = facts(2, driver_cuda=driver_cuda, visible=visible)
    machine.torch |= {"cuda": built, "devices": []}
    said = remedies(findings_of(machine))["GPUs"]
    assert remedy in said
    assert ("/whl/" in said) == ("pip uninstall -y torch" in said), "pip keeps another build of the same version"


def test_missing_peer_access_is_said() -> None:
    machine = facts(2)
    machine.torch["peers"] = 0
    assert "host's memory" in remedies(findings_of(machine))["peer access"]


@pytest.mark.parametrize(
    ("gpus", "failed", "shm", "command"),
    [
        (4, (), 8 * GIB, "parallel=ddp parallel.devices=4 data.workers=4"),
        (4, ("ddp",), 8 * GIB, "parallel=single parallel.devices=1 data.workers=16"),
        (1, (), 8 * GIB, "parallel=single parallel.devices=1 data.workers=16"),
        (0, (), 2**26, "parallel=single parallel.devices=1 data.workers=0"),
    ],
)
def test_the_visit_ends_with_one_command(gpus: int, failed: tuple[str, ...], shm: int, command: str) -> None:
    machine = facts(gpus, shm=shm)
    machine.tries = {
        name: {"error": "rank 1 was killed"} if name in failed else RAN for name in ("single", "dp", "ddp")
    }
    found = findings_of(machine) + findings_of_tries(machine)
    assert advice(machine) == f"python train.py {command}"
    assert as_text(machine, found).endswith(f"Begin with:  python train.py {command}")
    assert set(failed) <= set(remedies(found))


def test_a_step_that_fails_alone_stops_training() -> None:
    machine = facts(0, tries={"single": {"error": "Failed: rank 0: …"}})
    assert as_dict(machine, findings_of(machine) + findings_of_tries(machine))["can_train"] is False


def test_a_probe_that_dies_is_an_answer() -> None:
    assert "no_such" in look.probe("no_such")["error"]


def test_every_library_of_the_requirements_is_looked_at() -> None:
    assert {"torch", "timm", "hydra-core", "psutil"} <= set(look.pins())


@pytest.mark.slow(seconds=25)
@pytest.mark.processes
def test_this_machine_can_train(train: Train) -> None:
    done = train.start_command([sys.executable, "scripts/doctor.py", "--json"], train.base, timeout=600).finish()
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout)
    assert found["can_train"]
    assert found["command"].startswith("python train.py parallel=")
    assert "error" not in found["facts"]["rendezvous"]
    assert "single" in found["facts"]["tries"]
    assert {field.name for field in dataclasses.fields(Facts)} == set(found["facts"])
    assert (ROOT / "scripts" / "doctor.py").exists()
