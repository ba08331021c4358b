"""Names that a config may use, and suggestions for misspelled ones. Names of timm are read from its
source files, because importing timm takes 3 s.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.app import current
from timm_parallel.keys import leaves
from timm_parallel.machine.text import yaml_text


@cache
def timm_models() -> frozenset[str]:
    """Read the names of all timm models from timm's source, without the tags of their weights
    (`resnet18`, not `resnet18.a1_in1k`).
    """
    text = _timm_models_text()
    names = re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)
    for block in re.findall(
        r"register_model_deprecations\(__name__, \{(.*?)^\}\)", text, re.MULTILINE | re.DOTALL
    ):
        names += re.findall(r"^\s*'(\w+)'\s*:", block, re.MULTILINE)
    return frozenset(names)


@cache
def timm_tags() -> frozenset[str]:
    """Read the names of timm models with the tags of their weights (`resnet18.a1_in1k`) from timm's
    source. Names that timm builds at run time are missing.
    """
    return frozenset(re.findall(r"'(\w+\.\w+)'\s*:", _timm_models_text()))


def _timm_models_text() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted((_timm() / "models").glob("*.py"))
    )


@cache
def timm_optimizers() -> frozenset[str]:
    text = (_timm() / "optim" / "_optim_factory.py").read_text(encoding="utf-8")
    # Add two optimizer names that timm accepts but does not list in _optim_factory.py.
    return frozenset(re.findall(r"\bname='(\w+)'", text)) | {"nesterov", "nesterovw"}


def _timm() -> Path:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed: pip install -r requirements.txt")
    return Path(spec.origin).parent


# Table of key names in other programs, such as timm's train.py, with the names here.
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")


def hint(name: str, known: Iterable[str]) -> str:
    """Build the end of an error message for an unknown name: `; did you mean a, b?` with similar
    names. Without a similar name, the text lists all known names if there are at most 20, and is
    empty otherwise.
    """
    lower = {candidate.lower(): candidate for candidate in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    # Without a similar name, suggest names that start with the given one: cifar10_resnet18 for
    # cifar.
    close = (
        close
        or [
            lower[match]
            for match in sorted(lower)
            if len(name) > 2 and match.startswith(name.lower())
        ][:3]
    )
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; allowed: {', '.join(sorted(lower.values()))}" if 0 < len(lower) <= 20 else ""


def is_known(key: str) -> bool:
    """Return True if `key` names a config key, a section of keys, or an entry of a dictionary key
    such as model.kwargs.
    """
    return any(
        f"{known}.".startswith(f"{key}.")
        or (isinstance(value, dict) and key.startswith(f"{known}."))
        for known, value, _ in leaves(current().config())
    )


def is_declared(key: str) -> bool:
    """Return True if `key` names a config key or a section of keys. Entries of a dictionary key
    such as model.kwargs do not count.
    """
    return any(f"{known}.".startswith(f"{key}.") for known, _, _ in leaves(current().config()))


def key_hint(key: str, more: Iterable[str] = (), value: Any = None, program: str = "train") -> str:
    """Build the end of an error message for an unknown key: `; did you mean …?` with similar keys,
    or the reason why no such key exists. The text is empty if there is neither.

    `key`: the unknown key. `more`: further valid names, besides the config keys. `value`: the value
    that the user gave to the key. `program`: `train` or `evaluate`, because evaluate.py has an
    additional table of suggestions.
    """
    tables = _other_names()
    if reason := _entry(key, value, tables["no_key"]):
        return f"; there is no such key: {reason}"
    if found := _similar_keys(key, value, tables["names"] | tables.get(program, {})):
        return f"; did you mean {', '.join(found[:3])}?"
    keys, sections = _keys_and_sections()
    similar = hint(key, [*keys, *sections, *more])
    section, _, last = key.rpartition(".")
    if f"{section}.kwargs" in keys:
        similar += (
            f"; arguments of what {section} builds go below kwargs: +{section}.kwargs.{last}=…"
        )
    return similar


def _keys_and_sections() -> tuple[list[str], list[str]]:
    keys = [known for known, _, _ in leaves(current().config())]
    return keys, sorted(
        {known.rsplit(".", depth)[0] for known in keys for depth in range(1, known.count(".") + 1)}
    )


def _similar_keys(key: str, value: Any, table: dict[str, str]) -> list[str]:
    """Find the config keys that a user most likely meant by an unknown key. Return similar keys of
    the same section, if there are any. Otherwise return the keys that replace a name of another
    program (`table`), and the keys of other sections with the same last part.

    `value`: the value that the user gave to the key. `table`: names of other programs -> keys here.
    """
    keys, sections = _keys_and_sections()
    section, _, last = key.rpartition(".")
    siblings = [
        known.rpartition(".")[2]
        for known in keys
        if section and known.rpartition(".")[0] == section
    ]
    if misspelled := difflib.get_close_matches(last, siblings, cutoff=0.8):
        return [f"{section}.{name}" for name in misspelled]
    other = _entry(key, value, table)
    elsewhere = [known for known in (*keys, *sections) if known.rpartition(".")[2] == last]
    return list(dict.fromkeys([*(other.split(", ") if other else ()), *elsewhere]))


def _entry(key: str, value: Any, table: dict[str, str]) -> str:
    """Look up an unknown key in a table of other_names.yaml, which maps key names of other programs
    to the keys of this project. If the table does not have the whole key, sections are removed from
    the left, so `trainer.max_epochs` is found as `max_epochs`. Return an empty text if nothing is
    found.

    `value`: the value that the user gave to the key. An entry for this key with this value is
    preferred to an entry for the key alone.
    """
    parts = key.lower().replace("-", "_").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    names = [name for end in ends for name in (f"{end}={yaml_text(value)}".lower(), end)]
    return next((table[name] for name in names if name in table), "")


@cache
def _other_names() -> dict[str, dict[str, str]]:
    """Read the tables of other_names.yaml: {table: {name in another program: name here}}."""
    tables: dict[str, dict[str, str]] = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    return tables


def check_option(group: str, choice: Any, options: list[str]) -> None:
    """Raise ValueError, with a suggestion, if an option of a config group does not exist.

    `group`: e.g. `model`. `choice`: the chosen option, or a list of options. `options`: all options
    of the group.
    """
    for value in choice if isinstance(choice, list) else [choice]:
        name = yaml_text(value).strip("'\"")
        if isinstance(value, dict | None) or name in options:
            continue
        if group == "model" and name.partition(".")[0] in timm_models():
            raise ValueError(
                f"model={name}: no such option; timm has a model of this name: model.name={name}"
            )
        if group == "optim" and name in timm_optimizers():
            raise ValueError(
                f"optim={name}: no such option; timm has an optimizer of this name: "
                f"optim.opt={name}"
            )
        other = _other_names()["names"].get(f"{group}={name}".lower())
        suggestion = f"; did you mean {other}?" if other else hint(name, options)
        raise ValueError(
            f"{group}={name}: no such option{suggestion}; python train.py --help lists all"
        )
