"""What the container files promise, read from them; the notebook is executed. Images are built by hand: docs/container.md."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "notebooks" / "compare.ipynb"


def services(name: str = "compose.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"])


def stages() -> dict[str, str]:
    """Target -> its lines."""
    parts = re.split(r"(?m)^FROM \S+ AS (\w+)$", DOCKERFILE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_packages_are_those_of_the_lock_file_by_their_hashes_in_one_layer() -> None:
    assert "ARG BASE=" in DOCKERFILE
    assert set(stages()) == {"packages", "train", "tensorboard", "jupyter"}
    with_packages = [name for name, text in stages().items() if "requirements.lock" in text]
    assert with_packages == ["packages"]
    assert "--require-hashes -r requirements.lock" in stages()["packages"]


def test_nothing_runs_as_root_and_nobody_logs_in() -> None:
    for name in ("train", "jupyter"):
        assert re.search(r"(?m)^USER 1000$", stages()[name]), name
        assert stages()[name].index("USER 1000") < stages()[name].index("CMD")
    assert "sshd" not in DOCKERFILE
    assert "docker exec" in DOCKERFILE


def test_ports_are_published_on_loopback_and_servers_alone_listen_there() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "0.0.0.0" not in DOCKERFILE, "an image started without compose stays on its own loopback"


def test_the_three_services_have_targets_and_room_for_batches() -> None:
    found = services()
    assert {name: service["build"]["target"] for name, service in found.items()} == {
        name: name for name in ("train", "tensorboard", "jupyter")
    }
    assert set(found) <= set(stages())
    assert found["train"]["shm_size"] == "8gb"
    assert list(services("compose.gpu.yaml")) == ["train"]


def test_what_is_secret_or_large_stays_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv", ".env", "outputs", "data", "conf/local/default.yaml"} <= set(ignored)


def test_the_development_container_is_the_same_image() -> None:
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    place = ROOT / ".devcontainer" / found["build"]["dockerfile"]
    assert place.resolve() == ROOT / "Dockerfile"
    assert found["build"]["target"] in stages()


def test_the_notebook_is_kept_without_outputs_and_its_tools_apart() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    runtime = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert "jupyter" not in runtime
    assert "nbclient" not in runtime


@pytest.mark.slow(seconds=60)
@pytest.mark.processes
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))), reason="needs requirements-notebook.txt"
)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = json.dumps(notebook["cells"])
    assert "image/png" in shown, "the curves"
    assert "text/markdown" in shown, "the report"
