"""The house keeps its plan: who may import whom, which library is known where, and no room grows out of shape."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
OPTION_FILES = sorted((ROOT / "conf").rglob("*.yaml"))

# Room -> rooms of src/ that it may import. A room is a folder or a file of src/. What is not listed may import anything.
MACHINE = {"machine", "process", "draws", "pulse", "secrets"}
KNOWN = {"config", "records", "telemetry"} | MACHINE
MAY_IMPORT = {
    "machine": set(),
    "process": set(),
    "draws": set(),
    "pulse": set(),
    "ownership": set(),
    "secrets": set(),
    "records": {"secrets"},
    "config": {"records", "machine", "secrets"},
    "telemetry": {"config", "records", "machine", "secrets"},
    "data": KNOWN,
    "parallel": KNOWN | {"launch.ranks"},
    "model": KNOWN | {"data.datasets", "data.augment", "weights"},  # what the images are decides head and channels
    "weights": set(),
    "optim": KNOWN,
    "training": KNOWN | {"parallel", "data.augment"},  # the loop speaks to the strategy that it is given
    "environment": {"config", "records", "machine"},
    "launch": {"config", "records", "environment", "machine", "process", "pulse", "ownership", "secrets"},
    "study": {"config", "records", "machine", "process", "ownership", "secrets"},
}
EXTRA = {  # file -> what it alone may import besides
    "src/launch/worker.py": {"run"},
    "src/study/sweep.py": {"launch.job", "launch.agent"},
    "src/study/board.py": {"data.folders"},  # looks at the images before a sweep starts; no torch
}
BY_HAND = ("scripts/bench_loop.py", "scripts/bench_peers.py")  # other people's ways, to be measured against
# Library -> where it may be named. A folder ends with a slash.
FENCES = {
    r"(hydra|omegaconf)": (
        "train.py",
        "evaluate.py",
        "src/config/",
        "src/launch/resume.py",
        "src/study/sweep.py",
        "src/study/search.py",
        "scripts/bench_parts.py",
    ),
    r"torch\.distributed": ("src/parallel/", "src/launch/", *BY_HAND),
    r"(.*\.)?(DataParallel|DistributedDataParallel)": ("src/parallel/", "src/launch/", *BY_HAND),
    r"timm": (
        "src/model.py",
        "src/cifar_resnet.py",
        "src/weights.py",
        "src/export.py",
        "src/optim.py",
        "src/data/",
        "src/training/",
        *BY_HAND,
        "scripts/bench_data.py",
        "scripts/bench_measures.py",
    ),
}
ONLY_TYPES = {("src/run.py", "torch.distributed")}  # may be named for a type checker, not imported when run
NO_TORCH = (
    "src/study/",
    "src/config/",
    "src/records.py",
    "src/machine.py",
    "src/environment.py",
    "src/process.py",
    "src/secrets.py",
)
TORCH_IN_FUNCTIONS_ONLY = ("train.py", "evaluate.py", "src/launch/")
DRAWERS = {"utils", "util", "common", "misc", "helpers", "helper", "base", "extras"}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 260, 70


@dataclass(frozen=True)
class Named:
    """A dotted name that a file imports, or uses as an attribute of something imported."""

    name: str
    line: int
    in_function: bool
    for_types: bool  # below `if TYPE_CHECKING:`


def names_in(source: str) -> Iterator[Named]:
    """Every import of a file, one entry per imported name, and dotted uses such as `torch.distributed.barrier`."""
    yield from _walk(ast.parse(source), in_function=False, for_types=False)


def _walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Named]:
    for child in ast.iter_child_nodes(node):
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typed = for_types or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
        found: list[str] = []
        if isinstance(child, ast.Import):
            found = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            found = [f"{module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.Attribute):
            found = [ast.unparse(child)] if re.fullmatch(r"[\w.]+", ast.unparse(child)) else []
        for name in found:
            yield Named(name, child.lineno, in_function, for_types)
        yield from _walk(child, inside, typed)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room_of(file: str) -> str:
    """`src/launch/job.py` -> `launch`, `src/model.py` -> `model`, `train.py` -> ``."""
    parts = Path(file).with_suffix("").parts
    return parts[1] if parts[0] == "src" and len(parts) > 1 else ""


def wrong_imports(file: str, source: str) -> list[str]:
    """What `file` imports against MAY_IMPORT."""
    room = room_of(file)
    if room not in MAY_IMPORT:
        return []
    allowed = MAY_IMPORT[room] | EXTRA.get(file, set()) | {room}
    wrong = []
    for named in names_in(source):
        if named.name.startswith("."):
            wrong.append(f"{file}:{named.line} imports {named.name}: give its full name")
        elif is_below(named.name, "src") and not named.for_types:
            below = named.name.removeprefix("src").removeprefix(".")
            if not any(is_below(below, place) for place in allowed):
                wrong.append(f"{file}:{named.line} {room} may not import {named.name}")
    return wrong


def over_fences(file: str, source: str) -> list[str]:
    """Where `file` names a library outside that library's fence."""
    wrong = []
    for named in names_in(source):
        for library, places in FENCES.items():
            if not re.fullmatch(rf"{library}(\..*)?", named.name):
                continue
            typed = named.for_types and any(file == f and is_below(named.name, lib) for f, lib in ONLY_TYPES)
            if not typed and not any(
                file == place or (place[-1] == "/" and file.startswith(place)) for place in places
            ):
                wrong.append(f"{file}:{named.line} {named.name} belongs in {', '.join(places)}")
    return wrong


def torch_where_it_must_not_be(file: str, source: str) -> list[str]:
    """No torch in the path of --help, --cfg, a refusal, or a report."""
    wrong = []
    for named in names_in(source):
        heavy = any(is_below(named.name, library) for library in ("torch", "torchvision", "timm"))
        if not heavy or named.for_types:
            continue
        if file.startswith(NO_TORCH) or (file.startswith(TORCH_IN_FUNCTIONS_ONLY) and not named.in_function):
            wrong.append(f"{file}:{named.line} imports {named.name}")
    return wrong


def run_in_the_parent(file: str, source: str) -> list[str]:
    """The parent starts src.run as a process: only a function of launch/worker.py may import it."""
    if not file.startswith("src/launch/"):
        return []
    return [
        f"{file}:{named.line} imports {named.name}"
        for named in names_in(source)
        if is_below(named.name, "src.run") and not (file == "src/launch/worker.py" and named.in_function)
    ]


def long_functions(file: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LINES_OF_A_FUNCTION:
                found.append(f"{file}:{node.lineno} {node.name} has {lines} lines")
    return found


CHECKS = (wrong_imports, over_fences, torch_where_it_must_not_be, run_in_the_parent, long_functions)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_keeps_to_its_room(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert [line for check in CHECKS for line in check(name_of(path), source)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_OF_A_FILE
    assert path.stem not in DRAWERS, "this name says that nobody knew where its content belonged"
    assert not DRAWERS & set(path.relative_to(ROOT).parts[:-1])


@pytest.mark.parametrize("path", OPTION_FILES, ids=name_of)
def test_an_option_file_opens_with_a_comment_that_holds_its_command(path: Path) -> None:
    opening = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        opening.append(line)
    said = [line for line in opening if not line.startswith("# @package")]
    assert len(said) >= 2, f"{name_of(path)} must open with what it is and its command"
    group, option = path.parent.name, path.stem
    commands = [line for line in said if re.search(r"\b(python|torchrun .*)\s*train\.py", line)]
    assert commands, f"{name_of(path)} names no command"
    if path.parent != ROOT / "conf" and group not in ("hydra", "train", "local"):
        assert any(f"{group}={option}" in line for line in commands), f"no command chooses {group}={option}"
    if group == "experiment":
        assert any(line.startswith("# Expected: ") for line in said), f"{name_of(path)} names no expected result"


def test_every_room_of_the_table_exists() -> None:
    rooms = {path.stem for path in (ROOT / "src").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(MAY_IMPORT) - rooms == set()
    assert {file for file in EXTRA if not (ROOT / file).exists()} == set()


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("src/records.py", "from src.config.schema import Config", "records may not import src.config.schema"),
        ("src/telemetry/console.py", "import src.training.loop", "telemetry may not import src.training.loop"),
        ("src/config/rules.py", "def f():\n    from src.launch import job", "config may not import src.launch.job"),
        ("src/data/loading.py", "from src import model", "data may not import src.model"),
        ("src/data/loading.py", "from ..model import build_model", "give its full name"),
        ("src/parallel/single.py", "from src.launch.job import run_job", "may not import src.launch.job"),
        ("src/study/report.py", "from src.launch.job import run_job", "study may not import src.launch.job"),
        ("src/study/sweep.py", "from src.launch.worker import main", "study may not import src.launch.worker"),
        ("src/launch/job.py", "from src.study import sweep", "launch may not import src.study.sweep"),
        ("src/launch/job.py", "def f():\n    from src.run import run", "imports src.run.run"),
        ("src/launch/worker.py", "from src.run import run", "imports src.run.run"),
        ("src/run.py", "import omegaconf", "omegaconf belongs in"),
        ("src/study/report.py", "from hydra.core import plugins", "hydra.core.plugins belongs in"),
        ("src/run.py", "import torch.distributed as dist", "torch.distributed belongs in"),
        ("src/run.py", "from torch import distributed", "torch.distributed belongs in"),
        ("src/run.py", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier belongs in"),
        ("src/build.py", "import torch\nmodel = torch.nn.DataParallel(model)", "torch.nn.DataParallel belongs in"),
        ("src/build.py", "from torch.nn.parallel import DistributedDataParallel", "DistributedDataParallel belongs in"),
        ("src/run.py", "import timm", "timm belongs in"),
        ("src/study/tables.py", "def f():\n    import torch", "imports torch"),
        ("src/launch/agent.py", "import torch", "imports torch"),
        ("train.py", "from timm import create_model", "imports timm"),
        ("src/run.py", "def f():\n" + "    pass\n" * 70, "f has 71 lines"),
    ],
)
def test_the_checks_can_fail(file: str, source: str, complaint: str) -> None:
    found = [line for check in CHECKS for line in check(file, source)]
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("src/run.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch.distributed import Store"),
        ("src/launch/worker.py", "def f():\n    from src.run import run"),
        ("src/launch/agent.py", "def f():\n    from torch.distributed.launcher.api import LaunchConfig"),
        ("src/parallel/distributed.py", "import torch.distributed as dist"),
        ("src/data/sampling.py", "from torch.utils.data import DistributedSampler"),
        ("src/run.py", "def f():\n" + "    pass\n" * 69),
    ],
)
def test_the_checks_allow_what_the_plan_allows(file: str, source: str) -> None:
    assert [line for check in CHECKS for line in check(file, source)] == []
