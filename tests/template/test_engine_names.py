"""The engine does not name metrics, datasets or losses of user code, and names strategies only to compare them."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture import ROOT
from src.schema import DATASETS, STRATEGIES
from src.train.losses import LOSSES
from src.train.metrics import METRICS

ENGINE = ROOT / "src" / "engine"
# Registered names that are everyday words, so the engine needs the same word for something of its own -> its meaning there.
EVERYDAY = {
    "folder": "the folder of a run or a sweep, in records and messages",
    "csv": "the file format: report.csv, and the reader of listings",
    "timm": "the library: its version is recorded, and its lists of models and optimizers check a config",
    "loss": "the value that a training step returns; `<split>/loss` is its key in metrics.jsonl (CONTRACT.md)",
}
# Registered names that are English words: a message may use them. Only a whole string or a part of a key is a hit.
ENGLISH = {"digits", "single", "synthetic", *EVERYDAY}
# Packages that compare strategies: the report's claims are about dp and ddp, and the analysis pairs their runs.
COMPARE_STRATEGIES = ("analysis/", "report/")
# Other places that name a strategy -> the reason.
NAME_STRATEGIES = {
    "config/evaluation.py": "an evaluation without a `parallel` key runs as parallel=single",
    "config/resolve.py": "the fix in two messages: parallel=ddp under torchrun, parallel=single on one Apple GPU",
    "parallel/shards.py": "the fix in a message: a parameter that parallel=fsdp cannot shard trains under parallel=ddp",
    "runtime/model_checks.py": "the fix in a message: a model that parallel=fsdp cannot split trains under parallel=ddp",
    "forecast/table.py": "the message for a sweep that cannot be forecast says which runs it needs",
}
# What the copy renames: registered name -> new name.
RENAMED = {name: f"zz{name}" for name in (*METRICS, *LOSSES, *DATASETS)}


def strings_of(source: str) -> Iterator[str]:
    """Yield the string constants of a file, and the constant parts of its f-strings, without docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def names_in_text(text: str) -> set[str]:
    """Return the names in `text`: the whole text, or part of a key such as `val/acc`, `val.acc` or `acc_best`.

    A name that is not an English word counts anywhere in the text.
    """
    names = {text.strip(" ./=,:_")}
    for key in re.findall(r"\w+(?:[./=,]\w+)*", text):
        parts = re.split(r"[./=,_]", key)
        names.update(part for part in parts if len(parts) > 1 or part not in ENGLISH)
    return names


def engine_names(registered: set[str], engine: Path = ENGINE) -> set[tuple[str, str]]:
    """Return (file below engine/, name) of every registered name in a string of the engine."""
    return {
        (path.relative_to(engine).as_posix(), name)
        for path in sorted(engine.rglob("*.py"))
        for text in strings_of(path.read_text(encoding="utf-8"))
        for name in names_in_text(text) & registered
    }


def test_strings_in_engine_code_contain_no_metric_dataset_or_loss_names() -> None:
    assert engine_names({*METRICS, *DATASETS, *LOSSES} - set(EVERYDAY)) == set()


def test_strings_in_engine_code_name_strategies_only_in_listed_files() -> None:
    places = {file for file, _ in engine_names(set(STRATEGIES)) if not file.startswith(COMPARE_STRATEGIES)}
    assert places == set(NAME_STRATEGIES)


def test_list_of_allowed_everyday_words_contains_only_metric_dataset_and_loss_names() -> None:
    assert set(EVERYDAY) <= {*METRICS, *DATASETS, *LOSSES}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("best = f'{split}/acc'", {"acc"}),
        ("read('val.acc')", {"acc"}),
        ("read('acc_best')", {"acc"}),
        ("raise ValueError(f'{key}: use acc or acc5')", {"acc", "acc5"}),
        ("name = 'digits'", {"digits"}),
        ("command = ('model=tiny', 'data=digits')", {"digits"}),
        ("raise ValueError('give letters, digits and dashes')", set()),
        ("def f():\n    'Return val/acc.'", set()),
        ("accuracy = record['accelerator']", set()),
    ],
)
def test_engine_name_check_finds_metric_and_dataset_names_in_source_strings(source: str, names: set[str]) -> None:
    assert {name for text in strings_of(source) for name in names_in_text(text)} & {*METRICS, *DATASETS} == names


class Rename(ast.NodeTransformer):
    """Renames the registered names in the strings of a file: `acc`, `val/acc`, `val/acc_ema`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Its argument is timm's own name of a loss.
        return node if ast.unparse(node.func) == "create_classification_loss" else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(renamed(node.value)) if isinstance(node.value, str) else node


def renamed(text: str) -> str:
    """Return the new name for `text` if `text` is a registered name or a metric key, else `text`."""
    parts = re.fullmatch(r"((?:train|val|test)/)?(\w+?)((?:_ema)?(?:_best)?)", text)
    if parts is None or parts[2] not in RENAMED:
        return text
    return f"{parts[1] or ''}{RENAMED[parts[2]]}{parts[3]}"


def rename_front(root: Path) -> None:
    """Rename every metric, dataset and loss in a copy of the repository: in code, config files and file names."""
    front = [root / "src/schema.py", *(root / "src/train").rglob("*.py"), *(root / "src/data").rglob("*.py")]
    for path in front:
        tree = Rename().visit(ast.parse(path.read_text(encoding="utf-8")))
        path.write_text(ast.unparse(tree), encoding="utf-8")
    for path in (root / "conf").rglob("*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(map(rename_value, lines)) + "\n", encoding="utf-8")
        if path.parent.name == "data" and path.stem in RENAMED:
            path.rename(path.with_stem(RENAMED[path.stem]))


def rename_value(line: str) -> str:
    """Rename the value of a YAML line `key: value # comment`, and `data=<name>` in its comment."""
    line = re.sub(r"(?<=\bdata=)\w+", lambda option: renamed(option[0]), line)
    parts = re.fullmatch(r"([^#]*:\s+)(\S+)(.*)", line)
    return line if parts is None else f"{parts[1]}{renamed(parts[2])}{parts[3]}"


def run_in(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command in a copy, without the environment variables set by this test run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=800, check=False
    )


@pytest.mark.slow(seconds=10)
@pytest.mark.processes
def test_training_passes_when_metrics_datasets_and_losses_are_renamed(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    rename_front(copy)

    trained = run_in(copy, "train.py", "model=tiny", "parallel=single", "train.max_steps=2", "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stderr
    result = json.loads((copy / "run" / "result.json").read_text(encoding="utf-8"))
    assert {"zzacc", "zzacc_best", "zzloss"} <= set(result["val"])
    assert not set(RENAMED) & set(result["val"])
