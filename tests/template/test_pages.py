"""Documentation pages: links, both languages, code and outputs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import timm
import torch
from pages import (
    PAGES,
    anchors,
    code_of,
    commands_of,
    links_of,
    outputs_of,
    read,
)
from PIL import Image
from sklearn.metrics import average_precision_score

from src.data.datasets import Digits
from src.schema import DataConfig, OptimConfig, TrainConfig
from tests.template.runs import ROOT, run_warm, task_of
from timm_parallel.config.compose import compose_command
from timm_parallel.data.dataset import InMemory
from timm_parallel.run.evaluation import Evaluation
from timm_parallel.testing.commands import Train
from timm_parallel.testing.configs import conf, parse


def test_links_on_pages_point_to_existing_files_and_headings() -> None:
    for page in PAGES:
        for link in links_of(read(page)):
            name, _, place = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page, link)
            # A page may link only to pages, LICENSE, and files below docs/ and examples/, because
            # the site contains no other code, and a link to code breaks `make docs`.
            on_site = {ROOT / "docs", ROOT / "examples", ROOT / "LICENSE"}
            assert target in PAGES or on_site & {target, *target.parents}, (page, link)
            assert not place or place in anchors(read(target)), (page, link)


@pytest.mark.parametrize("name", ["README", "docs/quickstart", "docs/dp_and_ddp"])
def test_english_and_chinese_pages_show_the_same_commands_outputs_and_code(name: str) -> None:
    english, chinese = ROOT / f"{name}.md", ROOT / f"{name}.zh-CN.md"
    assert sorted(commands_of(english)) == sorted(commands_of(chinese)) != []
    assert code_of(english, "python") == code_of(chinese, "python")
    outputs = [
        [(output.command, output.lines, output.text) for output in outputs_of(page)]
        for page in (english, chinese)
    ]
    assert outputs[0] == outputs[1] != []


def test_version_is_equal_in_both_pyprojects_both_changelogs_and_citation() -> None:
    patterns = {
        "pyproject.toml": r'^version = "(.*)"$',
        "timm_parallel/pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"\A# .*\n[^#]*\n## (\S+)",
        "timm_parallel/CHANGELOG.md": r"\A# .*\n[^#]*\n## (\S+)",
    }
    versions = {
        name: re.findall(pattern, read(name), re.MULTILINE) for name, pattern in patterns.items()
    }
    [version, *others] = versions.values()
    assert len(version) == 1 and all(other == version for other in others), versions


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_documented_digits_script_writes_each_image_into_the_folder_of_the_class(
    tmp_path: Path,
) -> None:
    script = ROOT / "notebooks" / "digits.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=300)
    files = list(tmp_path.rglob("*.jpg"))
    assert len(files) == 1797
    assert {path.parent.relative_to(tmp_path).as_posix() for path in files} == {
        *(f"low/{digit}" for digit in range(5)),
        *(f"high/{digit}" for digit in range(5, 10)),
    }
    with Image.open(files[0]) as image:
        assert (image.format, image.size) == ("JPEG", (32, 32))


def test_dp_and_ddp_page_shows_parts_of_its_listings() -> None:
    texts = [read(f"docs/listings/{name}.py") for name in ("dp", "ddp")]
    shown = code_of("docs/dp_and_ddp.md", "python")
    assert [code in text for code, text in zip(shown, texts, strict=True)] == [True, True]


# This test is nightly, because these examples contain no code of this project.
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_pytorch_examples_of_dp_and_ddp_page_run_without_error(
    train: Train, tmp_path: Path
) -> None:
    listings = ROOT / "docs" / "listings"
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    for command in (
        [sys.executable, str(listings / "dp.py")],
        [*torchrun, *rendezvous, str(listings / "ddp.py")],
    ):
        done = train.start_command(command, tmp_path).finish()
        assert done.returncode == 0, done.output


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.slow(seconds=4)
def test_code_on_from_lightning_page_loads_a_checkpoint_and_reproduces_val_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("parallel=single", "data.limit_train=64", "train.max_steps=1", "print_config=false")
    folder = run_warm(tmp_path / "run", "model=resnet18", "model.name=resnet10t", *small)
    monkeypatch.chdir(folder)
    scope: dict[str, Any] = {"torch": torch, "timm": timm}
    [code] = [code for code in code_of("docs/from_lightning.md", "python") if "best.pt" in code]
    exec(code, scope)
    model = scope["model"].eval()
    preprocessing, val = scope["contents"]["preprocessing"], Digits(DataConfig()).val
    assert isinstance(val, InMemory)
    images = (val.images / 255 - preprocessing["mean"][0]) / preprocessing["std"][0]
    hits = (model(images).argmax(1) == val.labels).sum().item()
    # The run counted the same number of correct predictions.
    assert hits == json.loads((folder / "result.json").read_text())["val"]["correct"]


def test_code_on_use_a_model_page_reads_scores_of_all_labels_with_full_precision(
    tmp_path: Path,
) -> None:
    """The data has more than five classes, and some scores have equal sigmoids in single
    precision.
    """
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(60, 9, generator=draw) * 12
    labels = (torch.rand(60, 9, generator=draw) < 0.3).float()
    task = task_of(9, TrainConfig(task="multilabel", loss="bce"))
    task.names = [f"class {number}" for number in range(9)]
    table = Evaluation(60, {}, {}, (torch.arange(60), scores, labels)).table(None, task)
    path = tmp_path / "predictions.csv"
    table.to_csv(path, index=False)
    [code] = [
        code for code in code_of("docs/use_a_model.md", "python") if "predictions.csv" in code
    ]
    scope: dict[str, pd.DataFrame] = {}
    exec(code.replace("predictions.csv", str(path)), scope)
    expected = average_precision_score(labels.numpy(), scores.numpy(), average="macro")
    assert average_precision_score(
        scope["labels"].to_numpy(), scope["scores"].to_numpy(), average="macro"
    ) == pytest.approx(expected, abs=1e-9)


def test_experiment_on_quickstart_page_adds_its_groups_and_keys_to_the_recipe(
    tmp_path: Path,
) -> None:
    [text] = code_of("docs/quickstart.md", "yaml")
    recipe = read("conf/experiment/finetune.yaml")
    conf(tmp_path, experiment__mine=text, experiment__finetune=recipe)
    config = compose_command(parse("--config-dir", str(tmp_path), "experiment=mine")).config
    assert isinstance(config.optim, OptimConfig)
    assert (config.task_name, config.parallel.strategy) == ("mine", "single")
    assert (config.model.name, config.train.epochs) == ("resnet50", 30)
    # Of the recipe.
    assert (config.data.batch_size, config.optim.layer_decay) == (64, 0.75)


@pytest.mark.slow(seconds=20)
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs requirements-docs.txt"
)
def test_documentation_site_builds_and_the_build_fails_on_a_broken_link(tmp_path: Path) -> None:
    from scripts.maintain import site

    assert site.build(tmp_path / "site") == 0
    pages = {path.stem for path in (tmp_path / "site").rglob("*.html")}
    assert {page.stem for page in (ROOT / "docs").rglob("*.md")} <= pages
    assert (tmp_path / "site" / "sample_report" / "report.html").is_file()
    index = read(tmp_path / "site" / "index.html")
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=\"https?://(?!squidfunk)", index), (
        "the page loads a file from the network"
    )
    assert site.build(tmp_path / "broken", extra="[nowhere](nowhere.md)") != 0
