"""conf/schema.json anew from the schema's dataclasses: editors then complete keys in YAML and underline wrong ones.

    python scripts/maintain/schema.py            (make schema)

A group's file is checked against one part of it, to which .vscode/ points. Hydra reads none of this; what counts is
src/schema.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds this folder, not the root

from src.engine.config.compose import CONF
from src.schema import Config

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
REFERENCE = {"type": "string", "pattern": r"^(\$\{.+\}|\?\?\?)$"}  # ${other.key}, or ??? for what must be given
BOUNDS = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum"}


def schema() -> dict[str, Any]:
    """Of a whole config; a group's file is `$defs/<group>` of it."""
    groups = {
        f.name: f.default_factory for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)
    }
    whole = _object(Config)
    whole["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    for group in groups:
        whole["properties"][group] = {"$ref": f"#/$defs/{group}"}
    parts = {group: _object(kind) for group, kind in groups.items()}
    for part in parts.values():
        part["properties"]["defaults"] = {"type": "array"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "$defs": parts}


def _object(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    keys = {field.name: _key(field, hints[field.name]) for field in dataclasses.fields(kind)}
    return {"type": "object", "additionalProperties": False, "properties": keys}


def _key(field: Any, hint: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    default = None if field.default is dataclasses.MISSING else field.default
    if choices := field.metadata.get("choices"):
        words = list(dict.fromkeys([*choices, *([None] if _is_optional(hint) else [])]))
        return {"anyOf": [{"enum": words}, REFERENCE], "default": default}
    bounds = {BOUNDS[name]: bound for name, bound in field.metadata.items() if name in BOUNDS and bound is not None}
    allowed = [_type(part, bounds) for part in _parts(hint)]
    return {"anyOf": [*allowed, REFERENCE], "default": default}


def _type(hint: Any, bounds: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if hint is type(None):
        return {"type": "null"}
    if origin is list:
        return {"type": "array", "items": {"type": TYPES[typing.get_args(hint)[0]]}}
    if origin is dict:
        return {"type": "object"}
    return {"type": TYPES[hint], **(bounds if hint in (int, float) else {})}


def _parts(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_optional(hint: Any) -> bool:
    return type(None) in _parts(hint)


def files() -> dict[str, str]:
    """What is written: path from the project's root -> text."""
    whole = schema()
    groups = [group for group in whole["$defs"] if (CONF / group).is_dir()]
    parts = {f".vscode/schemas/{group}.json": {"$ref": f"../../conf/schema.json#/$defs/{group}"} for group in groups}
    globs = {"./conf/schema.json": [f"conf/{place}*.yaml" for place in ("", "experiment/", "debug/", "local/")]}
    globs |= {f"./.vscode/schemas/{group}.json": [f"conf/{group}/*.yaml"] for group in groups}
    settings = {"yaml.schemas": globs, "python.testing.pytestEnabled": True}
    found = {"conf/schema.json": whole, ".vscode/settings.json": settings, **parts}
    return {path: json.dumps(value, indent=1) + "\n" for path, value in found.items()}


if __name__ == "__main__":
    for path, text in files().items():
        (CONF.parent / path).parent.mkdir(parents=True, exist_ok=True)
        (CONF.parent / path).write_text(text, encoding="utf-8")
