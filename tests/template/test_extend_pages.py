"""The pages docs/extend.md, docs/extend_training.md and docs/examples.md show parts of the files in
examples/, and code that a fork writes. The examples do what the pages say. test_examples.py trains
them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from pages import EXTEND_PAGES, blocks, code_of, read, sections
from sklearn.metrics import f1_score
from test_examples import write_npz
from torch.nn.functional import cross_entropy

from scripts.maintain.docs_outputs import copy_project
from src.schema import DataConfig
from tests.template.runs import resolved, run_python
from timm_parallel import InMemory

pytestmark = pytest.mark.usefixtures("examples")


@dataclass
class Example:
    """A section of docs/extend*.md: its files and its commands."""

    # Pairs of language and text of the code blocks.
    blocks: list[tuple[str, str]]

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
        commands = "".join(text for language, text in self.blocks if language == "bash")
        for command in commands.splitlines():
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
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


EXAMPLES = {
    name: Example(blocks(text)) for page in EXTEND_PAGES for name, text in sections(page).items()
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project, and apply every example."""
    copy = tmp_path_factory.mktemp("fork")
    copy_project(copy)
    for example in EXAMPLES.values():
        example.follow(copy)
    return copy


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


def test_f1_metric_in_docs_extend_md_matches_scikit_learn() -> None:
    metrics = import_module("src.tasks.macro_f1")
    truth, answers = (
        torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    # The matrix has a seventh class that never occurs.
    confusion = torch.zeros(7, 7, dtype=torch.int64)
    confusion.index_put_((truth, answers), torch.ones_like(truth), accumulate=True)
    actual = metrics.MacroF1.metrics["f1"].from_sums(confusion, 200)
    assert actual == pytest.approx(f1_score(truth, answers, average="macro"), abs=1e-12)


def test_loss_of_samples_follows_its_formula() -> None:
    poly = import_module("src.train.poly").PolyLoss
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2])
    plain = cross_entropy(outputs, targets, reduction="none")
    share = outputs.softmax(1)[torch.arange(8), targets]
    torch.testing.assert_close(poly(2.0)(outputs, targets), plain + 2 * (1 - share))


def test_npz_dataset_returns_images_and_labels_and_refuses_a_different_image_size(
    tmp_path: Path,
) -> None:
    dataset_class = import_module("src.data.npz").Npz
    path = write_npz(tmp_path / "data.npz")
    data = dataset_class(DataConfig(root=str(path)))
    assert [len(split) for split in (data.train, data.val, data.test)] == [160, 16, 8]
    assert data.target_names == ["0", "1"]
    assert (data.in_chans, data.image_size) == (1, 28)
    with np.load(path) as arrays:
        image, label = data.train[5]
        assert image.tolist() == [arrays["train_images"][5].tolist()]
        assert label == arrays["train_labels"][5, 0]
    with pytest.raises(ValueError, match=r"data\.image_size=64"):
        dataset_class(DataConfig(root=str(path), image_size=64))


@pytest.mark.parametrize("hflip", [0.0, 0.5])
def test_own_augmentation_follows_the_steps_of_the_keys(hflip: float) -> None:
    solarized = import_module("src.tasks.solarized").Solarized
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


def test_test_of_an_own_model_passes() -> None:
    [code] = [code for code in code_of("docs/extend.md", "python") if "def test_" in code]
    scope: dict[str, Any] = {}
    exec(code, scope)
    [test] = [value for name, value in scope.items() if name.startswith("test_")]
    test()


def test_optimizer_and_parameter_groups_act_as_the_page_says(scratch: Path) -> None:
    scope: dict[str, Any] = {"__name__": "optim_of_the_page"}
    exec((scratch / "src/train/optim.py").read_text(encoding="utf-8"), scope)
    build = scope["build_optimizer"]
    model = timm.create_model("test_vit", num_classes=3)
    free, decayed = build(resolved().optim, 0.1, {"model": model}).param_groups
    assert (free["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    excluded = {names[id(parameter)] for parameter in free["params"]}
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight"} <= excluded
    assert "head.weight" not in excluded
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    signum = import_module("src.train.signum").Signum([weight], 0.1, 0.5, momentum=0.9)
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


def test_triangle_rises_to_the_peak_and_falls_again() -> None:
    triangle, stub = import_module("src.train.triangle").Triangle, Stub()
    schedule = triangle(stub, resolved("optim.warmup_lr=0.02", "optim.min_lr=0").optim, 8)
    rates = [stub.rates(schedule, step) for step in range(9)]
    assert [rate for rate, _ in rates] == pytest.approx(
        [0.02, 0.04, 0.06, 0.08, 0.1, 0.075, 0.05, 0.025, 0]
    )
    assert [rate for _, rate in rates] == pytest.approx([rate / 2 for rate, _ in rates])


def test_plateau_lowers_rates_without_a_better_loss_and_continues_after_a_resume() -> None:
    plateau, stubs = import_module("src.train.plateau").Plateau, (Stub(), Stub())
    first, second = (plateau(stub, resolved().optim, 9, patience=1) for stub in stubs)
    for loss in (1.0, 1.2):
        first.observe({"loss": loss})
    assert stubs[0].rates(first, 5) == pytest.approx([0.1, 0.05])
    second.load_state_dict(first.state_dict())
    for schedule, stub in zip((first, second), stubs, strict=True):
        schedule.observe({"loss": 1.1})
        assert stub.rates(schedule, 6) == pytest.approx([0.01, 0.005])
