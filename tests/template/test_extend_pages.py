"""The examples of docs/extend*.md. The tests write their code to a copy of the project, and run
their commands there.

The code blocks of the pages are the code under test. All examples share one copy, so they must also
work together.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from pages import EXTEND_PAGES, blocks, read, sections
from PIL import Image
from sklearn.metrics import f1_score

from scripts.maintain.docs_outputs import copy_project
from src.train.run import train
from timm_parallel import InMemory
from timm_parallel.testing.commands import ROOT
from timm_parallel.testing.configs import read_lines, resolved, tiny
from timm_parallel.testing.runs import start_run

SMALL = (
    "print_config=false",
    "parallel.threads_per_device=1",
    "train.epochs=1",
    "train.max_steps=3",
    "train.log_every=1",
    "data.limit_train=48",
    "data.batch_size=16",
)
# Path of an earlier run in the commands.
PLACEHOLDER = "outputs/train/2026-01-01/12-00-00-000000"


@dataclass
class Example:
    """A section of docs/extend*.md: its files and its commands."""

    # Pairs of language and text of the code blocks.
    blocks: list[tuple[str, str]]

    @property
    def commands(self) -> list[str]:
        return [
            line
            for language, text in self.blocks
            if language == "bash"
            for line in text.splitlines()
        ]

    @property
    def trainings(self) -> list[str]:
        return [line for line in self.commands if line.startswith("python train.py")]

    @property
    def files(self) -> set[str]:
        """Names of the files that the section writes or changes."""
        names = {text.split(maxsplit=2)[1] for language, text in self.blocks if language != "bash"}
        return {name for name in names if not name.startswith("examples/")}

    def follow(self, copy: Path) -> None:
        """Write the files of the section to a copy of the project."""
        for language, text in self.blocks:
            if language == "bash":
                for source, target in re.findall(r"\bcp (\S+) (\S+)", text):
                    shutil.copy(copy / source, copy / target)
                continue
            mark, name = text.split(maxsplit=2)[:2]
            # A block of such a file shows a part of it.
            if name.startswith("examples/"):
                assert text.partition("\n")[2] in read(ROOT / name), text
            elif language == "diff":
                assert mark == "---", text
                change(copy / name, text.partition("\n")[2])
            else:
                assert mark == "#", text
                assert not (copy / name).exists()
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).write_text(text, encoding="utf-8")


def change(path: Path, diff: str) -> None:
    """Apply a diff. The old text of each hunk must occur exactly once in the file."""
    text = path.read_text(encoding="utf-8")
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        if not old.strip():
            raise AssertionError(f"{path}: hunk has no old line that locates it: {hunk}")
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


EXAMPLES = {
    name: Example(blocks(text)) for page in EXTEND_PAGES for name, text in sections(page).items()
}
STRATEGIES = (("parallel=single", "parallel.devices=1"), ("parallel=ddp", "parallel.devices=2"))
# Examples whose runs have state that is not in the weights of a timm model, so a resume must
# restore it.
STATEFUL = ["A model", "A loss with parameters", "A strategy"]
# Examples that define a task, with a model of its own and no table of predictions.
TASKS = ["A task", "Examples"]
# Examples that train unequally on two devices, because BatchNorm sees only the images of its rank.
UNEQUAL = ("A model", "A test")
# Dictionary from an example to a metric that its runs log.
LOGGED = {
    "A metric": "val/f1",
    "A training metric": "train/confidence",
    "An auxiliary loss": "train/z_loss",
    "A training loop": "train/largest_gradient",
    "Examples": "train/loss_generator",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project, and apply every example."""
    copy = tmp_path_factory.mktemp("fork")
    copy_project(copy)
    for example in EXAMPLES.values():
        example.follow(copy)
    return copy


@pytest.fixture(scope="module")
def npz(scratch: Path) -> Path:
    """Write gray images of two classes, brighter in the second, into an .npz file with the arrays
    of MedMNIST.
    """
    draw, arrays = np.random.default_rng(0), {}
    for name, count in (("train", 64), ("val", 16), ("test", 8)):
        labels = np.arange(count)[:, None] % 2
        noise = draw.integers(0, 100, (count, 32, 32))
        arrays[f"{name}_images"] = (noise + 150 * labels[..., None]).astype(np.uint8)
        arrays[f"{name}_labels"] = labels.astype(np.uint8)
    file = scratch / "medmnist.npz"
    np.savez(file, allow_pickle=True, **arrays)
    return file


def run(copy: Path, line: str, *overrides: str, folder: Path | None = None) -> Path:
    """Run a command of the page in the copy with fewer steps, and return the folder of the run or
    sweep.
    """
    folder = folder or copy / "runs" / str(len(list((copy / "runs").glob("*"))))
    given = [
        *shlex.split(line)[2:],
        *overrides,
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
    ]
    chosen = {word.partition("=")[0]: word for word in (*SMALL, *given)}
    command = [sys.executable, "train.py", *chosen.values()]
    done = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return folder


def result(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert actual["status"] == "done"
    return actual


def module(copy: Path, name: str) -> Any:
    """Import a file of the copy as a separate module."""
    spec = importlib.util.spec_from_file_location(f"scratch_{Path(name).stem}", copy / name)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    # Register the module, because dataclasses look up their annotations there.
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_examples_change_no_file_of_the_library() -> None:
    files = {name: example.files for name, example in EXAMPLES.items()}
    assert [name for name in files if any("timm_parallel" in file for file in files[name])] == []


def test_code_of_examples_passes_ruff(scratch: Path) -> None:
    files = {file for example in EXAMPLES.values() for file in example.files}
    python = sorted(file for file in files if file.endswith(".py"))
    for words in (("check",), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", *python]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout


def test_every_example_has_a_command_and_a_link_in_the_table() -> None:
    anchors = [f"#{name.lower().replace(' ', '-')}" for name in EXAMPLES]
    table = read(EXTEND_PAGES[0]).partition("\n## ")[0]
    assert re.findall(r"\]\((?:extend_\w+\.md)?(#[\w-]+)\)", table) == anchors
    assert all(example.commands for example in EXAMPLES.values())


# --- code


def test_f1_metric_in_docs_extend_md_matches_scikit_learn(scratch: Path) -> None:
    metrics = module(scratch, "src/tasks/macro_f1.py")
    truth, answers = (
        torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    # The matrix has a seventh class that never occurs.
    confusion = torch.zeros(7, 7, dtype=torch.int64)
    confusion.index_put_((truth, answers), torch.ones_like(truth), accumulate=True)
    actual = metrics.MacroF1.metrics["f1"].from_sums(confusion, 200)
    assert actual == pytest.approx(f1_score(truth, answers, average="macro"), abs=1e-12)


def test_poly_loss_of_an_image_does_not_depend_on_the_other_images(scratch: Path) -> None:
    poly = module(scratch, "src/train/poly.py").PolyLoss
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2])
    halves = [poly(2.0)(outputs[part], targets[part]) for part in (slice(0, 4), slice(4, 8))]
    assert torch.allclose(torch.cat(halves), poly(2.0)(outputs, targets))
    plain = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    assert torch.allclose(poly(0.0)(outputs, targets), plain)


def test_npz_dataset_returns_images_and_labels_and_refuses_a_different_image_size(
    scratch: Path, npz: Path
) -> None:
    from src.schema import DataConfig

    dataset_class = module(scratch, "src/data/npz.py").Npz
    data = dataset_class(DataConfig(root=str(npz)))
    assert [len(split) for split in (data.train, data.val, data.test)] == [64, 16, 8]
    assert data.target_names == ["0", "1"]
    assert (data.in_chans, data.image_size) == (1, 32)
    with np.load(npz) as arrays:
        image, label = data.train[5]
        assert image.tolist() == [arrays["train_images"][5].tolist()]
        assert label == arrays["train_labels"][5, 0]
    with pytest.raises(ValueError, match=r"data\.image_size=64"):
        dataset_class(DataConfig(root=str(npz), image_size=64))


@pytest.mark.parametrize("hflip", [0.0, 0.5])
def test_own_augmentation_follows_the_steps_of_the_keys(scratch: Path, hflip: float) -> None:
    solarized = module(scratch, "src/tasks/solarized.py").Solarized
    config = resolved(f"data.augment.hflip={hflip}", "data.augment.scale=[0.5,1.0]")
    task = solarized(config, ["a", "b"])
    image = torch.full((3, 40, 30), 200, dtype=torch.uint8)
    rows = InMemory(image[None], torch.zeros(1, dtype=torch.int64))
    plain = resolved(f"data.augment.hflip={hflip}")
    assert solarized(plain, ["a", "b"]).batch_augmentation(rows, (40, 30)) is None
    transform = task.train_transform((24, 20), True, (0.5, 0.5, 0.5))
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        augmented, target = transform(image, 1)
        assert (augmented.shape, augmented.dtype, target) == ((3, 24, 20), torch.uint8, 1)
        seen.add(int(augmented.unique().item()))
    # Solarizing inverts the values of 128 and more.
    assert seen == {200, 55}


@pytest.mark.processes
def test_test_of_an_own_model_passes(scratch: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_patches.py"]
    done = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lora_output_equals_output_of_model_with_merged_low_rank_weights(scratch: Path) -> None:
    config = resolved()
    config.train.task_kwargs = {"rank": 2}
    add_lora = module(scratch, "src/tasks/lora.py").Lora(config, ["a", "b", "c"]).networks
    model = timm.create_model("test_vit", num_classes=3).eval()
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    before = model(images)
    names = set(model.state_dict())
    merged = timm.create_model("test_vit", num_classes=3).eval()
    add_lora(model)
    assert torch.equal(model(images), before)
    assert names < set(model.state_dict())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] if "lora_" in name else name for name in trained} == {
        "lora_a",
        "lora_b",
        "head.weight",
        "head.bias",
    }
    weights = model.state_dict()
    for name in [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]:
        weights[f"{name}.lora_b"].normal_(generator=torch.Generator().manual_seed(1))
        product = weights[f"{name}.lora_b"] @ weights[f"{name}.lora_a"]
        merged.get_submodule(name).weight.data = weights[f"{name}.weight"] + product
    merged.load_state_dict(
        {k: v for k, v in weights.items() if "lora_" not in k and ".attn." not in k}, strict=False
    )
    biases = {k: v for k, v in weights.items() if k.endswith("bias")}
    merged.load_state_dict(biases, strict=False)
    assert not torch.equal(model(images), before)
    assert torch.allclose(model(images), merged(images), atol=1e-4)
    with pytest.raises(ValueError, match="expected a ViT"):
        add_lora(timm.create_model("test_resnet"))


@pytest.mark.slow(seconds=3)
def test_own_training_loop_trains_like_the_default_one_and_logs_more(
    scratch: Path, tmp_path: Path
) -> None:
    own, lines = module(scratch, "src/train/watched.py").train, []
    config = resolved("parallel=single", "parallel.accelerator=cpu", "train.log_every=2")
    for loop in (train, own):
        folder = tmp_path / loop.__module__
        folder.mkdir()
        with start_run(config, folder).training() as training:
            loop(training)
        lines.append([line for line in read_lines(folder / "metrics.jsonl") if "lr" in line])
    assert len(lines[0]) == 6
    for key in ("step", "train/loss", "train/acc", "train/grad_norm", "lr"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]], key
    for line in lines[1]:
        assert 0 < line["train/largest_gradient"] <= line["train/grad_norm"]


# --- commands


@pytest.fixture(scope="module")
def teacher(scratch: Path) -> Path:
    """Train a run for the commands that name an earlier one."""
    return run(scratch, "python train.py", "model=tiny", "parallel=single")


def losses(folder: Path) -> list[float]:
    lines = read_lines(folder / "metrics.jsonl")
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", EXAMPLES)
def test_commands_of_an_example_train_equally_on_one_and_two_devices(
    name: str, scratch: Path, teacher: Path, npz: Path
) -> None:
    copy, example = scratch, EXAMPLES[name]
    logged = set()
    for line in example.trainings:
        line = line.replace("/data/medmnist.npz", str(npz)).replace(PLACEHOLDER, str(teacher))
        if "resume=" in line:
            continue
        ways = [() if "parallel=local_sgd" in line else way for way in STRATEGIES]
        folders = [run(copy, line, *model_of(name), *way) for way in ways]
        for folder in folders:
            assert result(folder)["steps"] == 3
            logged |= {key for entry in read_lines(folder / "metrics.jsonl") for key in entry}
        if name not in UNEQUAL:
            assert losses(folders[0]) == pytest.approx(losses(folders[1]), rel=1e-3)
    assert LOGGED.get(name, "train/loss") in logged


def model_of(name: str) -> tuple[str, ...]:
    """Return overrides for a small model, unless the example is about the model."""
    if name in ("A model", "A test", *TASKS):
        return ()
    return ("+model.kwargs.depth=1",) if name == "A parameter-group rule" else ("model=tiny",)


def words_for(name: str, npz: Path, teacher: Path) -> list[str]:
    """Return the words of a training command of an example, shortened to three steps on one
    device. For a task, it is the first command, else the last one.
    """
    trainings = [line for line in EXAMPLES[name].trainings if "resume=" not in line]
    line = trainings[0 if name in TASKS else -1]
    line = line.replace("/data/medmnist.npz", str(npz)).replace(PLACEHOLDER, str(teacher))
    given = [
        word
        for word in shlex.split(line)[2:]
        if not word.startswith(("parallel=", "parallel.devices=", "model.weights"))
    ]
    devices = (
        f"parallel={'local_sgd' if name == 'A strategy' else 'single'}",
        *("parallel.devices=1", "parallel.accelerator=cpu", "data.workers=0"),
    )
    words = [*SMALL, *model_of(name), *given, *devices]
    return list({word.partition("=")[0]: word for word in words}.values())


def follow_runs(copy: Path, jobs: dict[str, list[str]], images: Path) -> list[dict[str, Any]]:
    """Train, evaluate, predict with and resume the runs of `jobs`, and return what they printed."""
    for number in range(2):
        Image.new("RGB", (32, 32), (100 * number, 50, 0)).save(images / f"{number}.png")
    script = Path(__file__).with_name("example_runs.py")
    command = [sys.executable, str(script), json.dumps(jobs), str(images)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["name"] for run in runs] == list(jobs)
    assert all(len(run["predicted"]) == 2 for run in runs)
    return runs


@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [
        STATEFUL,
        [name for name in EXAMPLES if name not in {*STATEFUL, *TASKS, "A test"}],
        TASKS,
    ],
    ids=["with state", "without state", "tasks"],
)
def test_run_of_every_example_can_be_resumed_evaluated_and_used_to_predict(
    names: list[str],
    scratch: Path,
    teacher: Path,
    npz: Path,
    tmp_path: Path,
) -> None:
    jobs = {name: words_for(name, npz, teacher) for name in names}
    for done in follow_runs(scratch, jobs, tmp_path):
        name, evaluated, trained = done["name"], done["evaluated"], done["trained"]
        first, resumed = done["steps"]
        assert first == 3 < resumed, name
        metric = next(key for key in evaluated if key in trained and key != "samples")
        assert evaluated[metric] == pytest.approx(trained[metric], rel=1e-5), name
        # evaluate.py refuses a table of predictions of a task without one.
        assert done["predictions_code"] == 2 * (name in TASKS), name
        if done["rows"] is not None:
            assert done["rows"] == trained["samples"], name
        for image in done["predicted"]:
            if name not in TASKS:
                assert {"class_1", "probability_1"} <= image.keys(), name


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", TASKS)
def test_plan_py_plans_a_task_with_its_networks(name: str, scratch: Path) -> None:
    """plan.py must build further networks with real tensors, although the planned model has fake
    ones.
    """
    line = EXAMPLES[name].trainings[0]
    command = [sys.executable, "scripts/plan.py", *shlex.split(line)[2:]]
    assert subprocess.run(command, cwd=scratch, check=False, timeout=300).returncode == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
def test_custom_tracker_receives_the_values_of_metrics_jsonl(scratch: Path) -> None:
    line = EXAMPLES["A tracker"].trainings[0]
    folder = run(scratch, line, "model=tiny", *STRATEGIES[1])
    run(scratch, f"python train.py resume={folder} train.max_steps=5 train.epochs=9", folder=folder)
    with open(folder / "numbers.csv", newline="") as file:
        rows = [
            (int(row["step"]), row["name"], float(row["value"]))
            for row in csv.DictReader(file)
            if "/" in row["name"]
        ]
    # Both the first run and the resumed run evaluate at their last step, so both files contain
    # two evaluations.
    assert rows == [
        (line["step"], name, value)
        for line in read_lines(folder / "metrics.jsonl")
        for name, value in line.items()
        if "/" in name
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("parallel", STRATEGIES, ids=" ".join)
def test_custom_optimizer_schedule_and_groups_act_as_the_page_says(
    scratch: Path, parallel: tuple[str, ...]
) -> None:
    def saved(name: str, *overrides: str) -> dict[str, Any]:
        folder = run(scratch, EXAMPLES[name].trainings[0], *model_of(name), *overrides, *parallel)
        contents = torch.load(folder / "checkpoints/last.pt", weights_only=True)
        rates = [line["lr"] for line in read_lines(folder / "metrics.jsonl") if "lr" in line]
        return {**contents["phases"]["train"]["optimizer"], "rates": rates}

    optimizer = saved("An optimizer")
    assert optimizer["kind"] == "Signum"
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.0, 0.05]
    rule = saved("A parameter-group rule")
    assert [group["weight_decay"] for group in rule["param_groups"]] == [0.0, 0.3]
    ends = ("optim.min_lr=1e-3", "optim.warmup_lr=1e-3")
    schedule = saved("A schedule", "train.max_steps=null", "data.limit_train=64", *ends)
    assert schedule["rates"] == pytest.approx([0.001, 0.0015, 0.002, 0.0015])


BUSY = (
    "model=patches",
    "train.loss=src.train.poly.PolyLoss",
    "train.task=src.tasks.macro_f1.MacroF1",
    "checkpoint.metric=val/f1_ema",
    "optimized_metric=val/f1",
    "model.ema.decay=0.5",
    "optim.clip_grad=1",
    "train.accumulate=2",
    "optim.sched=constant",
    "data.limit_train=128",
    "train.max_steps=null",
)


LOCAL_SGD = (
    "parallel.strategy=src.parallel.local_sgd.LocalSgd",
    "parallel.devices=2",
)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_local_sgd_with_period_1_matches_ddp(scratch: Path) -> None:
    settings = (*BUSY, "optim=sgd", "optim.clip_grad=null")
    ways = (
        ("parallel=ddp", "parallel.devices=2"),
        (*LOCAL_SGD, "+parallel.options.period=1"),
        (*LOCAL_SGD, "+parallel.options.period=3"),
    )
    folders = [run(scratch, "python train.py", *settings, *overrides) for overrides in ways]
    for key in ("train/loss", "val/loss", "val/loss_ema"):
        ddp, same, other = (
            [line[key] for line in read_lines(at / "metrics.jsonl") if key in line]
            for at in folders
        )
        assert same == pytest.approx(ddp, rel=1e-5), key
        assert other != pytest.approx(ddp, rel=1e-5), key


@pytest.mark.slow(seconds=30)
@pytest.mark.processes
@pytest.mark.nightly
def test_resumed_local_sgd_run_continues_the_momentum_of_its_averages_bit_for_bit(
    scratch: Path,
) -> None:
    # Use an optimizer without state, because a checkpoint stores only the optimizer state of rank
    # 0.
    settings = (
        *("model=tiny", "optim=sgd", "optim.opt=momentum", "optim.momentum=0"),
        *("parallel=local_sgd", "parallel.devices=2"),
        *("+parallel.options.momentum=0.9", "parallel.options.period=2"),
        *("train.epochs=4", "train.max_steps=null"),
    )
    line = "python train.py"
    whole = run(scratch, line, *settings)
    stopped = run(scratch, line, *settings, "train.max_steps=6")
    run(scratch, f"{line} resume={stopped}", *settings, folder=stopped)
    ends = [
        torch.load(folder / "checkpoints/last.pt", weights_only=True) for folder in (whole, stopped)
    ]
    assert [end["progress"]["step"] for end in ends] == [12, 12]
    moves = [end["strategy"]["state"]["moves"] for end in ends]
    assert any(move.any() for move in moves[0])
    for before, after in (moves, [list(end["model"].values()) for end in ends]):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("train.task=src.tasks.macro_f1.MacroF1", "checkpoint.metric=val/f2"),
            "did you mean .*val/f1",
        ),
        (("train.loss=focal", "train.smoothing=0.1"), "train.smoothing=0.1: "),
        (("parallel.strategy=src.parallel.local_sgd.LocalSgt",), "parallel.strategy="),
        (("train.loss=src.train.poly.PolyLoss", "train.class_weights=auto"), "class_weights=auto"),
    ],
)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sample(2)
def test_train_py_exits_2_when_a_setting_of_a_custom_metric_loss_or_strategy_is_invalid(
    scratch: Path, overrides: tuple[str, ...], message: str
) -> None:
    command = [sys.executable, "train.py", *tiny(*overrides)]
    done = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1
