"""The bill for a fork: docs/extend.md, followed in a scratch copy. Its code is written there, its files are counted, it runs.

The page's blocks are the code under test; all of its examples stand in one copy, so they also go together.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from conftest import read_lines, tiny
from PIL import Image
from sklearn.metrics import f1_score

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BILL = {
    "A model": 2,
    "A dataset": 2,
    "A metric": 1,
    "A loss": 2,
    "A frozen backbone": 2,
    "A logger": 2,
    "A strategy": 2,
}
SMALL = (
    "print_config=false",
    "parallel.threads_per_device=1",
    "train.epochs=1",
    "train.max_steps=3",
    "train.log_every=1",
    "data.limit_train=48",
    "data.batch_size=16",
)
FAKE_WANDB = """
import json
from pathlib import Path

class Run:
    def __init__(self, **words): self.file = open(Path(words["dir"]) / "wandb.jsonl", "w"); self.write("init", words)
    def write(self, what, words): print(json.dumps([what, words], default=str), file=self.file)
    def define_metric(self, name, step_metric): self.write("define_metric", [name, step_metric])
    def log(self, words): self.write("log", words)
    def finish(self):  # as often as one likes, as the real one
        if not self.file.closed: self.write("finish", None); self.file.close()

def init(**words): return Run(**words)
"""


@dataclass
class Example:
    """A section of the page."""

    blocks: list[tuple[str, str]]  # (language, text)

    @property
    def commands(self) -> list[str]:
        return [line for language, text in self.blocks if language == "bash" for line in text.splitlines()]

    def follow(self, copy: Path) -> set[str]:
        """Write what it shows; returns the names of the files that it touched."""
        touched = set()
        for language, text in self.blocks:
            if language == "bash":
                continue
            mark, name = text.split(maxsplit=2)[:2]
            if language == "diff":
                assert mark == "---", text
                change(copy / name, text.partition("\n")[2])
            else:
                assert mark == "#", text
                assert not (copy / name).exists()
                (copy / name).write_text(text, encoding="utf-8")
            touched.add(name)
        return touched


def change(path: Path, diff: str) -> None:
    """Apply the hunks of a diff, each of which must fit in one place."""
    text = path.read_text(encoding="utf-8")
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        if not old.strip():
            raise AssertionError(f"{path}: a hunk without a line to find it by: {hunk}")
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def examples() -> dict[str, Example]:
    sections = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    blocks = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {name: Example(blocks.findall(text)) for name, text in zip(sections[::2], sections[1::2], strict=True)}


EXAMPLES = examples()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what runs, with every example followed; `bill.json` in it says which files each touched."""
    copy = tmp_path_factory.mktemp("fork")
    for name in ("train.py", "evaluate.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    for folder in ("src", "conf", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "local"))
    (copy / "wandb.py").write_text(FAKE_WANDB)
    bill = {name: sorted(example.follow(copy)) for name, example in EXAMPLES.items()}
    (copy / "bill.json").write_text(json.dumps(bill))
    return copy


@pytest.fixture(scope="module")
def flowers(scratch: Path) -> Path:
    """24 images of 2 classes, in class folders and in a CSV."""
    root = scratch / "flowers"
    rows = []
    for index in range(24):
        split, name = "val" if index % 4 == 0 else "train", ("rose", "tulip")[index % 2]
        file = root / split / name / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (index * 10, 0, 200 * (index % 2))).save(file)
        rows.append({"file": file.relative_to(root), "label": name})
    for name in ("rose", "tulip"):
        (root / "val" / name).mkdir(exist_ok=True)
        Image.new("RGB", (40, 40)).save(root / "val" / name / "more.png")
    with open(root / "labels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["file", "label"])
        writer.writeheader()
        writer.writerows(rows)
    return root


@pytest.fixture(scope="module")
def pretrained(scratch: Path) -> Path:
    """What stands for weights from the hub."""
    file = scratch / "pretrained.pt"
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), file)
    return file


def run(copy: Path, line: str, *words: str, folder: Path | None = None) -> Path:
    """A command of the page with smaller figures, in the copy; returns the run's or sweep's folder."""
    if line == "make schema":
        line = "python scripts/maintain/schema.py"
        command = [sys.executable, *shlex.split(line)[1:]]
        folder = copy
    else:
        folder = folder or copy / "runs" / str(len(list((copy / "runs").glob("*"))))
        given = [*shlex.split(line)[2:], *words, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        chosen = {word.partition("=")[0]: word for word in (*SMALL, *given)}
        command = [sys.executable, "train.py", *chosen.values()]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return folder


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert found["status"] == "done"
    return found


def module(copy: Path, name: str) -> Any:
    """A file of the copy, as a module of its own in this process."""
    spec = importlib.util.spec_from_file_location(f"scratch_{Path(name).stem}", copy / name)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # where its dataclasses look for their annotations
    spec.loader.exec_module(loaded)
    return loaded


def test_the_bill_is_true(scratch: Path) -> None:
    bill = json.loads((scratch / "bill.json").read_text())
    assert {name: len(files) for name, files in bill.items()} == BILL
    assert not [file for files in bill.values() for file in files if "engine" in file], "the engine stays as it is"


def test_the_code_of_the_page_is_as_clean_as_ours(scratch: Path) -> None:
    files = sorted({file for files in json.loads((scratch / "bill.json").read_text()).values() for file in files})
    python = [file for file in files if file.endswith(".py")]
    for words in (("check",), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", *python]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout


def test_every_example_is_in_the_table_and_has_a_command() -> None:
    anchors = [f"#{name.lower().replace(' ', '-')}" for name in EXAMPLES]
    assert re.findall(r"\]\((#[\w-]+)\)", PAGE) == anchors
    assert all(example.commands for example in EXAMPLES.values())


def test_f1_is_that_of_scikit_learn(scratch: Path) -> None:
    metrics = module(scratch, "src/training/metrics.py")
    truth, answers = (torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    confusion = torch.zeros(7, 7, dtype=torch.int64)  # the last class never occurs
    confusion.index_put_((truth, answers), torch.ones_like(truth), accumulate=True)
    found = metrics.Evaluation(200, 0, None, 0.0, confusion).numbers()["f1"]
    assert found == pytest.approx(f1_score(truth, answers, average="macro"), abs=1e-12)


def test_the_weighted_loss_of_a_batch_is_the_mean_over_its_ranks(scratch: Path) -> None:
    objective = module(scratch, "src/training/objective.py")
    with pytest.raises(ValueError, match="needs a weight per class"):
        objective.LOSSES["weighted"](SimpleNamespace(class_weights=None), None)
    loss = objective.LOSSES["weighted"](SimpleNamespace(class_weights=[1.0, 1.0, 5.0]), None)
    outputs, targets = (
        torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 0, 1, 2, 2, 2, 2]),
    )
    halves = [loss(outputs[part], targets[part]) for part in (slice(0, 4), slice(4, 8))]
    assert sum(halves) / 2 == pytest.approx(loss(outputs, targets))
    plain = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    assert loss(outputs, targets) == pytest.approx((plain * torch.tensor([1.0] * 4 + [5.0] * 4)).mean())


def test_folds_divide_the_images(scratch: Path, flowers: Path) -> None:
    from src.schema import DataConfig

    kind = module(scratch, "src/data/csv_labels.py").CsvLabels
    config = DataConfig(root=str(flowers))
    held_out = []
    for fold in range(3):
        data = kind(config, fold=fold, folds=3)
        assert data.class_names == ["rose", "tulip"]
        assert sorted(data.train.files + data.val.files) == sorted(kind(config).train.files + kind(config).val.files)
        assert [label for _, label in data.val.files].count(0) == 4, "as many of each class in every fold"
        held_out += data.val.files
    assert len(held_out) == len(set(held_out)) == 24
    with pytest.raises(ValueError, match="fold=3"):
        kind(config, fold=3)


@pytest.mark.slow
@pytest.mark.processes
class TestCommands:
    def test_model(self, scratch: Path) -> None:
        alone, both = [run(scratch, line) for line in EXAMPLES["A model"].commands]
        assert result(alone)["model"] == result(both)["model"] == "src.models.patches.Patches"
        assert result(both)["world_size"] == 2
        assert result(both)["parameters"] > result(alone)["parameters"]

    def test_dataset(self, scratch: Path, flowers: Path) -> None:
        words = ("model=tiny", "data.image_size=32", "data.batch_size=8", "data.workers=0", "train.max_steps=null")
        alone, folder = (
            run(scratch, command.replace("/data/flowers", str(flowers)), *words)
            for command in EXAMPLES["A dataset"].commands
        )
        assert result(alone)["val"]["samples"] == 8
        jobs = [result(path.parent) for path in folder.glob("*/result.json")]
        assert [job["val"]["samples"] for job in jobs] == [8, 8, 8]
        rows = list(csv.DictReader((folder / "report.csv").read_text().splitlines()))
        assert len(rows) == 3 and all(row["accuracy"] for row in rows)

    def test_metric(self, scratch: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = run(scratch, EXAMPLES["A metric"].commands[0], "model=tiny")
        found = result(folder)
        assert found["objective"] == found["val"]["f1"]
        assert [line for line in read_lines(folder / "metrics.jsonl") if "val/f1" in line]
        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        assert "val/f1" in events.Tags()["scalars"]

    def test_loss(self, scratch: Path) -> None:
        schema, command = EXAMPLES["A loss"].commands
        run(scratch, schema)
        assert "class_weights" in (scratch / "conf/schema.json").read_text()
        result(run(scratch, command, "model=tiny"))

    def test_frozen_backbone(self, scratch: Path, flowers: Path, pretrained: Path) -> None:
        tuned, _, frozen, after = EXAMPLES["A frozen backbone"].commands
        words = ("data.image_size=32", "data.batch_size=4", "data.workers=0")
        folder = Path("outputs/train/2026-01-01/12-00-00-000000")
        before = torch.load(pretrained, weights_only=True)
        changed = []
        for command in (tuned, frozen, after):
            line = command.replace("/data/flowers", str(flowers)).replace("resnet50", "resnet10t")
            line = line.replace("model.pretrained=true", f"model.weights={pretrained}").replace(
                f"{folder}", f"{scratch / folder}"
            )
            ran = run(scratch, line, *words, folder=scratch / folder if command == frozen else None)
            weights = torch.load(ran / "checkpoints/last.pt", weights_only=True)["model"]
            changed.append({name.partition(".")[0] for name in weights if not torch.equal(weights[name], before[name])})
        assert changed[1] == {"fc"}, "the classifier alone"
        assert "layer1" in changed[0] and "layer1" in changed[2]

    def test_logger(self, scratch: Path) -> None:
        folder = run(scratch, EXAMPLES["A logger"].commands[0], "model=tiny", "parallel=ddp", "parallel.devices=2")
        lines = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
        assert [what for what, _ in lines[:2]] == ["init", "define_metric"] and lines[-1][0] == "finish"
        assert lines[0][1]["project"] == "flowers"
        assert lines[0][1]["id"] == f"{folder.parent.name}_{folder.name}"
        assert lines[0][1]["config"]["parallel"]["devices"] == 2
        logged = [{k: v for k, v in words.items() if "/" in k} for what, words in lines if what == "log"]
        assert logged == [{k: v for k, v in line.items() if "/" in k} for line in read_lines(folder / "metrics.jsonl")]


BUSY = (
    "model=patches",
    "train.loss=weighted",
    "train.class_weights=[1,2,3,4,5,1,2,3,4,5]",
    "checkpoint.metric=val/f1_ema",
    "optimized_metric=val/f1",
    "model.ema.decay=0.5",
    "optim.clip_grad=1",
    "train.accumulate=2",
    "optim.sched=none",
    "data.limit_train=128",
    "train.max_steps=null",
)


@pytest.fixture(scope="module")
def sharded(scratch: Path) -> Path:
    """Two epochs under FSDP2, the second by a run that was resumed, as the page says."""
    first, again = EXAMPLES["A strategy"].commands
    folder = run(scratch, first, *BUSY)
    line = again.replace("outputs/train/2026-01-01/12-00-00-000000", str(folder))
    command = [sys.executable, "train.py", *shlex.split(line)[2:3], "train.epochs=2"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.processes
def test_each_addition_trains_under_fsdp2(sharded: Path) -> None:
    found = result(sharded)
    assert found["world_size"] == 2
    assert found["strategy"] == "src.parallel.fsdp2.FullyShard"
    assert found["proof"]["hashes_equal"]
    assert found["objective"] == found["val"]["f1"]
    assert found["val"]["samples"] == 270
    logged = [line for line in read_lines(sharded / "metrics.jsonl") if "val/f1" in line]
    assert len(logged) == 2
    assert "val/f1_ema" in logged[0]
    weights = torch.load(sharded / "checkpoints/best.pt", weights_only=True)
    assert {type(tensor) for tensor in weights["model"].values()} == {torch.Tensor}


@pytest.mark.slow
@pytest.mark.processes
def test_evaluate_py_has_its_numbers_with_and_without_fsdp2(scratch: Path, sharded: Path) -> None:
    fsdp2 = (
        "parallel.strategy=src.parallel.fsdp2.FullyShard",
        "parallel.process_per_device=true",
        "parallel.devices=2",
    )
    best = max(line["val/f1_ema"] for line in read_lines(sharded / "metrics.jsonl") if "val/f1_ema" in line)
    for words in ((), fsdp2):
        command = [sys.executable, "evaluate.py", f"run={sharded}", "split=val", *words]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {numbers["weights"]: numbers["f1"] for numbers in map(json.loads, done.stdout.splitlines())}
        assert found["ema"] == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.processes
def test_fsdp2_computes_what_ddp_computes(scratch: Path, sharded: Path) -> None:
    folder = run(scratch, "python train.py", *BUSY, "parallel=ddp", "parallel.devices=2", "train.epochs=2")
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/loss_ema"):
        found = [
            [line[key] for line in read_lines(path / "metrics.jsonl") if key in line] for path in (folder, sharded)
        ]
        assert len(found[0]) >= 2
        assert found[1] == pytest.approx(found[0], rel=1e-3), key


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("checkpoint.metric=val/f2",), "did you mean val/f1"),
        (("optimized_metric=val/f2",), "did you mean val/f1"),
        (("train.loss=wieghted",), "did you mean weighted"),
        (("parallel.strategy=src.parallel.fsdp2.FullShard",), "no such strategy"),
        (("parallel.strategy=src.parallel.fsdp2.FullyShard",), "parallel.process_per_device"),
        (("parallel=ddp", "+parallel.options.a=1"), "of a strategy of your own"),
    ],
)
@pytest.mark.slow
@pytest.mark.processes
def test_a_wrong_name_of_an_addition_is_refused_early(scratch: Path, words: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "train.py", *tiny(*words)]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
