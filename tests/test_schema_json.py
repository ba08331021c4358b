"""Editors are told the truth about YAML: conf/schema.json is src/schema.py's, takes every file of conf/, and finds mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from scripts.maintain.schema import files

pytestmark = pytest.mark.portable

CONF = ROOT / "conf"
WHOLE = json.loads((CONF / "schema.json").read_text(encoding="utf-8"))
OPTION_FILES = [path for path in sorted(CONF.rglob("*.yaml")) if path.parent.name != "hydra"]


def validator(path: Path) -> Draft7Validator:
    """For a file of conf/: of a whole config where its package is global, else of its group."""
    is_whole = path.parent == CONF or "# @package _global_" in path.read_text(encoding="utf-8")
    part = {} if is_whole else {"$ref": f"#/$defs/{path.parent.name}", "$defs": WHOLE["$defs"]}
    return Draft7Validator(WHOLE if is_whole else part)


@pytest.mark.parametrize("path", sorted(files()))
def test_it_is_made_from_the_schema_of_today(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == files()[path], "run make schema"


@pytest.mark.parametrize("path", OPTION_FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_option_file_is_valid(path: Path) -> None:
    contents = OmegaConf.to_container(OmegaConf.load(path)) or {}  # as Hydra reads: 5e-4 is a number
    assert [error.message for error in validator(path).iter_errors(contents)] == []


@pytest.mark.parametrize(
    ("file", "contents", "said"),
    [
        ("experiment/compare.yaml", {"modle": {}}, "modle"),
        ("experiment/compare.yaml", {"optim": {"leraning_rate": 1}}, "leraning_rate"),
        ("experiment/compare.yaml", {"data": {"augment": {"mixpu": 1}}}, "mixpu"),
        ("model/tiny.yaml", {"nmae": "resnet18"}, "nmae"),
        ("optim/sgd.yaml", {"lr": "fast"}, "fast"),
        ("optim/sgd.yaml", {"lr": 0}, "0"),
        ("optim/sgd.yaml", {"sched": "cosin"}, "cosin"),
        ("train/default.yaml", {"epochs": 0}, "0"),
        ("train/default.yaml", {"epochs": 1.5}, "1.5"),
    ],
)
def test_a_mistake_is_found(file: str, contents: dict[str, Any], said: str) -> None:
    found = [error.message for error in validator(CONF / file).iter_errors(contents)]
    assert found
    assert said in str(found)


@pytest.mark.parametrize(
    "contents", [{"lr": "${oc.env:LR}"}, {"clip_grad": None}, {"sched": "wsd"}, {"kwargs": {"x": [1]}}]
)
def test_what_is_allowed_is_taken(contents: dict[str, Any]) -> None:
    assert validator(CONF / "optim" / "sgd.yaml").is_valid(contents)
