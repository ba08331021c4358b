"""Each file of conf/ starts with comments that state its purpose and a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.template.runs import ROOT

OPTION_FILES = sorted((ROOT / "conf").rglob("*.yaml"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", OPTION_FILES, ids=name_of)
def test_hydra_yaml_file_starts_with_comments_on_its_purpose_and_command(path: Path) -> None:
    opening = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        opening.append(line)
    comments = [line for line in opening if not line.startswith("# @package")]
    assert len(comments) >= 2, "the file must open with its purpose and its command"
    group, option = path.parent.name, path.stem
    commands = [line for line in comments if re.search(r"\b(python|torchrun .*)\s*train\.py", line)]
    assert commands
    if path.parent != ROOT / "conf" and group not in ("hydra", "train", "local"):
        assert any(f"{group}={option}" in line for line in commands), (
            f"no command chooses {group}={option}"
        )
    if group == "experiment":
        assert any(line.startswith("# Expected: ") for line in comments)
