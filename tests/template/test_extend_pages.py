"""The examples of docs/extend.md, docs/extend_training.md and docs/examples.md. The tests write
their code to a copy of the project, and run their commands there.

The code blocks of the pages, and the files of examples/ that they copy, are the code under test.
All examples share one copy, so they must also work together. tests/template/test_examples.py tests
those files of examples/ that have a YAML.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from pages import EXTEND_PAGES, blocks, read, sections
from PIL import Image
from sklearn.metrics import f1_score
from torch.nn.functional import cross_entropy

import src.train.run
from scripts.maintain.docs_outputs import copy_project
from src.schema import DataConfig
from tests.template.runs import losses_of, resolved, run_python, start_run, tiny
from timm_parallel import InMemory, Training
from timm_parallel.testing.configs import read_lines, without_times

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
        return {name for _, name, _ in self._shown if not name.startswith("examples/")}

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Pairs of a file in examples/ and a part of it that the section shows."""
        return [
            (name, text.partition("\n")[2])
            for _, name, text in self._shown
            if name.startswith("examples/")
        ]

    @property
    def _shown(self) -> list[tuple[str, str, str]]:
        """Language, file and text of each block that shows a file."""
        return [
            (language, text.split(maxsplit=2)[1], text)
            for language, text in self.blocks
            if language != "bash"
        ]

    def follow(self, copy: Path) -> None:
        """Write the files of the section to a copy of the project."""
        for language, name, text in self._shown:
            if name.startswith("examples/"):
                continue
            if language == "diff":
                assert text.startswith("--- "), text
                change(copy / name, text.partition("\n")[2])
            else:
                assert text.startswith("# "), text
                assert not (copy / name).exists()
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).write_text(text, encoding="utf-8")
        for command in self.commands:
            if command.startswith("cp "):
                subprocess.run(command, shell=True, cwd=copy, check=True, timeout=60)


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
STATEFUL = ["A model", "A loss with parameters", "A schedule"]
# Examples that copy files of examples/.
COPIED = ["Examples", "A task", "A strategy"]
# Examples that train unequally on two devices, because BatchNorm sees only the images of its rank.
UNEQUAL = ("A model", "A test")
# Dictionary from an example to a metric that its runs log.
LOGGED = {
    "A metric": "val/f1",
    "A training metric": "train/confidence",
    "An auxiliary loss": "train/z_loss",
    "A training loop": "train/largest_gradient",
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
    """Write gray images of two classes into an .npz file with the arrays of MedMNIST."""
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
    """Run a command of the page with fewer steps; return the folder of the run or sweep."""
    folder = folder or copy / "runs" / str(len(list((copy / "runs").glob("*"))))
    given = [
        *shlex.split(line)[2:],
        *overrides,
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
    ]
    chosen = {word.partition("=")[0]: word for word in (*SMALL, *given)}
    done = run_python("train.py", *chosen.values(), cwd=copy)
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


def test_pages_show_parts_of_the_files_in_examples() -> None:
    parts = [part for example in EXAMPLES.values() for part in example.parts]
    assert parts
    assert [(file, text) for file, text in parts if text not in read(file)] == []


def test_code_of_examples_passes_ruff(scratch: Path) -> None:
    files = {file for example in EXAMPLES.values() for file in example.files}
    python = sorted(file for file in files if file.endswith(".py"))
    for words in (("check",), ("format", "--check")):
        done = run_python("-m", "ruff", *words, "--no-cache", *python, cwd=scratch)
        assert done.returncode == 0, done.stdout


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


def test_loss_of_samples_follows_its_formula(scratch: Path) -> None:
    poly = module(scratch, "src/train/poly.py").PolyLoss
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2])
    plain = cross_entropy(outputs, targets, reduction="none")
    share = outputs.softmax(1)[torch.arange(8), targets]
    torch.testing.assert_close(poly(2.0)(outputs, targets), plain + 2 * (1 - share))


def test_npz_dataset_returns_images_and_labels_and_refuses_a_different_image_size(
    scratch: Path, npz: Path
) -> None:
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
    words = ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_patches.py")
    done = run_python(*words, cwd=scratch)
    assert done.returncode == 0, done.stdout + done.stderr


def test_optimizer_and_parameter_groups_act_as_the_page_says(scratch: Path) -> None:
    build = module(scratch, "src/train/optim.py").build_optimizer
    model = timm.create_model("test_vit", num_classes=3)
    free, decayed = build(resolved().optim, 0.1, {"model": model}).param_groups
    assert (free["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    excluded = {names[id(parameter)] for parameter in free["params"]}
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight"} <= excluded
    assert "head.weight" not in excluded
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    signum = module(scratch, "src/train/signum.py").Signum([weight], 0.1, 0.5, momentum=0.9)
    # The second gradient is too small to turn the sign of the mean.
    for gradient in ([2.0, -2.0, 0.0], [-0.1, 0.1, 0.0]):
        weight.grad = torch.tensor(gradient)
        signum.step()
    decay = 1 - 0.1 * 0.5
    expected = [(decay - 0.1) * decay - 0.1, (decay + 0.1) * decay + 0.1, decay**2]
    assert weight.tolist() == pytest.approx(expected)


class Stub:
    """An optimizer that a schedule changes."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.1, "lr_scale": 0.5}]

    def rates(self, schedule: Any, step: int) -> list[float]:
        schedule.step_update(step)
        return [group["lr"] for group in self.param_groups]


def test_triangle_rises_to_the_peak_and_falls_again(scratch: Path) -> None:
    triangle, stub = module(scratch, "src/train/triangle.py").Triangle, Stub()
    schedule = triangle(stub, resolved("optim.warmup_lr=0.02", "optim.min_lr=0").optim, 8)
    rates = [stub.rates(schedule, step) for step in range(9)]
    assert [rate for rate, _ in rates] == pytest.approx(
        [0.02, 0.04, 0.06, 0.08, 0.1, 0.075, 0.05, 0.025, 0]
    )
    assert [rate for _, rate in rates] == pytest.approx([rate / 2 for rate, _ in rates])


def test_plateau_lowers_rates_without_a_better_loss_and_continues_after_a_resume(
    scratch: Path,
) -> None:
    plateau, stubs = module(scratch, "src/train/plateau.py").Plateau, (Stub(), Stub())
    first, second = (plateau(stub, resolved().optim, 9, patience=1) for stub in stubs)
    for loss in (1.0, 1.2):
        first.observe({"loss": loss})
    assert stubs[0].rates(first, 5) == pytest.approx([0.1, 0.05])
    second.load_state_dict(first.state_dict())
    for schedule, stub in zip((first, second), stubs, strict=True):
        schedule.observe({"loss": 1.1})
        assert stub.rates(schedule, 6) == pytest.approx([0.01, 0.005])


@pytest.mark.slow(seconds=3)
def test_loop_of_the_page_trains_as_the_default_loop(scratch: Path, tmp_path: Path) -> None:
    own = module(scratch, "src/train/watched.py").train
    config = resolved(
        *("parallel=single", "parallel.accelerator=cpu", "train.log_every=2"),
        *("train.accumulate=2", "optim.clip_grad=0.1", "optim.warmup_epochs=0.5"),
    )

    def lines(loop: Callable[[Training], None]) -> list[dict[str, Any]]:
        folder = tmp_path / loop.__module__
        folder.mkdir()
        with start_run(config, folder).training() as training:
            loop(training)
        return without_times(read_lines(folder / "metrics.jsonl"))

    watched = lines(own)
    largest = [line.pop("train/largest_gradient") for line in watched if "train/loss" in line]
    norms = [line["train/grad_norm"] for line in watched if "train/loss" in line]
    assert len(norms) == 4
    assert max(norms) > 0.1
    assert all(norm >= each > 0 for each, norm in zip(largest, norms, strict=True))
    assert watched == lines(src.train.run.train)


# Function that puts paths of the tests into a command of a page.
Fill = Callable[[str], str]


@pytest.fixture(scope="module")
def fill(scratch: Path, npz: Path) -> Fill:
    """Return a function that fills in the dataset, and the run that a command names."""

    @cache
    def earlier() -> Path:
        return run(scratch, "python train.py", "model=tiny", "parallel=single")

    def filled(line: str) -> str:
        line = line.replace("/data/medmnist.npz", str(npz))
        return line.replace(PLACEHOLDER, str(earlier())) if PLACEHOLDER in line else line

    return filled


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "An optimizer" else pytest.mark.nightly)
        for name in EXAMPLES
    ],
)
def test_commands_of_an_example_train_equally_on_one_and_two_devices(
    name: str, scratch: Path, fill: Fill
) -> None:
    example, logged = EXAMPLES[name], set()
    for line in example.trainings:
        if "resume=" in line:
            continue
        line = fill(line)
        ways = [() if "local_sgd" in line else way for way in STRATEGIES]
        folders = [run(scratch, line, *model_of(name), *way) for way in ways]
        for folder in folders:
            assert result(folder)["steps"] == 3
            logged |= {key for entry in read_lines(folder / "metrics.jsonl") for key in entry}
        if name not in UNEQUAL:
            assert losses_of(folders[0]) == pytest.approx(losses_of(folders[1]), rel=1e-3)
    assert LOGGED.get(name, "train/loss") in logged


def model_of(name: str) -> tuple[str, ...]:
    """Return overrides for a small model, unless the example is about the model."""
    if name in ("A model", "A test", *COPIED):
        return ()
    return ("+model.kwargs.depth=1",) if name == "A parameter-group rule" else ("model=tiny",)


def words_for(name: str, fill: Fill) -> list[str]:
    """Return the last training command of an example, with three steps on one device."""
    line = [line for line in EXAMPLES[name].trainings if "resume=" not in line][-1]
    given = [
        word
        for word in shlex.split(fill(line))[2:]
        if not word.startswith(("parallel=", "parallel.devices=", "model.weights"))
    ]
    devices = (
        *("parallel=single", "parallel.devices=1"),
        *("parallel.accelerator=cpu", "data.workers=0"),
    )
    words = [*SMALL, *model_of(name), *given, *devices]
    return list({word.partition("=")[0]: word for word in words}.values())


def follow_runs(copy: Path, jobs: dict[str, list[str]], images: Path) -> list[dict[str, Any]]:
    """Train, evaluate, predict with and resume the runs of `jobs`, and return what they printed."""
    for number in range(2):
        Image.new("RGB", (32, 32), (100 * number, 50, 0)).save(images / f"{number}.png")
    words = (str(Path(__file__).with_name("example_runs.py")), json.dumps(jobs), str(images))
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = run_python(*words, cwd=copy, environment=environment, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["name"] for run in runs] == list(jobs)
    assert all(len(run["predicted"]) == 2 for run in runs)
    return runs


@pytest.mark.slow(seconds=20)
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "names",
    [STATEFUL, [name for name in EXAMPLES if name not in {*STATEFUL, *COPIED, "A test"}]],
    ids=["with state", "without state"],
)
def test_run_of_every_example_can_be_resumed_evaluated_and_used_to_predict(
    names: list[str], scratch: Path, fill: Fill, tmp_path: Path
) -> None:
    jobs = {name: words_for(name, fill) for name in names}
    for done in follow_runs(scratch, jobs, tmp_path):
        name, evaluated, trained = done["name"], done["evaluated"], done["trained"]
        first, resumed = done["steps"]
        assert first == 3 < resumed, name
        assert evaluated["loss"] == pytest.approx(trained["loss"], rel=1e-5), name
        assert done["rows"] == trained["samples"], name
        for image in done["predicted"]:
            assert {"class_1", "probability_1"} <= image.keys(), name


# Command lines that own code refuses, and the start of the message.
REFUSED = {
    "train.task=src.tasks.macro_f1.MacroF1 checkpoint.metric=val/f2": (
        "checkpoint.metric=val/f2: .*val/f1"
    ),
    "parallel.strategy=src.train.local_sgd.LocalSgt": "parallel.strategy=",
    "train.loss=src.train.poly.PolyLoss train.class_weights=auto": "class_weights=auto",
}
# Program that runs train.py with each command line in one process.
REFUSE = """
import sys
from src.app import app
from timm_parallel.entry import run_command

for line in sys.argv[1:]:
    sys.argv = ["train.py", *line.split()]
    assert run_command(app) == 2, line
"""


@pytest.mark.slow
def test_train_py_exits_2_when_a_setting_of_a_custom_metric_loss_or_strategy_is_invalid(
    scratch: Path,
) -> None:
    lines = (" ".join(tiny(*line.split())) for line in REFUSED)
    done = run_python("-c", REFUSE, *lines, cwd=scratch)
    assert done.returncode == 0, done.stdout + done.stderr
    for line, message in zip(done.stderr.splitlines(), REFUSED.values(), strict=True):
        assert re.search(message, line), line
