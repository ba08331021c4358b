"""conf/schema.json and docs/keys.md, which are generated from src/schema.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from scripts.schema import files
from src.schema import Config
from tests.template.runs import ROOT
from timm_parallel.keys import leaves

pytestmark = pytest.mark.portable

CONF = ROOT / "conf"
WHOLE = json.loads((CONF / "schema.json").read_text(encoding="utf-8"))
OPTION_FILES = [path for path in sorted(CONF.rglob("*.yaml")) if path.parent.name != "hydra"]


def validator(path: Path) -> Draft7Validator:
    """Return the validator of a file of conf/: of a whole config, or of its group."""
    is_whole = path.parent == CONF or "# @package _global_" in path.read_text(encoding="utf-8")
    part = {} if is_whole else {"$ref": f"#/$defs/{path.parent.name}", "$defs": WHOLE["$defs"]}
    return Draft7Validator(WHOLE if is_whole else part)


@pytest.mark.parametrize("path", sorted(files()))
def test_schema_json_and_docs_keys_md_equal_files_generated_from_schema_py(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == files()[path], "run make schema"


def test_schema_json_has_help_of_every_key_and_keys_page_lists_every_key() -> None:
    page = files().get("docs/keys.md")
    for key, _, field in leaves(Config()):
        part: Any = WHOLE
        for name in key.split("."):
            part = part["properties"][name]
            part = WHOLE["$defs"][name] if "$ref" in part else part
        assert part["description"] == field.metadata["help"], key
        assert page is None or f"| `{key}` |" in page, key


@pytest.mark.parametrize("path", OPTION_FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_yaml_file_in_conf_is_valid_under_schema_json(path: Path) -> None:
    contents = OmegaConf.to_container(OmegaConf.load(path)) or {}
    assert [error.message for error in validator(path).iter_errors(contents)] == []


@pytest.mark.parametrize(
    ("file", "contents", "named"),
    [
        ("experiment/compare.yaml", {"modle": {}}, "modle"),
        ("experiment/compare.yaml", {"optim": {"leraning_rate": 1}}, "leraning_rate"),
        ("experiment/compare.yaml", {"data": {"augment": {"mixpu": 1}}}, "mixpu"),
        ("model/tiny.yaml", {"nmae": "resnet18"}, "nmae"),
        ("optim/sgd.yaml", {"lr": "fast"}, "fast"),
        ("optim/sgd.yaml", {"lr": 0}, "0"),
        ("optim/sgd.yaml", {"clip_mode": "nrom"}, "nrom"),
        ("train/default.yaml", {"epochs": 0}, "0"),
        ("train/default.yaml", {"epochs": 1.5}, "1.5"),
    ],
)
def test_schema_json_rejects_misspelled_keys_and_invalid_values(
    file: str, contents: dict[str, Any], named: str
) -> None:
    errors = [error.message for error in validator(CONF / file).iter_errors(contents)]
    assert errors
    assert named in str(errors)


@pytest.mark.parametrize(
    "contents",
    [{"lr": "${oc.env:LR}"}, {"clip_grad": None}, {"sched": "wsd"}, {"kwargs": {"x": [1]}}],
)
def test_schema_json_accepts_interpolations_null_and_kwargs(contents: dict[str, Any]) -> None:
    assert validator(CONF / "optim" / "sgd.yaml").is_valid(contents)
