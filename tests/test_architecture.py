"""The house keeps its plan: who may import whom, which library is known where, and no room grows out of shape."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
OPTION_FILES = sorted((ROOT / "conf").rglob("*.yaml"))

# Room -> rooms of src/ that it may import, one floor after the other from the ground up. The law: nothing of the engine
# imports the front (run, models, data, training, parallel, trained), so that a newer engine replaces it as one folder.
MAY_IMPORT: dict[str, set[str]] = {
    "schema": set(),
    "engine.machine": {"schema"},
    "engine.record": {"schema", "engine.machine"},
    "engine.config": {"schema", "engine.machine"},
    "engine.launch": {"schema", "engine.machine", "engine.record", "engine.config"},
    "engine.report": {"schema", "engine.machine", "engine.record", "engine.config"},
    "engine.doctor": {"schema", "engine.machine", "engine.record", "engine.config", "engine.launch"},
    "engine.sweep": {"schema", "engine.machine", "engine.record", "engine.config", "engine.launch", "engine.report"},
}
FRONT = {"schema", "engine.machine", "engine.record"}
STARTED_BY = {"engine.config", "engine.launch.rank"}  # the engine, as a rank sees it
MAY_IMPORT |= {
    "data": FRONT,
    "parallel": FRONT,
    "models": FRONT | {"data"},  # what the images are decides head and channels
    "training": FRONT | {"data", "parallel"},  # the loop speaks to the strategy that it is given
    "run": FRONT | {"data", "parallel", "models", "training", "trained"} | STARTED_BY,
    "trained": FRONT | {"data", "parallel", "models", "training", "engine.config"},
}
BY_HAND = (
    "scripts/maintain/bench_loop.py",
    "scripts/maintain/bench_peers.py",
)  # other people's ways, to be measured against
# Library -> where it may be named. A folder ends with a slash.
FENCES = {
    r"(hydra|omegaconf)": (
        "train.py",
        "evaluate.py",
        "src/engine/config/",
        "src/engine/launch/resume.py",
        "src/engine/sweep/",
        "scripts/maintain/bench_parts.py",
    ),
    r"torch\.distributed": (
        "src/parallel/",
        "src/engine/launch/",
        "src/engine/machine/ranks.py",
        "src/engine/doctor/probe.py",
        *BY_HAND,
    ),
    r"(.*\.)?(DataParallel|DistributedDataParallel)": ("src/parallel/", "src/engine/launch/", *BY_HAND),
    r"timm": (
        "src/models/build.py",
        "src/models/cifar_resnet.py",
        "src/models/weights.py",
        "src/engine/doctor/probe.py",
        "src/trained/export.py",
        "src/training/optim.py",
        "src/data/",
        "src/training/",
        *BY_HAND,
        "scripts/maintain/bench_data.py",
        "scripts/maintain/gpu_check.py",
    ),
}
ONLY_TYPES = {
    ("src/run/lifecycle.py", "torch.distributed"),
    ("src/run/__init__.py", "torch.distributed"),
    ("src/run/evaluate.py", "torch.distributed"),
}  # may be named for a type checker, not imported when run
NO_TORCH = (
    "src/schema.py",
    "src/engine/report/",
    "src/engine/sweep/",
    "src/engine/config/",
    "src/engine/record/result.py",
    "src/engine/record/environment.py",
    "src/engine/machine/",
)
TORCH_IN_FUNCTIONS_ONLY = (
    "train.py",
    "evaluate.py",
    "src/engine/launch/",
    "src/run/__init__.py",
    "src/engine/machine/ranks.py",
    "src/engine/doctor/probe.py",
)
DRAWERS = {"utils", "util", "common", "misc", "helpers", "helper", "base", "extras"}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 260, 60
LISTS = {"src/schema.py": 420}  # one list of keys, looked up and not read; it grows with what can be set


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
    """`src/engine/launch/job.py` -> `engine.launch`, `src/models/build.py` -> `models`, `train.py` -> ``."""
    parts = Path(file).with_suffix("").parts
    if parts[0] != "src" or len(parts) == 1:
        return ""
    return ".".join(parts[1:3]) if parts[1] == "engine" else parts[1]


def wrong_imports(file: str, source: str) -> list[str]:
    """What `file` imports against MAY_IMPORT."""
    room = room_of(file)
    if room not in MAY_IMPORT:
        return []
    allowed = MAY_IMPORT[room] | {room}
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
        if file.startswith(TORCH_IN_FUNCTIONS_ONLY):
            if not named.in_function:
                wrong.append(f"{file}:{named.line} imports {named.name}")
        elif file.startswith(NO_TORCH):
            wrong.append(f"{file}:{named.line} imports {named.name}")
    return wrong


def long_functions(file: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LINES_OF_A_FUNCTION:
                found.append(f"{file}:{node.lineno} {node.name} has {lines} lines")
    return found


CHECKS = (wrong_imports, over_fences, torch_where_it_must_not_be, long_functions)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_keeps_to_its_room(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert [line for check in CHECKS for line in check(name_of(path), source)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LISTS.get(name_of(path), LINES_OF_A_FILE)
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


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(name_of(path)) for path in SOURCES if name_of(path).startswith("src/")} - {
        "__init__",
        "engine.__init__",
    }
    assert rooms == set(MAY_IMPORT)


def arrows_of(named_as: Callable[[str], str]) -> dict[str, set[str]]:
    """Which files import which, at any place but below TYPE_CHECKING, each under the name that `named_as` gives it."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): name_of(path) for path in SOURCES}
    arrows: dict[str, set[str]] = {named_as(file): set() for file in files.values()}
    for file in files.values():
        for named in names_in((ROOT / file).read_text(encoding="utf-8")):
            for module in (named.name, named.name.rpartition(".")[0]):
                if (
                    module.startswith("src.")
                    and module in files
                    and not named.for_types
                    and named_as(files[module]) != named_as(file)
                ):
                    arrows[named_as(file)].add(named_as(files[module]))
    return arrows


def floors(arrows: dict[str, set[str]]) -> int:
    """The longest way down, each room above all that it imports. Errors: CycleError where there is a circle."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        height[room] = 1 + max((height[below] for below in arrows.get(room, ())), default=0)
    return max(height.values())


def room_of_the_house(file: str) -> str:
    return "engine" if file.startswith("src/engine/") else room_of(file) or Path(file).parts[0]


def room_of_the_engine(file: str) -> str:
    return room_of(file) if file.startswith("src/engine/") and file.count("/") > 2 else "outside"


def test_no_files_import_each_other_in_a_circle() -> None:
    floors(arrows_of(lambda file: file))


def test_the_house_and_the_engine_have_few_rooms_and_floors() -> None:
    house = arrows_of(room_of_the_house)
    del house["__init__"]
    assert floors(house) <= 6
    assert len(house) <= 12
    engine = {room: below - {"outside"} for room, below in arrows_of(room_of_the_engine).items() if room != "outside"}
    assert floors(engine) <= 4
    assert len(engine) <= 7


def test_a_circle_is_seen() -> None:
    with pytest.raises(CycleError):
        floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("src/engine/record/console.py", "import src.training.loop", "engine.record may not import src.training.loop"),
        (
            "src/engine/launch/job.py",
            "def f():\n    from src.run import run",
            "engine.launch may not import src.run.run",
        ),
        ("src/engine/launch/job.py", "import src.engine.sweep.sweep", "may not import src.engine.sweep.sweep"),
        ("src/engine/report/report.py", "import src.engine.launch.job", "may not import src.engine.launch.job"),
        ("src/engine/config/rules.py", "def f():\n    from src.engine.launch import job", "may not import"),
        ("src/data/loader.py", "from src.models import build", "data may not import src.models.build"),
        ("src/data/loader.py", "from ..models import build_model", "give its full name"),
        ("src/parallel/single.py", "from src.engine.launch.job import run_job", "may not import src.engine.launch.job"),
        ("src/run/lifecycle.py", "import omegaconf", "omegaconf belongs in"),
        ("src/engine/report/report.py", "from hydra.core import plugins", "hydra.core.plugins belongs in"),
        ("src/run/lifecycle.py", "import torch.distributed as dist", "torch.distributed belongs in"),
        ("src/run/lifecycle.py", "from torch import distributed", "torch.distributed belongs in"),
        ("src/run/lifecycle.py", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier belongs in"),
        ("src/run/build.py", "import torch\nmodel = torch.nn.DataParallel(model)", "torch.nn.DataParallel belongs in"),
        (
            "src/run/build.py",
            "from torch.nn.parallel import DistributedDataParallel",
            "DistributedDataParallel belongs in",
        ),
        ("src/run/lifecycle.py", "import timm", "timm belongs in"),
        ("src/engine/report/tables.py", "def f():\n    import torch", "imports torch"),
        ("src/engine/launch/supervisor.py", "import torch", "imports torch"),
        ("train.py", "from timm import create_model", "imports timm"),
        ("src/run/lifecycle.py", "def f():\n" + "    pass\n" * 60, "f has 61 lines"),
    ],
)
def test_the_checks_can_fail(file: str, source: str, complaint: str) -> None:
    found = [line for check in CHECKS for line in check(file, source)]
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "src/run/lifecycle.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch.distributed import Store",
        ),
        ("src/engine/launch/supervisor.py", "def f():\n    from torch.distributed.launcher.api import LaunchConfig"),
        ("src/parallel/distributed.py", "import torch.distributed as dist"),
        ("src/data/sampling.py", "from torch.utils.data import DistributedSampler"),
        ("src/run/lifecycle.py", "def f():\n" + "    pass\n" * 59),
    ],
)
def test_the_checks_allow_what_the_plan_allows(file: str, source: str) -> None:
    assert [line for check in CHECKS for line in check(file, source)] == []
