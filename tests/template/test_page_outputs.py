"""Outputs on the pages have the same words as the outputs of today's code. Numbers, paths and
random choices may differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.maintain.docs_outputs import (
    FLOWERS,
    OUTPUT,
    PAGES,
    captured,
    copy_project,
    draw_flowers,
)

BLOCKS = {
    page.name: blocks
    for page in PAGES
    if (blocks := OUTPUT.findall(page.read_text(encoding="utf-8")))
}


def words_of(output: str) -> list[str]:
    """Replace numbers, hashes, drawn classes and the lines of tables, which differ between runs."""
    text = re.sub(r"'[0-9a-f]{16}'|[-+]?\d[\d,.:/-]*(?:e[-+]\d+)?", "#", output)
    text = re.sub("|".join(FLOWERS), "<class>", text)
    text = re.sub(r"\bthreads\b", "thread", text)
    text = re.sub("[━─┃│┏┳┓┡╇┩└┴┘┌┐├┤]+", "|", text)
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.slow(seconds=60)
@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("page", BLOCKS)
def test_output_shown_on_a_page_has_the_same_words_as_a_new_run_of_the_command(
    page: str, tmp_path: Path
) -> None:
    """A failure means that a message has changed since `make docs-outputs` was run."""
    copy_project(tmp_path / "project")
    draw_flowers(tmp_path / "data")
    different = []
    for _, command, lines, shown in BLOCKS[page]:
        output = captured(command, lines or None, tmp_path / "project", tmp_path / "data")
        different += [(command, line) for line in {*words_of(shown)} ^ {*words_of(output)}]
    assert different == []
