"""Generate conf/schema.json and the tables of docs/keys.md from src/schema.py, and the tables of
docs/api.md from timm_parallel.

    python scripts/schema.py            (make schema)

Editors read conf/schema.json to complete and explain keys in YAML files, and to mark wrong keys.
The files in .vscode/ connect each folder of conf/ with its part of the schema. Hydra reads none of
these files.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timm_parallel
import timm_parallel.lab
from src.app import app
from src.schema import Config

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
# Text that YAML may give in place of a value: a reference such as ${other.key}, or ??? if the
# command line must set the key.
REFERENCE = {"type": "string", "pattern": r"^(\$\{.+\}|\?\?\?)$"}
# Dictionary from the name of a bound of a key to its name in JSON Schema and its sign in the
# tables.
BOUNDS = {"ge": ("minimum", ">="), "gt": ("exclusiveMinimum", ">"), "le": ("maximum", "<=")}
PAGE = "docs/keys.md"
API = "docs/api.md"
MARK = "<!-- `make schema` writes everything below this line"


def groups() -> dict[str, Any]:
    """Return the config groups, as a dictionary from name to dataclass."""
    factories = {entry.name: entry.default_factory for entry in dataclasses.fields(Config)}
    return {
        name: factory for name, factory in factories.items() if dataclasses.is_dataclass(factory)
    }


def schema() -> dict[str, Any]:
    """Build the JSON schema of a whole config. Its entry `$defs/<group>` is the schema of a YAML
    file in the folder of this group.
    """
    whole = _object(Config)
    whole["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    parts = {}
    for group, group_class in groups().items():
        whole["properties"][group] = {"$ref": f"#/$defs/{group}"}
        parts[group] = _object(group_class)
    for part in parts.values():
        part["properties"]["defaults"] = {"type": "array"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "$defs": parts}


def _sentence(group_class: Any) -> str:
    """Return the docstring of a dataclass on one line."""
    return " ".join(group_class.__doc__.split())


def _object(group_class: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(group_class)
    keys = {field.name: _key(field, hints[field.name]) for field in dataclasses.fields(group_class)}
    return {
        "type": "object",
        "description": _sentence(group_class),
        "additionalProperties": False,
        "properties": keys,
    }


def _key(field: Any, hint: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if choices := field.metadata.get("choices"):
        values = [*choices, None] if type(None) in _parts(hint) else [*choices]
        allowed: list[dict[str, Any]] = [{"enum": values}]
    else:
        bounds = {BOUNDS[name][0]: bound for name, bound in _bounds(field)}
        allowed = [_type(part, bounds) for part in _parts(hint)]
    return {
        "description": field.metadata.get("help"),
        "anyOf": [*allowed, REFERENCE],
        "default": _default(field),
    }


def _default(field: Any) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _bounds(field: Any) -> list[tuple[str, float]]:
    """Return the bounds of a config key as pairs of name and number. For example, ('ge', 0) means
    that the value must be 0 or more.
    """
    return [(name, field.metadata[name]) for name in BOUNDS if field.metadata.get(name) is not None]


def _type(hint: Any, bounds: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if hint is type(None):
        return {"type": "null"}
    if origin is list:
        return {"type": "array", "items": {"type": TYPES[typing.get_args(hint)[0]]}}
    if origin is dict:
        return {"type": "object"}
    if hint is Any:
        return {}
    return {"type": TYPES[hint], **(bounds if hint in (int, float) else {})}


def _parts(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def page() -> str:
    """Build the text of docs/keys.md: the hand-written beginning, then a table of keys with a row
    for the meaning of each config group.
    """
    rows = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|", *_rows("")]
    for group, group_class in groups().items():
        rows += [f"| **{group}** | | | | **{_sentence(group_class)}** |", *_rows(group)]
    return _below_mark(PAGE, rows)


def api_page() -> str:
    """Build the text of docs/api.md: the hand-written beginning, then a table of the public names
    of each package, with a row for each group.
    """
    rows = []
    for package in (timm_parallel, timm_parallel.lab):
        rows += [f"| | `from {package.__name__} import …` |", "|---|---|"]
        stub = Path(str(package.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
        # A group of names has a comment as its title.
        for title, *imports in (group.splitlines() for group in stub.split("\n\n")):
            names = ", ".join(f"`{line.rpartition(' ')[2]}`" for line in imports)
            rows.append(f"| {title.removeprefix('# ')} | {names} |")
        rows.append("")
    return _below_mark(API, rows[:-1])


def _below_mark(path: str, lines: list[str]) -> str:
    """Build the text of a page with new lines below the comment MARK. The text is empty if the
    project does not have the page, or if the page has no such comment.
    """
    file = app.root / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    written, mark, rest = text.partition(MARK)
    line = rest.partition("\n")[0]
    return "\n".join([f"{written}{mark}{line}\n", *lines, ""]) if mark else ""


def _rows(group: str) -> list[str]:
    """Return the rows of the keys in a group, or of those in no group."""
    rows = []
    for key, value, field in timm_parallel.leaves(Config()):
        if key.rpartition(".")[0].partition(".")[0] == group:
            kind = (
                field.type.replace("dict[str, Any]", "dict")
                .replace("None", "null")
                .replace(" | ", " or ")
            )
            default = value if isinstance(value, str) else json.dumps(value)
            # Markdown reads <name> as HTML, except between backticks.
            texts = field.metadata["help"].split("`")
            texts[::2] = [text.replace("<", "&lt;") for text in texts[::2]]
            meaning = "`".join(texts)
            rows.append(f"| `{key}` | {kind} | {default} | {_allowed(field)} | {meaning} |")
    return rows


def _allowed(field: Any) -> str:
    choices = [
        text if isinstance(text, str) else json.dumps(text)
        for text in field.metadata.get("choices") or ()
    ]
    allowed = (
        [", ".join(choices)]
        if choices
        else [f"{BOUNDS[name][1]} {bound}" for name, bound in _bounds(field)]
    )
    if _bounds(field) and "str" in field.type:
        allowed.append("auto")
    if strategy := field.metadata.get("only"):
        allowed.append(f"{strategy} only")
    return "; ".join(allowed)


def files() -> dict[str, str]:
    """Build the text of each generated file. Return a dictionary from path, relative to the
    project's root, to text.
    """
    parts: dict[str, Any] = {"conf/schema.json": schema()}
    folders = ("", "experiment/", "debug/", "local/")
    globs = {"./conf/schema.json": [f"conf/{folder}*.yaml" for folder in folders]}
    for group in groups():
        if (app.root / "conf" / group).is_dir():
            path = f".vscode/schemas/{group}.json"
            parts[path] = {"$ref": f"../../conf/schema.json#/$defs/{group}"}
            globs[f"./{path}"] = [f"conf/{group}/*.yaml"]
    parts[".vscode/settings.json"] = {"yaml.schemas": globs, "python.testing.pytestEnabled": True}
    texts = {path: json.dumps(value, indent=1) + "\n" for path, value in parts.items()}
    pages = {PAGE: page(), API: api_page()}
    return texts | {path: text for path, text in pages.items() if text}


if __name__ == "__main__":
    for path, text in files().items():
        (app.root / path).parent.mkdir(parents=True, exist_ok=True)
        (app.root / path).write_text(text, encoding="utf-8")
