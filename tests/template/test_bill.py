"""Cost of each extension in docs/extend*.md. The tests write its code to a copy of the project,
count the changed files and run it.

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
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import f1_score

from src.train.build import build_run
from src.train.loop import run_steps
from timm_parallel import InMemory, Ranks
from timm_parallel.parallel.build import build_strategy
from timm_parallel.testing.configs import read_lines, resolved, tiny

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("extend", "extend_training", "extend_tasks", "extend_parts")
]
BILL = {
    "A model": 2,
    "A dataset": 2,
    "An augmentation": 1,
    "A metric": 1,
    "A training metric": 1,
    "A loss": 2,
    "A test": 1,
    "A loss with parameters": 1,
    "An auxiliary loss": 1,
    "A parameter-group rule": 1,
    "An optimizer": 1,
    "A schedule": 2,
    "A task": 4,
    "Pretraining without labels": 2,
    "Distillation": 1,
    "Pictures": 1,
    "A training loop": 2,
    "LoRA": 3,
    "A tracker": 2,
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

    def files(self) -> set[str]:
        """Return the names of the files that the section shows."""
        return {text.split(maxsplit=2)[1] for language, text in self.blocks if language != "bash"}

    def follow(self, copy: Path) -> set[str]:
        """Write the files of the section to the copy and return the names of the changed files."""
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
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).write_text(text, encoding="utf-8")
            touched.add(name)
        return touched


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


def examples() -> dict[str, Example]:
    sections = [
        part for page in PAGES for part in re.split(r"^## (.*)\n", page, flags=re.MULTILINE)[1:]
    ]
    blocks = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        name: Example(blocks.findall(text))
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


EXAMPLES = examples()
STRATEGIES = (("parallel=single",), ("parallel=ddp", "parallel.devices=2"))
# Examples that replace code of other examples, so each of them needs its own copy.
ALONE = ("An auxiliary loss", "A training loop", "Pictures")
# Examples whose runs have state that is not in the weights of a timm model, so a resume must
# restore it.
STATEFUL = ["A model", "A loss with parameters", "A strategy"]
# Examples that define a task. Their results have another form, so other tests check them.
TASKS = ("A task", "Pretraining without labels", "Distillation")
# Override that chooses the task with a metric of its own.
OWN_TASK = "train.task=src.tasks.macro_f1.MacroF1"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project and apply every example; `bill.json` of the copy lists the files that each
    example changed.
    """
    copy = tmp_path_factory.mktemp("fork")
    for name in ("train.py", "evaluate.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    for folder in ("src", "timm_parallel", "conf", "scripts"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "local")
        )
    bill = {
        name: sorted(example.follow(copy))
        for name, example in EXAMPLES.items()
        if name not in ALONE
    }
    bill |= {name: sorted(example.files()) for name, example in EXAMPLES.items() if name in ALONE}
    (copy / "bill.json").write_text(json.dumps(bill))
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
    if line == "make schema":
        line = "python scripts/schema.py"
        command = [sys.executable, *shlex.split(line)[1:]]
        folder = copy
    else:
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


def test_each_example_in_docs_extend_md_changes_the_listed_number_of_files_and_none_of_the_library(
    scratch: Path,
) -> None:
    bill = json.loads((scratch / "bill.json").read_text())
    assert {name: len(files) for name, files in bill.items()} == BILL
    assert not [file for files in bill.values() for file in files if "timm_parallel" in file], (
        "an example changes the library"
    )


def test_code_in_docs_extend_md_passes_ruff(scratch: Path, alone: Callable[[str], Path]) -> None:
    bill = json.loads((scratch / "bill.json").read_text())
    together = {file for name, files in bill.items() if name not in ALONE for file in files}
    for copy, files in ((scratch, together), *((alone(name), bill[name]) for name in ALONE)):
        python = sorted(file for file in files if file.endswith(".py"))
        for overrides in (("check",), ("format", "--check")):
            command = [sys.executable, "-m", "ruff", *overrides, "--no-cache", *python]
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stdout


def test_every_example_in_docs_extend_md_has_a_command_and_a_link_in_the_table() -> None:
    anchors = [f"#{name.lower().replace(' ', '-')}" for name in EXAMPLES]
    table = PAGES[0].partition("\n## ")[0]
    assert re.findall(r"\]\((?:extend_\w+\.md)?(#[\w-]+)\)", table) == anchors
    assert all(example.commands for example in EXAMPLES.values())


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


def test_poly_loss_of_a_batch_equals_the_mean_loss_of_its_two_halves(scratch: Path) -> None:
    poly = module(scratch, "src/train/poly.py").PolyLoss
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2])
    halves = [poly(2.0)(outputs[part], targets[part]) for part in (slice(0, 4), slice(4, 8))]
    assert sum(halves) / 2 == pytest.approx(poly(2.0)(outputs, targets))
    assert poly(0.0)(outputs, targets) == pytest.approx(
        torch.nn.functional.cross_entropy(outputs, targets)
    )


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
    add_lora = module(scratch, "src/models/lora.py").add_lora
    model = timm.create_model("test_vit", num_classes=3).eval()
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    before = model(images)
    names = set(model.state_dict())
    merged = timm.create_model("test_vit", num_classes=3).eval()
    add_lora(model, 2)
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
    with pytest.raises(ValueError, match=r"model\.lora_rank=2"):
        add_lora(timm.create_model("test_resnet"), 2)


@pytest.mark.slow
@pytest.mark.processes
class TestCommands:
    @pytest.mark.nightly
    def test_custom_model_trains_on_one_and_two_devices(self, scratch: Path) -> None:
        alone, both = [run(scratch, line) for line in EXAMPLES["A model"].commands]
        assert result(alone)["model"] == result(both)["model"] == "src.models.patches.Patches"
        assert result(both)["world_size"] == 2
        assert result(both)["parameters"] > result(alone)["parameters"]

    @pytest.mark.nightly
    def test_custom_dataset_trains_on_one_and_two_devices(self, scratch: Path, npz: Path) -> None:
        for command, world_size in zip(EXAMPLES["A dataset"].commands, (1, 2), strict=True):
            line = command.replace("/data/medmnist.npz", str(npz))
            alone = ("parallel=single",) if world_size == 1 else ()
            actual = result(run(scratch, line, "model=tiny", "data.limit_train=null", *alone))
            assert actual["world_size"] == world_size
            assert (actual["val"]["samples"], actual["test"]["samples"]) == (16, 8)

    @pytest.mark.nightly
    def test_own_augmentation_trains_equally_on_one_and_two_devices(self, scratch: Path) -> None:
        line = EXAMPLES["An augmentation"].commands[0]
        losses = [
            [
                numbers["train/loss"]
                for numbers in read_lines(run(scratch, line, "model=tiny", *way) / "metrics.jsonl")
                if "train/loss" in numbers
            ]
            for way in STRATEGIES
        ]
        assert len(losses[0]) == 3
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    @pytest.mark.nightly
    def test_custom_validation_metric_is_logged_and_can_be_the_objective_of_a_search(
        self, scratch: Path
    ) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = run(scratch, EXAMPLES["A metric"].commands[0], "model=tiny")
        actual = result(folder)
        assert actual["objective"] == actual["val"]["f1_best"]
        assert [line for line in read_lines(folder / "metrics.jsonl") if "val/f1" in line]
        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        assert "val/f1" in events.Tags()["scalars"]

    @pytest.mark.nightly
    def test_custom_loss_trains_on_one_and_two_devices(self, scratch: Path) -> None:
        for command in EXAMPLES["A loss"].commands:
            for devices in (1, 2):
                overrides = (
                    "model=tiny",
                    f"parallel={'ddp' if devices > 1 else 'single'}",
                    f"parallel.devices={devices}",
                )
                result(run(scratch, command, *overrides))

    @pytest.mark.nightly
    def test_custom_loss_with_parameters_trains_its_class_centers_on_one_and_two_devices(
        self, scratch: Path
    ) -> None:
        """tests/test_loss_parameters.py trains the same code under every strategy."""
        curves, centers = [], []
        for overrides in STRATEGIES:
            folder = run(
                scratch, EXAMPLES["A loss with parameters"].commands[0], "model=tiny", *overrides
            )
            contents = torch.load(folder / "checkpoints/last.pt", weights_only=True)
            assert contents["model"]["head.weight"].shape[0] == 74
            centers.append(contents["train_step"]["criterion.centers"])
            curves.append(
                [
                    line["train/loss"]
                    for line in read_lines(folder / "metrics.jsonl")
                    if "train/loss" in line
                ]
            )
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)
        assert torch.allclose(centers[0], centers[1], atol=1e-4)

    @pytest.mark.nightly
    def test_custom_training_metric_is_logged_per_step_and_in_result_json(
        self, scratch: Path
    ) -> None:
        for overrides in (("parallel=single", "parallel.devices=1"), ()):
            folder = run(
                scratch, EXAMPLES["A training metric"].commands[0], "model=tiny", *overrides
            )
            logged = [
                line["train/confidence"]
                for line in read_lines(folder / "metrics.jsonl")
                if "train/loss" in line
            ]
            assert len(logged) == 3 and all(0.1 <= value <= 1 for value in logged)
            assert 0.1 <= result(folder)["train"]["confidence"] <= 1

    @pytest.mark.nightly
    def test_custom_parameter_group_rule_gives_weight_decay_only_to_matrices_except_embeddings(
        self, scratch: Path
    ) -> None:
        line = EXAMPLES["A parameter-group rule"].commands[0]
        for overrides in STRATEGIES:
            folder = run(scratch, line, "model=tiny", *overrides)
            groups = torch.load(folder / "checkpoints/last.pt", weights_only=True)["optimizer"][
                "param_groups"
            ]
            assert [group["weight_decay"] for group in groups] == [0.0, 0.3]
            model = timm.create_model("vit_tiny_patch16_224", depth=2)
            matrices = [name for name, weight in model.named_parameters() if weight.ndim > 1]
            decayed = [name for name in matrices if "embed" not in name and "token" not in name]
            assert len(groups[1]["params"]) == len(decayed)

    @pytest.mark.nightly
    def test_custom_optimizer_trains_equally_under_single_ddp_and_fsdp(self, scratch: Path) -> None:
        curves = []
        for overrides in (*STRATEGIES, ("parallel=fsdp", "parallel.devices=2")):
            line = EXAMPLES["An optimizer"].commands[0]
            folder = run(scratch, line, "model=tiny", *overrides)
            saved = torch.load(folder / "checkpoints/last.pt", weights_only=True)["optimizer"]
            assert saved["kind"] == "Signum"
            assert [group["weight_decay"] for group in saved["param_groups"]] == [0.0, 0.05]
            lines = read_lines(folder / "metrics.jsonl")
            curves.append([line["train/loss"] for line in lines if "train/loss" in line])
        assert len(curves[0]) == 3
        assert curves[1] == pytest.approx(curves[0], rel=1e-3)
        assert curves[2] == pytest.approx(curves[0], rel=1e-3)

    @pytest.mark.nightly
    def test_custom_schedule_sets_learning_rates_and_refuses_unused_warmup_epochs(
        self, scratch: Path
    ) -> None:
        schema, line = EXAMPLES["A schedule"].commands
        run(scratch, schema)
        for overrides in STRATEGIES:
            settings = (
                "model=tiny",
                "train.max_steps=null",
                "data.limit_train=64",
                "optim.min_lr=1e-3",
            )
            folder = run(scratch, line, *settings, "optim.warmup_lr=1e-3", *overrides)
            rates = [entry["lr"] for entry in read_lines(folder / "metrics.jsonl") if "lr" in entry]
            assert rates == pytest.approx([0.001, 0.0015, 0.002, 0.0015])
        command = [sys.executable, "train.py", "optim.sched=triangle", "optim.warmup_epochs=1"]
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 2
        assert "optim.warmup_epochs=1.0: " in done.stderr

    @pytest.mark.nightly
    def test_lora_training_changes_only_adapters_and_head_under_single_dp_and_ddp(
        self, scratch: Path
    ) -> None:
        schema, plain, tuned = EXAMPLES["LoRA"].commands
        run(scratch, schema)
        placeholder = Path("outputs/train/2026-01-01/12-00-00-000000")
        first = run(scratch, plain, "model=tiny", folder=scratch / placeholder)
        before = torch.load(first / "checkpoints/best.pt", weights_only=True)["model"]
        curves = []
        for overrides in (*STRATEGIES, ("parallel=dp", "parallel.devices=2")):
            line = tuned.replace(f"{placeholder}", f"{scratch / placeholder}")
            folder = run(scratch, line, "checkpoint.metric=val/loss", *overrides)
            after = torch.load(folder / "checkpoints/last.pt", weights_only=True)["model"]
            assert before.keys() < after.keys()
            assert {
                name.partition(".")[0]
                for name in before
                if not torch.equal(after[name], before[name])
            } == {"head"}
            adapters = [after[name] for name in after if name.endswith("lora_b")]
            assert len(adapters) == 4
            assert all(adapter.any() for adapter in adapters)
            curves.append(
                [
                    line["train/loss"]
                    for line in read_lines(folder / "metrics.jsonl")
                    if "train/loss" in line
                ]
            )
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)
        assert curves[0] == pytest.approx(curves[2], rel=1e-4)
        command = [sys.executable, "evaluate.py", f"run={folder}", "split=val", "checkpoint=last"]
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["loss"] == pytest.approx(result(folder)["val"]["loss"])

    @pytest.mark.nightly
    def test_custom_tracker_receives_the_values_of_metrics_jsonl(self, scratch: Path) -> None:
        alone, both = EXAMPLES["A tracker"].commands
        folder = run(scratch, alone, "model=tiny", "parallel=ddp", "parallel.devices=2")
        assert not (folder / "tensorboard").exists()
        run(
            scratch,
            f"python train.py resume={folder} train.max_steps=5 train.epochs=9",
            folder=folder,
        )
        with open(folder / "numbers.csv", newline="") as file:
            rows = [
                (int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)
            ]
        logged = read_lines(folder / "metrics.jsonl")
        numbers = [
            (line["step"], name, value)
            for line in logged
            for name, value in line.items()
            if "/" in name
        ]
        # Both the first run and the resumed run evaluate at their last step, so both files contain
        # two evaluations.
        assert [row for row in rows if "/" in row[1]] == numbers
        folder = run(scratch, both, "model=tiny")
        assert (folder / "tensorboard").exists() and (folder / "numbers.csv").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates a copy of the project with one example that cannot be combined
    with others (ALONE).
    """

    def copy_with(name: str) -> Path:
        copy = tmp_path_factory.mktemp("alone")
        for file in ("train.py", "evaluate.py", "pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / file, copy)
        for folder in ("src", "timm_parallel", "conf", "scripts"):
            shutil.copytree(
                ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "local")
            )
        EXAMPLES[name].follow(copy)
        return copy

    return copy_with


def words_for(name: str, npz: Path, line: str | None = None) -> list[str]:
    """Return the words of a training command, shortened to three steps on one device. By default,
    it is the last command of the example.
    """
    trainings = [line for line in EXAMPLES[name].commands if line.startswith("python train.py")]
    line = line or [line for line in trainings if "resume=" not in line][-1]
    given = shlex.split(line.replace("/data/medmnist.npz", str(npz)))[2:]
    given = [
        word
        for word in given
        if not word.startswith(("parallel=", "parallel.devices=", "model.weights"))
    ]
    small: dict[str, tuple[str, ...]] = {
        "A model": (),
        "A dataset": ("model=tiny", "data.limit_train=null"),
        "A parameter-group rule": ("+model.kwargs.depth=1",),
    }
    parallel = "local_sgd" if name == "A strategy" else "single"
    devices = (
        f"parallel={parallel}",
        "parallel.devices=1",
        "parallel.accelerator=cpu",
        "data.workers=0",
    )
    words = [*SMALL, *small.get(name, ("model=tiny",)), *given, *devices]
    return list({word.partition("=")[0]: word for word in words}.values())


PLACEHOLDER = "outputs/train/2026-01-01/12-00-00-000000"


@pytest.fixture(scope="module")
def teacher(scratch: Path) -> Path:
    return run(scratch, "python train.py", "model=tiny", "parallel=single")


@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TASKS)
def test_custom_tasks_have_equal_losses_under_single_and_ddp_and_can_be_evaluated(
    scratch: Path, request: pytest.FixtureRequest, name: str
) -> None:
    first, *later = EXAMPLES[name].commands
    if PLACEHOLDER in first:
        first = first.replace(PLACEHOLDER, str(request.getfixturevalue("teacher")))
    folders = [
        run(scratch, first, "model=tiny", "data.workers=0", *overrides) for overrides in STRATEGIES
    ]
    curves = [
        [line["train/loss"] for line in read_lines(folder / "metrics.jsonl") if "lr" in line]
        for folder in folders
    ]
    if name != "Pretraining without labels":
        assert curves[0] == pytest.approx(curves[1], rel=1e-3), name
    command = [sys.executable, "evaluate.py", f"run={folders[1]}", "split=val"]
    done = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    metric = {"A task": "near", "Pretraining without labels": "found"}.get(name, "acc")
    assert json.loads(done.stdout)[metric] == pytest.approx(result(folders[1])["val"][metric])
    if name == "Pretraining without labels":
        run(scratch, later[0].replace(PLACEHOLDER, str(folders[1])))
        export = (sys.executable, "scripts/export.py", f"run={folders[1]}", "format=hub")
        assert subprocess.run(export, cwd=scratch, check=False, timeout=300).returncode == 2
        assert not (folders[1] / "hub").exists()


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


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@pytest.mark.processes
def test_custom_task_can_be_resumed_planned_and_used_to_predict(
    scratch: Path, teacher: Path, npz: Path, tmp_path: Path
) -> None:
    jobs = {}
    for name in TASKS:
        line = EXAMPLES[name].commands[0].replace(PLACEHOLDER, str(teacher))
        jobs[name] = words_for(name, npz, line)
    points, features, classes = follow_runs(scratch, jobs, tmp_path)
    assert all(run["steps"] == [3, 6] for run in (points, features, classes))
    dot = points["predicted"][0]["red"]
    assert len(dot) == 2 and all(isinstance(share, float) for share in dot)
    assert len(features["predicted"][0]["features"]) == 48
    assert len(classes["predicted"][0]["classes"]) == 5
    assert [run["predictions_code"] for run in (points, features, classes)] == [0, 2, 0]
    assert points["rows"] == points["trained"]["samples"]
    # plan.py must load the teacher with real tensors, although the planned model has fake ones.
    words = [word for word in jobs["Distillation"] if not word.startswith("train.log_every")]
    command = [sys.executable, "scripts/plan.py", *words]
    assert subprocess.run(command, cwd=scratch, check=False, timeout=300).returncode == 0
    # Refuse a teacher whose weights are not in the cache and cannot be downloaded.
    words = [word.replace(str(teacher), "resnet18") for word in jobs["Distillation"]]
    refused = subprocess.run(
        [sys.executable, "train.py", *words, f"paths.output_dir={tmp_path}"],
        cwd=scratch,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert refused.returncode == 2
    assert "train.task_kwargs.teacher=resnet18: the weights of resnet18" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [
        STATEFUL,
        *(
            pytest.param(names, marks=pytest.mark.nightly)
            for names in (
                [name for name in EXAMPLES if name not in {*STATEFUL, *ALONE, *TASKS, "A test"}],
                *([name] for name in ALONE),
            )
        ),
    ],
    ids=["with state", "without state", *ALONE],
)
def test_run_of_every_example_in_docs_extend_md_can_be_resumed_evaluated_and_used_to_predict(
    names: list[str], scratch: Path, npz: Path, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = alone(names[0]) if names[0] in ALONE else scratch
    for run in follow_runs(copy, {name: words_for(name, npz) for name in names}, tmp_path):
        first, resumed = run["steps"]
        assert first == 3 < resumed, run["name"]
        assert run["evaluated"]["loss"] == pytest.approx(run["trained"]["loss"], rel=1e-5), run[
            "name"
        ]
        assert all(
            len(image["classes"]) == len(image["probabilities"]) >= 1 for image in run["predicted"]
        )
        assert run["predictions_code"] == 0, run["name"]
        assert run["rows"] == run["trained"]["samples"], run["name"]
        assert "ece" in run["evaluated"], run["name"]


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.parametrize(
    "parallel", ["ddp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dp", "fsdp"))]
)
def test_custom_picture_is_logged_to_tensorboard_at_every_evaluation(
    alone: Callable[[str], Path], parallel: str
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("train.max_steps=null", "train.epochs=2", f"parallel={parallel}", "parallel.devices=2")
    folder = run(alone("Pictures"), EXAMPLES["Pictures"].commands[0], *words)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    # Evaluations are at every second step, and at the end of both epochs of three steps.
    shown = [event.step for event in events.Images("val/acc_per_class")]
    assert shown == [2, 3, 4, 6]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_auxiliary_z_loss_adds_to_the_training_loss_and_is_logged_as_a_metric(
    scratch: Path, alone: Callable[[str], Path]
) -> None:
    copy, line = alone("An auxiliary loss"), EXAMPLES["An auxiliary loss"].commands[0]
    without = read_lines(
        run(scratch, line, *STRATEGIES[0], "parallel.devices=1") / "metrics.jsonl"
    )[0]
    logged = []
    for overrides in (("parallel=single", "parallel.devices=1"), ()):
        folder = run(copy, line, *overrides)
        lines = [entry for entry in read_lines(folder / "metrics.jsonl") if "train/loss" in entry]
        assert lines[0]["train/loss"] - without["train/loss"] == pytest.approx(
            1e-4 * lines[0]["train/z_loss"], rel=0.01
        )
        logged.append([entry["train/z_loss"] for entry in lines])
        assert result(folder)["train"]["z_loss"] == pytest.approx(np.mean(logged[-1]))
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_custom_training_loop_is_not_stopped_by_watchdog(alone: Callable[[str], Path]) -> None:
    copy = alone("A training loop")
    file = copy / "src/train/plain_loop.py"
    # Four steps of 1.5 s take longer together than the watchdog's limit, but each step is shorter.
    slower = file.read_text().replace(
        "        loss.backward()\n", "        loss.backward()\n        time.sleep(1.5)\n"
    )
    file.write_text(slower.replace("from collections", "import time\nfrom collections", 1))
    for overrides in STRATEGIES:
        line = EXAMPLES["A training loop"].commands[0]
        limits = ("parallel.timeout=4", "data.limit_train=64", "train.max_steps=null")
        assert result(run(copy, line, "model=tiny", *limits, *overrides))["steps"] == 4


@pytest.mark.slow(seconds=3)
def test_custom_training_loop_equals_the_default_one_and_refuses_options_that_it_leaves_out(
    alone: Callable[[str], Path],
) -> None:
    own = module(alone("A training loop"), "src/train/plain_loop.py").run_steps

    def reports(loop: Callable[..., Any], *overrides: str) -> list[Any]:
        given = ("optim.warmup_epochs=0.5", "train.log_every=2", "train.epochs=2", *overrides)
        config = resolved("parallel=single", "parallel.accelerator=cpu", *given)
        torch.manual_seed(config.seed)
        parts = build_run(config, build_strategy(config.parallel, Ranks(), None))
        return [(report.means, report.lr) for report in loop(parts, parts.train_loader.epoch(0))]

    expected = reports(run_steps)
    assert len({lr for _, lr in expected}) == 3
    assert reports(own) == expected
    left_out = ("train.accumulate=3", "optim.clip_grad=0.7")
    for option in left_out:
        with pytest.raises(ValueError, match=option.partition("=")[0]):
            reports(own, option)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("overrides", STRATEGIES, ids=" ".join)
def test_custom_training_loop_saves_a_checkpoint_at_sigterm_and_ends_at_max_steps(
    alone: Callable[[str], Path], overrides: tuple[str, ...]
) -> None:
    copy = alone("A training loop")
    file = copy / "src/train/plain_loop.py"
    slower = file.read_text().replace(
        "        loss.backward()\n", "        loss.backward()\n        time.sleep(0.5)\n"
    )
    file.write_text(slower.replace("from collections", "import time\nfrom collections", 1))
    folder = copy / "runs" / overrides[0].partition("=")[2]
    given = (*SMALL, "model=tiny", "data.limit_train=160", "train.max_steps=8", *overrides)
    settings = {word.partition("=")[0]: word for word in given}
    command = [sys.executable, "train.py", *settings.values(), f"hydra.run.dir={folder}"]
    log = folder / "metrics.jsonl"
    with subprocess.Popen(command, cwd=copy) as training:
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            assert training.poll() is None
            time.sleep(0.1)
        training.terminate()
        training.wait(60)
    saved = torch.load(folder / "checkpoints/last.pt", weights_only=True)["progress"]["step"]
    assert 1 <= saved < 8
    line = f"python train.py resume={folder} train.max_steps=8"
    numbers = result(run(copy, line, "data.limit_train=160", folder=folder))
    assert numbers["steps"] == 8
    assert numbers["train"].keys() == {"loss", "acc"}
    assert numbers["throughput"]["images_per_sec"] > 0


BUSY = (
    "model=patches",
    "train.loss=src.train.poly.PolyLoss",
    OWN_TASK,
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


@pytest.fixture(scope="module")
def averaged(scratch: Path) -> Path:
    """Train two epochs under local SGD with a resume after the first, as on the page."""
    first, again = EXAMPLES["A strategy"].commands
    folder = run(scratch, first, *BUSY)
    line = again.replace("outputs/train/2026-01-01/12-00-00-000000", str(folder))
    command = [sys.executable, "train.py", *shlex.split(line)[2:3], "train.epochs=2"]
    done = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_custom_model_loss_and_metric_train_under_local_sgd(averaged: Path) -> None:
    actual = result(averaged)
    assert actual["world_size"] == 2
    assert actual["strategy"] == "src.parallel.local_sgd.LocalSgd"
    assert actual["proof"]["hashes_equal"]
    assert actual["objective"] == actual["val"]["f1"]
    assert actual["val"]["samples"] == 270
    logged = [line for line in read_lines(averaged / "metrics.jsonl") if "val/f1" in line]
    assert len(logged) == 2
    assert "val/f1_ema" in logged[0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_evaluate_py_reproduces_best_metric_with_and_without_local_sgd(
    scratch: Path, averaged: Path
) -> None:
    best = max(
        line["val/f1_ema"]
        for line in read_lines(averaged / "metrics.jsonl")
        if "val/f1_ema" in line
    )
    for overrides in ((), LOCAL_SGD):
        command = [sys.executable, "evaluate.py", f"run={averaged}", "split=val", *overrides]
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        actual = {
            numbers["weights"]: numbers["f1"]
            for numbers in map(json.loads, done.stdout.splitlines())
        }
        assert actual["ema"] == pytest.approx(best)


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
        ((OWN_TASK, "checkpoint.metric=val/f2"), "did you mean .*val/f1"),
        ((OWN_TASK, "optimized_metric=val/f2"), "did you mean .*val/f1"),
        (("train.loss=fokal",), "did you mean focal"),
        (("train.loss=focal", "train.smoothing=0.1"), "train.smoothing=0.1: train.loss=focal"),
        (("train.loss=focal", "data.augment.mixup=0.2"), "data.augment.mixup=0.2: "),
        (("train.loss=src.train.poly.PolyLoss", "train.class_weights=auto"), "class_weights=auto"),
        (("parallel.strategy=src.parallel.local_sgd.LocalSgt",), "no such class"),
        (("parallel=local_sgd", "parallel.gradient_as_bucket_view=true"), "an option of ddp"),
        (("parallel=ddp", "+parallel.options.a=1"), "parallel.options="),
    ],
)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sample(6)
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
