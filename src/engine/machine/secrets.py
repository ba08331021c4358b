"""Secrets: recognised by the names of their variables, and replaced in whatever is about to be written or shown.

In a secret's place stands `${oc.env:NAME}`, so that a frozen config still runs: whoever reads it takes the value from the
environment of its own. A secret under a harmless name is not recognised.
"""

from __future__ import annotations

import json
import logging
import os
import re
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus

SHORTEST = 8  # characters; shorter values would be replaced inside ordinary words
WORD = (
    "token|secret|password|passwd|passphrase|api_?key|access_?key(?:_id)?|secret_?key|private_?key|credentials?|"
    "auth_?key|auth_?header|bearer"
)
NAMES = re.compile(rf"(?:.*_)?(?:{WORD}|pass|auth|pat)(?:_.*)?|.*(?:token|secret|password|passwd|apikey)|.+_pwd", re.I)
KEYS = re.compile(rf"(?:.*_)?(?:{WORD}|pwd|pass)", re.I)  # of a config: `max_tokens` and `key` are none
IN_URL = re.compile(r"(?<=://)([^\s:/@'\"]*):([^\s/@'\"]+)(?=@)")
IN_TEXT = re.compile(  # as `token=abc`, `{token: abc}` and `{'token': 'abc'}`, unless a reference stands there
    rf"((?:(?<=[{{,'\"])\s*(?:\w*_)?(?:{WORD})['\"]?\s*:|\b(?:\w*_)?(?:{WORD})\s*=)\s*)(?!\s*['\"]?\$\{{)[^\s,;\]}}]+",
    re.IGNORECASE,
)


def reference(name: str) -> str:
    """What stands for the value of the environment variable `name`."""
    return f"${{oc.env:{name}}}"


def is_secret_variable(name: str, value: str) -> bool:
    """True if the environment variable is to be hidden: by its name, or because it is a URL with a password.

    An existing path is no secret: SSH_AUTH_SOCK and the like say where something lies.
    """
    if len(value) < SHORTEST or is_path(value):
        return False
    return NAMES.fullmatch(name) is not None or IN_URL.search(value) is not None


def is_path(text: str) -> bool:
    """True if `text` is the absolute path of something that exists."""
    return text.startswith("/") and os.path.exists(text)  # noqa: PTH110  # Path.exists raises for a long text


def is_secret_key(key: str) -> bool:
    """True if the last part of a config key says that its value is a secret."""
    return KEYS.fullmatch(re.split(r"[./]", key)[-1]) is not None


def held_by(text: str) -> str | None:
    """The environment variable whose secret value stands in `text`, if any."""
    return next((name for name, value in _secrets() if value in text), None)


def hide(text: str) -> str:
    """`text` without the values of secret environment variables."""
    return str(_hide_in(text, _secrets()))


def hide_in(tree: Any) -> Any:
    """The same for every string in dicts and lists, keys included, before they are written in any notation."""
    pairs = _secrets()
    return _hide_in(tree, pairs) if pairs else tree


def mask(text: str) -> str:
    """For a refusal, which may quote what is refused: also what stands after a key like `token`, and passwords in URLs."""
    return IN_TEXT.sub(r"\1***", IN_URL.sub(r"\1:***", hide(text)))


class HidingFormatter(logging.Formatter):
    """A log line, with its traceback, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def _hide_in(tree: Any, pairs: list[tuple[str, str]]) -> Any:
    if isinstance(tree, dict):
        return {_hide_in(key, pairs): _hide_in(value, pairs) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_hide_in(value, pairs) for value in tree]
    if isinstance(tree, str):
        for name, value in pairs:
            tree = tree.replace(value, reference(name))
    return tree


def _secrets() -> list[tuple[str, str]]:
    """(name, value) of the secrets in the environment, as they are and as notations write them; the longest first."""
    return _secrets_of(tuple(os.environ.items()))


@lru_cache(maxsize=1)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    found = {}
    for name, value in environment:
        if is_secret_variable(name, value):
            escaped = (repr(value)[1:-1], json.dumps(value)[1:-1], quote_plus(value), " ".join(value.split()))
            found.update({form: name for form in (*escaped, value) if len(form) >= SHORTEST})
    return sorted(((name, form) for form, name in found.items()), key=lambda pair: -len(pair[1]))
