"""Documentation pages: named files exist, links work, both languages agree, shown code runs and
outputs are real.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from scripts import plan
from src.data.datasets import Digits
from src.schema import DataConfig
from timm_parallel.data.dataset import InMemory
from timm_parallel.lab.report.claims import _CLAIMS
from timm_parallel.machine.ranks import Ranks
from timm_parallel.testing.commands import Train
from timm_parallel.testing.ranks import in_ranks, run_warm

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# True in the template; a fork has removed pages and scripts/maintain.
IS_TEMPLATE = not (ROOT / ".template.json").exists()
OUTPUT = re.compile(r"<!-- output of: (.*?)(?:\n +lines: (.*?))? -->\n```\n(.*?)```", re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_file_tree_on_architecture_page_names_existing_files() -> None:
    tree = text_of("docs/dev/architecture.md").split("```")[1]
    names = re.findall(r"[\w/]+\.py|conf/|tests/|docs/|src/", tree)
    folders = [ROOT, ROOT / "src", *(path for path in (ROOT / "src").rglob("*") if path.is_dir())]
    for name in names:
        assert any((folder / name).exists() for folder in folders), name
    packages = {
        path.name
        for path in (ROOT / "src").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert all(f"{package}/" in tree for package in packages)
    assert "schema.py" in names


def links_of(text: str) -> list[str]:
    return [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        if not re.match(r"https?:|mailto:", link)
    ]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates from the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_on_documentation_pages_point_to_existing_files_and_headings(page: Path) -> None:
    for link in links_of(page.read_text(encoding="utf-8")):
        name, _, place = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        # A page may link only to pages and files below docs/, because the site contains no code,
        # and a link to code breaks `make docs`.
        assert target in PAGES or ROOT / "docs" in target.parents, link
        assert not place or place in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.name
)
def test_user_pages_are_linked_from_the_readme_and_developer_pages_from_contributing(
    page: Path,
) -> None:
    index = "README.md" if page.parent.name == "docs" else "CONTRIBUTING.md"
    link = page.relative_to(ROOT).as_posix().replace(".zh-CN", "")
    assert link in text_of(index)


# Skip the changelog, because it also names scripts and options that were removed.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_scripts_options_and_make_targets_named_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"python (scripts/[\w/]+\.py)((?: +--[\w-]+(?: [\w.,]+)?)*)", text)
    for script, options in scripts:
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, (script, option)
    files = [ROOT / "Makefile", *(ROOT / "scripts").glob("*/targets.mk")]
    makefiles = "\n".join(file.read_text(encoding="utf-8") for file in files)
    targets = set(re.findall(r"^([a-z-]+):", makefiles, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_readme_is_at_most_110_lines() -> None:
    assert len(text_of("README.md").splitlines()) <= 110


# Skip pages named extend*, which contain the code of their examples, and docs/keys.md, which is
# generated with a line for each key.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith(("extend", "keys"))],
    ids=lambda page: page.name,
)
def test_documentation_page_is_at_most_250_lines(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize(
    ("first", "second"),
    [("README.md", "README.zh-CN.md"), ("docs/dp_and_ddp.md", "docs/dp_and_ddp.zh-CN.md")],
)
def test_english_and_chinese_pages_have_the_same_commands_tables_links_and_code(
    first: str, second: str
) -> None:
    english, chinese = text_of(first), text_of(second)
    assert OUTPUT.findall(english) == OUTPUT.findall(chinese) != []
    shown = re.compile(
        r"^(?:make|python|torchrun|tensorboard) .*$|`((?:make|python|pip|nvidia-smi) [^`]+)`",
        re.MULTILINE,
    )
    commands = [
        [(match[1] or match[0]).partition("#")[0].rstrip() for match in shown.finditer(text)]
        for text in (english, chinese)
    ]
    assert sorted(commands[0]) == sorted(commands[1])
    assert len(commands[0]) > 4
    headings = [
        [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
        for text in (english, chinese)
    ]
    assert headings[0] == headings[1]
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert rows[0] == rows[1]
    links = [
        {link.replace(".en.", ".").replace(".zh-CN.", ".") for link in links_of(text)}
        for text in (english, chinese)
    ]
    assert links[0] == links[1]
    assert len(links[0]) > 2
    blocks = [re.findall(r"```python\n.*?```", text, re.DOTALL) for text in (english, chinese)]
    assert blocks[0] == blocks[1]
    code = [re.findall(r"`([\w./=]+)`", text) for text in (english, chinese)]
    assert sorted(code[0]) == sorted(code[1])


def test_project_version_is_equal_in_pyproject_citation_and_changelog() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', text_of("pyproject.toml"), re.MULTILINE)
    assert re.findall(r"^version: (.*)$", text_of("CITATION.cff"), re.MULTILINE) == [version]
    assert f"## {version}" in text_of("CHANGELOG.md")


def test_first_sentence_of_readme_is_also_in_help_site_citation_and_package() -> None:
    start = text_of("README.md").split("**")[1]
    pitch = " ".join(re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", start).split())
    assert pitch.startswith("Fine-tune any timm model")
    for name in ("conf/hydra/default.yaml", "mkdocs.yml", "CITATION.cff", "pyproject.toml"):
        assert pitch in text_of(name), name


def test_badge_names_the_python_versions_and_the_license_of_the_project() -> None:
    badge = text_of("docs/figures/badges.svg")
    lowest, limit = re.findall(r"3\.(\d+)", text_of("pyproject.toml").split("requires-python")[1])[
        :2
    ]
    assert f"3.{lowest} – 3.{int(limit) - 1}" in badge
    assert "MIT" in badge and "MIT" in text_of("LICENSE")


def test_page_on_dp_and_ddp_lists_the_claims_that_a_report_tests() -> None:
    section = text_of("docs/dp_and_ddp.md").split("## What a report decides")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (\d+) \| (.*) \| (\w.*) \|$", section, re.MULTILINE)
    assert listed == [
        (str(number), text, "not measurable" if reason else "measured")
        for number, text, _, reason in _CLAIMS
    ]


# --- outputs


CAPTURED = [
    (page.name, *match)
    for page in PAGES
    for match in OUTPUT.findall(page.read_text(encoding="utf-8"))
]


def test_command_outputs_in_the_documentation_are_complete_and_contain_no_local_paths() -> None:
    """A failure means that `make docs-outputs` was not run after an output block was added."""
    assert len(CAPTURED) > 10
    for page, command, lines, output in CAPTURED:
        assert output.strip(), (page, command)
        assert all(re.search(lines, line) for line in output.splitlines()), (page, command)
        assert not re.search(r"/tmp/|/home/|/root/|/work/", output), (page, command)


def test_every_run_output_shown_in_the_documentation_comes_from_a_named_command() -> None:
    """Text that looks like output of a run or sweep, or like an error message, must be captured
    from a command.
    """
    for page in PAGES:
        rest = OUTPUT.sub("", page.read_text(encoding="utf-8"))
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
        typed = [
            block
            for language, block in blocks
            if not language and re.search("epoch |train.py:", block)
        ]
        assert typed == [], page.name


REFUSALS = [
    row for row in CAPTURED if all(line.startswith("train.py: ") for line in row[3].splitlines())
]


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("page", "command", "lines", "output"), [row for row in REFUSALS if "auto" not in row[1]]
)
def test_error_message_shown_in_the_documentation_matches_command_output(
    page: str, command: str, lines: str, output: str, tmp_path: Path
) -> None:
    (tmp_path / "flowers" / "daisy").mkdir(parents=True)
    here = command.replace("/data/", f"{tmp_path}/").replace(
        "python ", f"{shlex.quote(sys.executable)} "
    )
    done = subprocess.run(
        here, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr.replace(f"{tmp_path}/", "/data/") == output


# --- code


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


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


def run_as_torchrun(ranks: Ranks, store: Any, code: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank)}
    os.environ["WORLD_SIZE"] = str(ranks.world_size)
    exec(code, {"__name__": "__main__"})


# This test is nightly, because these examples contain no code of this project.
@pytest.mark.nightly
@pytest.mark.slow(seconds=6)
@pytest.mark.processes
def test_pytorch_examples_of_dp_and_ddp_page_run_in_forked_ranks() -> None:
    for world_size, code in enumerate(python_blocks("docs/dp_and_ddp.md"), start=1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        in_ranks(run_as_torchrun, world_size, code, port)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.nightly
def test_pytorch_examples_of_dp_and_ddp_page_run_without_error(
    train: Train, tmp_path: Path
) -> None:
    for number, code in enumerate(python_blocks("docs/dp_and_ddp.md")):
        (tmp_path / f"{number}.py").write_text(code, encoding="utf-8")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    for command in (
        [sys.executable, f"{tmp_path}/0.py"],
        [*torchrun, *rendezvous, f"{tmp_path}/1.py"],
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
    [code] = [block for block in python_blocks("docs/from_lightning.md") if "best.pt" in block]
    exec(code, scope)
    model = scope["model"].eval()
    preprocessing, val = scope["contents"]["preprocessing"], Digits(DataConfig()).val
    assert isinstance(val, InMemory)
    images = (val.images / 255 - preprocessing["mean"][0]) / preprocessing["std"][0]
    hits = (model(images).argmax(1) == val.labels).sum().item()
    # The run counted the same number of correct predictions.
    assert hits == json.loads((folder / "result.json").read_text())["val"]["correct"]


# --- the site


@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.skipif(not IS_TEMPLATE, reason="a fork builds no site")
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs requirements-docs.txt"
)
def test_documentation_site_builds_and_the_build_fails_on_a_broken_link(tmp_path: Path) -> None:
    from scripts.maintain import site

    built = site.build(tmp_path / "site")
    assert built == 0
    pages = {path.name for path in (tmp_path / "site").rglob("*.html")}
    assert {page.stem for page in (ROOT / "docs").rglob("*.md")} <= {
        name.removesuffix(".html") for name in pages
    }
    assert "invented figures" in (tmp_path / "site" / "sample_report" / "report.html").read_text(
        encoding="utf-8"
    )
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=\"https?://(?!squidfunk)", index), (
        "the page loads a file from the network"
    )
    assert site.build(tmp_path / "broken", extra="[nowhere](nowhere.md)") != 0


# --- tables


GPUS_PAGE = text_of("docs/several_gpus.md")
PLANS = re.findall(r"^python scripts/plan\.py (.*)\n```\n\n((?:\|.*\n)+)", GPUS_PAGE, re.MULTILINE)


def test_page_on_several_gpus_has_two_tables_generated_by_plan_py() -> None:
    assert len(PLANS) == 2


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "table"), PLANS)
@pytest.mark.sample(2)
def test_batch_tables_of_page_on_several_gpus_match_output_of_plan_py(
    arguments: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [[float(cell) for cell in re.findall(r"[\d.]+", row)] for row in table.splitlines()[2:]]
    assert plan.main([*shlex.split(arguments), "--json"]) == 0
    columns = (
        "devices",
        "batch_size",
        "batch_size_per_device",
        "dropped_per_epoch",
        "steps",
        "learning_rate",
    )
    planned = [[row[column] for column in columns] for row in json.loads(capsys.readouterr().out)]
    assert [pytest.approx(row) for row in planned] == shown
