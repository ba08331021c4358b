"""The pages themselves: what they name exists, links lead somewhere, both languages say the same, tables are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from scripts import plan
from scripts.maintain import docs_figures

ROOT = Path(__file__).parents[1]


def test_tree_of_the_readme_exists() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1].split("```")[1]
    names = re.findall(r"[\w/]+\.py|conf/|tests/|docs/|src/", tree)
    folders = [
        ROOT,
        ROOT / "src",
        *(path for path in (ROOT / "src").rglob("*") if path.is_dir()),
        ROOT / "scripts" / "maintain",
    ]
    for name in names:
        assert any((folder / name).exists() for folder in folders), name
    shown = {Path(name).name for name in names}
    packages = {path.name for path in (ROOT / "src").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert all(f"{package}/" in tree for package in packages)
    assert {path.name for path in (ROOT / "src").glob("*.py")} - {"__init__.py"} <= shown


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def links_of(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links_of(page.read_text(encoding="utf-8")):
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not place or place in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"python (scripts/[\w/]+\.py)((?: +--[\w-]+(?: [\w.,]+)?)*)", text)
    for script, options in scripts:
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, (script, option)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_readme_is_short_enough_to_be_read() -> None:
    """A screen and a half: what does not fit has its page in docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize(
    ("first", "second"), [("README.md", "README.zh-CN.md"), ("docs/dp_and_ddp.md", "docs/dp_and_ddp.zh-CN.md")]
)
def test_both_languages_are_in_step(first: str, second: str) -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in (first, second))
    shown = re.compile(r"^(?:make|python|torchrun|tensorboard) .*$|`((?:make|python|nvidia-smi) [^`]+)`", re.MULTILINE)
    commands = [
        [(found[1] or found[0]).partition("#")[0].rstrip() for found in shown.finditer(text)]
        for text in (english, chinese)
    ]
    assert commands[0] == commands[1] and len(commands[0]) > 4
    headings = [[len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)] for text in (english, chinese)]
    assert headings[0] == headings[1]
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert rows[0] == rows[1]
    links = [
        {link.replace(".en.", ".").replace(".zh-CN.", ".") for link in links_of(text)} for text in (english, chinese)
    ]
    assert links[0] == links[1] and len(links[0]) > 2
    code = [re.findall(r"`([\w./=]+)`", text) for text in (english, chinese)]
    assert sorted(code[0]) == sorted(code[1])


def test_trees_of_both_languages_are_the_same() -> None:
    trees = []
    for name in ("README.md", "README.zh-CN.md"):
        (tree,) = re.findall(
            r"^```\n(train\.py .*?)```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        trees.append([(line[:25], re.findall(r"[a-z_]+\.(?:py|md)", line)) for line in tree.splitlines()])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("language", list(docs_figures.WORDS))
def test_the_drawing_of_a_step_is_what_its_code_draws(language: str) -> None:
    """`make docs-figures` was run since the code changed."""
    assert (docs_figures.FIGURES / f"step.{language}.svg").read_text(encoding="utf-8") == docs_figures.draw_step(
        language
    )


BATCH_PAGE = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
PLANS = re.findall(r"^python scripts/plan\.py (.*)\n```\n\n((?:\|.*\n)+)", BATCH_PAGE, re.MULTILINE)


def test_the_page_on_batches_has_its_tables() -> None:
    assert len(PLANS) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "table"), PLANS)
def test_the_tables_of_the_page_on_batches_are_those_of_the_plan(
    arguments: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [[float(cell) for cell in re.findall(r"[\d.]+", row)] for row in table.splitlines()[2:]]
    assert plan.main([*shlex.split(arguments), "--json"]) == 0
    columns = ("devices", "batch_size", "batch_size_per_device", "dropped_per_epoch", "steps", "learning_rate")
    planned = [[one[column] for column in columns] for one in json.loads(capsys.readouterr().out)]
    assert [pytest.approx(row) for row in planned] == shown
