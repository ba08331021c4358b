"""Convert errors of Hydra, OmegaConf and the YAML parser to one-line messages with key, reason and
fix.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

from omegaconf.errors import ConfigTypeError, ValidationError

from timm_parallel.app import current, root
from timm_parallel.config.suggest import is_known, key_hint
from timm_parallel.keys import leaves
from timm_parallel.machine.secrets import is_secret_key
from timm_parallel.machine.text import yaml_text

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
    if "Missing mandatory" in text:
        return required(key)
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
    helps = {known: entry.metadata["help"] for known, _, entry in leaves(current().config())}
    meaning = f" ({helps[key].rstrip('.')})" if key in helps else ""
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
    if "choices" in entry.metadata:
        return f"allowed: {', '.join(map(yaml_text, entry.metadata['choices']))}{default}"
    return f"expected {type_text(entry)}{default}"


def type_text(entry: Any) -> str:
    """Describe the type of a config key in words, e.g. `auto or an integer`. `entry`: its dataclass
    field.
    """
    return TYPES.get(entry.type) or " or ".join(TYPES[name] for name in entry.type.split(" | "))
