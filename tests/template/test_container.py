"""Container files have the documented properties, and the notebook runs. No image is built."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.template.runs import ROOT
from timm_parallel.config.compose import compose_command
from timm_parallel.testing.configs import parse

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "notebooks" / "compare.ipynb"


def services(name: str = "compose.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"])


def stages() -> dict[str, str]:
    """Return the text of the Dockerfile by build stage."""
    parts = re.split(r"(?m)^FROM \S+ AS (\w+)$", DOCKERFILE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_dockerfile_has_the_c_compiler_that_torch_compile_calls_on_a_gpu() -> None:
    [installed] = re.findall(
        r"(?m)^RUN apt-get update && apt-get install (.*?) && rm -rf /var/lib/apt/lists", DOCKERFILE
    )
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    assert installed in stages()["packages"]


def test_dockerfile_runs_as_non_root_user_without_ssh_server() -> None:
    for name in ("train", "jupyter"):
        assert re.search(r"(?m)^USER 1000$", stages()[name]), name
        assert stages()[name].index("USER 1000") < stages()[name].index("CMD")
    assert "sshd" not in DOCKERFILE


def test_compose_file_publishes_ports_on_loopback_only() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "0.0.0.0" not in DOCKERFILE, (
        "expected loopback only when the image is started without compose"
    )


def test_dockerignore_excludes_secrets_data_and_outputs() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {
        ".git",
        ".venv",
        ".env",
        "outputs",
        "data",
        "conf/local/default.yaml",
        "conf/local/slurm.sh",
    } <= set(ignored)


def test_code_of_the_notebook_compiles_and_its_sweep_is_a_valid_command() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lists = {
        ast.unparse(statement.targets[0]): statement.value
        for source in code
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
    }
    overrides = [word for name in ("STRATEGIES", "SHORT") for word in ast.literal_eval(lists[name])]
    assert compose_command(parse("-m", *overrides)).config.sweep.repeats == 2


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="needs requirements-notebook.txt",
)
def test_notebook_runs_and_shows_plots_and_the_report(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = [cell for cell in notebook["cells"] if "sweep.repeats=2" in cell["source"]]
    settings["source"] = (
        settings["source"]
        .replace("sweep.repeats=2", "sweep.repeats=1")
        # Leave out ddp, because jobs with one rank start faster: they are forked from a warm
        # server.
        .replace("parallel=single,dp,ddp", "parallel=single,dp")
    )
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    shown = json.dumps(notebook["cells"])
    assert "image/png" in shown, "expected plots of the curves"
    assert "text/markdown" in shown, "expected the report"
