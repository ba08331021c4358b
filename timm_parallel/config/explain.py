"""Messages about a wrong config: one line with key, reason and fix for errors of Hydra, OmegaConf
and the YAML parser, and suggestions for misspelled names.

Names of timm are read from its source files, because importing timm takes 3 s.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import ConfigTypeError, ValidationError

from timm_parallel.app import current, root
from timm_parallel.keys import leaves
from timm_parallel.machine.secrets import is_secret_key
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
    assert spec is not None and spec.origin is not None
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

    Similar keys of the same section come first. Otherwise suggest the keys that replace a name of
    another program, and keys of other sections with the same last part.

    `key`: the unknown key. `more`: further valid names, besides the config keys. `value`: the value
    that the user gave to the key. `program`: `train` or `evaluate`, because evaluate.py has an
    additional table of suggestions.
    """
    tables = _other_names()
    if reason := _entry(key, value, tables["no_key"]):
        return f"; there is no such key: {reason}"
    keys = [known for known, _, _ in leaves(current().config())]
    sections = sorted(
        {known.rsplit(".", depth)[0] for known in keys for depth in range(1, known.count(".") + 1)}
    )
    section, _, last = key.rpartition(".")
    siblings = {
        known.rpartition(".")[2]: known
        for known in keys
        if section and known.rpartition(".")[0] == section
    }
    found = [siblings[name] for name in difflib.get_close_matches(last, siblings, cutoff=0.8)]
    if not found:
        other = _entry(key, value, tables["names"] | tables.get(program, {}))
        elsewhere = [known for known in (*keys, *sections) if known.rpartition(".")[2] == last]
        found = list(dict.fromkeys([*(other.split(", ") if other else ()), *elsewhere]))
    if found:
        return f"; did you mean {', '.join(found[:3])}?"
    similar = hint(key, [*keys, *sections, *more])
    if f"{section}.kwargs" in keys:
        similar += (
            f"; arguments of what {section} builds go below kwargs: +{section}.kwargs.{last}=…"
        )
    return similar


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


UNPARSABLE = (
    "cannot be parsed; write a list as [a,b], and quote a text with special characters: "
    "'key=\"a=b\"'"
)
# Type annotation of a config key -> its description in a message.
TYPES = {
    "int": "an integer",
    "int | str": "auto or an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "None": "null",
    "dict[str, Any]": "a dictionary, {name: value}",
    "list[int]": "a list of integers, [0,1]",
    "list[float]": "a list of numbers, [0.5,1.0]",
    "list[str]": "a list of texts, [a,b]",
    "Any": "a value",
}


def explain(error: Exception, overrides: Iterable[str] = ()) -> str:
    """Convert an error of Hydra, OmegaConf or the YAML parser to a message of one line, with key,
    reason and fix.

    `overrides`: the `key=value` arguments of the command line.
    """
    cause = error.__cause__ if getattr(error.__cause__, "full_key", None) else error
    text = " ".join(str(cause).split())
    if hasattr(error, "override"):
        return _not_parsed(str(error.override), text)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)' 1\. ", text):
        given = ambiguous.group(1)
        return (
            f"{given}: expected one value (0.1, not 0,1); write a list as [a,b], or add -m to "
            f"sweep; for a comma in a text: write {_as_text(given)}"
        )
    in_text = re.search(r"full_key: (\S+)", str(error))
    key = str(getattr(cause, "full_key", None) or (in_text.group(1) if in_text else ""))
    if not key:
        # Find the key within Hydra's sentence, e.g. 'x' in: Could not append to config. An item is
        # already at 'x'.
        named = [
            given for given in overrides if f"'{given.lstrip('+~').partition('=')[0]}'" in text
        ]
        return f"{named[0]}: {text}" if named else text
    if re.search(r"Key '.*' not in|not in struct|is not in", text):
        if is_known(key) and not key.startswith("hydra"):
            return f"{key}: not set yet; add it with +{key}=…"
        file = re.match(r"In '(.+?)': ", str(error))
        # Without the line, Hydra puts the keys of a file below the name of its folder.
        is_package = file and key == file.group(1).partition("/")[0]
        if file and (is_package or re.fullmatch("_.*_?", key)):
            return (
                f"{key}: unknown key; write # @package _global_ as the first line of the file "
                f"{file.group(1)}.yaml, and save the file without a byte order mark"
            )
        return f"{key}: unknown key{key_hint(key)}"
    as_given = {
        override.lstrip("+~").partition("=")[0]: override.lstrip("+~") for override in overrides
    }
    # Remove the index of a list item, because the schema declares the type of the whole list.
    declared = key.partition("[")[0]
    if isinstance(cause, ValidationError) and (expected := _expected(declared)):
        return f"{as_given.get(declared, f'{key}={yaml_text(cause.value)}')}: {expected}"
    # Handle an override that gives a list to a section of keys.
    if (
        isinstance(cause, ConfigTypeError)
        and declared in as_given
        and (expected := _expected(declared))
    ):
        return f"{as_given[declared]}: {expected}"
    return f"{as_given.get(key, key)}: {text.split(' full_key: ')[0]}"


def required(key: str) -> str:
    """Build the error message for a key whose value is `???`, with the help text of the key."""
    helps = {known: entry.metadata.get("help") for known, _, entry in leaves(current().config())}
    text = helps.get(key)
    meaning = f" ({text.rstrip('.')})" if text else ""
    return f"{key}=???: required{meaning}; set {key}=…"


def _not_parsed(word: str, reason: str) -> str:
    """Build the error message for an argument of the command line that Hydra could not parse.

    `word`: the argument. `reason`: Hydra's message.
    """
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word}: {_without_equals(word)}"
    if is_secret_key(key):
        return f"{word}: {UNPARSABLE}"
    if re.match("~(/|$)", value):
        return (
            f"{word}: neither the shell nor train.py expands ~ here; write {key}=$HOME{value[1:]}"
        )
    # Replace Hydra's parse error by a plain text, because the error quotes only fragments of the
    # value.
    if re.search(r"input '|NoViableAlt|token recognition", reason):
        reason = f"cannot be parsed; for a text with special characters: write {_as_text(word)}"
        if value[:1] in ("[", "{", "("):
            reason = UNPARSABLE
    return f"{word}: {reason.split(' See https')[0]}"


def _as_text(word: str) -> str:
    """Return an argument `key=value` with its value quoted as a text, for the shell."""
    key, _, value = word.partition("=")
    escaped = value.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')


def _without_equals(word: str) -> str:
    """Suggest how to fix an argument of the command line without `=`: choose an option of the
    group, or add a value.
    """
    folder = root() / "conf" / word
    if word.isidentifier() and (options := sorted(path.stem for path in folder.glob("*.yaml"))):
        return f"expected a value; write {' or '.join(f'{word}={option}' for option in options)}"
    if is_known(word):
        return f"a value is missing; write {word}=…: {_expected(word)}"
    spaces = "without spaces next to =; quote a value with spaces: 'key=\"a b\"'"
    return f"expected key=value {spaces}{key_hint(word)}"


def _expected(key: str) -> str:
    """Describe the values that a config key accepts: its choices or type, and its default. For a
    section of keys, the text names the first key of the section. The text is empty for an unknown
    key.
    """
    below = [
        (known, value, entry)
        for known, value, entry in leaves(current().config())
        if f"{known}.".startswith(f"{key}.")
    ]
    if not below:
        return ""
    known, value, entry = below[0]
    if known != key:
        return f"expected keys below it; set one, e.g. {known}=…"
    default = "" if value is None else f"; the default is {key}={yaml_text(value)}"
    if choices := entry.metadata.get("choices"):
        return f"allowed: {', '.join(map(yaml_text, choices))}{default}"
    return f"expected {type_text(entry)}{default}"


def type_text(entry: Any) -> str:
    """Describe the type of a config key in words, e.g. `auto or an integer`. `entry`: its dataclass
    field.
    """
    annotation = entry.type
    # A module without `from __future__ import annotations` has types in place of texts.
    if not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    names = [annotation] if annotation in TYPES else annotation.split(" | ")
    return " or ".join(TYPES.get(name, name) for name in names)
