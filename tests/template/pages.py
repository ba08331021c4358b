"""Parser of the documentation pages, and of the comments in the files of conf/, for all tests of
pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.maintain.docs_outputs import OUTPUT
from tests.template.runs import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose code blocks are files to write, see tests/template/test_extend_pages.py.
EXTEND_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("extend", "extend_training", "examples")]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Pattern of a command in inline code, which starts with the name of a program.
IN_TEXT = re.compile(
    r"([A-Z]+=\S+ )?(make|python|torchrun|tensorboard|docker|nvidia-smi|pip|source|cp|kubectl|"
    r"scancel|tests/\S+\.sh) \S"
)


@dataclass(frozen=True)
class Output:
    """Output of a command that a page shows. `lines` is a pattern of the shown lines; None: all."""

    page: str
    command: str
    lines: str | None
    text: str


def read(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the code blocks of Markdown text as pairs of language and code."""
    return BLOCK.findall(text)


def code_of(page: Path | str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    return [code for found, code in blocks(read(page)) if found == language]


def spans(text: str) -> list[str]:
    """Return the inline code of Markdown text. Code blocks are left out."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]


def sections(page: Path | str) -> dict[str, str]:
    """Return the text of each section of a page, as a dictionary from heading to text."""
    parts = re.split(r"^## (.*)\n", read(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands_of(path: Path) -> list[str]:
    """Return the commands of a page, or in the comments of a file in conf/."""
    text = read(path)
    if path.suffix != ".md":
        lines = re.findall(r"^#   ((?:python|torchrun|make|cp) .*)$", text, re.MULTILINE)
        shown = [part for line in lines for part in re.split(r"\s+or: |\s+&& ", line)]
    else:
        shown = [line for code in code_of(path, "bash") for line in code.splitlines()]
        shown += [span for span in spans(text) if IN_TEXT.match(span)]
    return [re.split(r"\s{3,}|\s+#", line)[0].strip() for line in shown if line.strip()]


def all_commands() -> list[str]:
    """Return the commands of all pages and files of conf/, except EXTEND_PAGES."""
    pages = {*PAGES, *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "conf").rglob("*.example")}
    pages -= {ROOT / "CHANGELOG.md", *EXTEND_PAGES}
    return sorted({command for path in pages for command in commands_of(path)})


def outputs_of(page: Path) -> list[Output]:
    """Return the outputs that a page shows below comments with their commands."""
    return [
        Output(name_of(page), match["command"], match["lines"], match["shown"])
        for match in OUTPUT.finditer(read(page))
    ]


def links_of(text: str) -> list[str]:
    """Return the links of Markdown text to files and headings of the project."""
    return [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        if not re.match(r"https?:|mailto:", link)
    ]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates from the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
