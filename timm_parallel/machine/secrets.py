"""Secrets, such as passwords and tokens. They are recognized by names of environment variables and
of config keys, and replaced in all files and messages.

The value of a secret environment variable is replaced by `${oc.env:NAME}`. OmegaConf inserts the
value again when it reads a saved config. The value of a config key such as `token` is replaced by
`***`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus

from timm_parallel.machine.text import for_terminal

# Smallest length of a secret. Shorter values would be replaced inside ordinary words.
SHORTEST = 8
WORD = (
    "token|secret|password|passwd|passphrase|api_?key|access_?key(?:_id)?|secret_?key|private_?key|credentials?|"
    "auth_?key|auth_?header|bearer|(?:signing|encryption|ssh)_?key"
)
# Further words in names of secret environment variables.
VARIABLE = "pass|auth|pat|dsn|webhook|connection_string|cookies?|jwt|creds?"
# An environment variable whose name ends in _KEY is secret, unless the name is one of these. A
# config key that ends in _key is secret only if WORD lists it, because `image_key` and `label_key`
# are names of columns.
NO_SECRET = (
    r"(?!(?:.*_)?(?:public|primary|foreign|partition|sort|cache|group|index|image|label|input|target)"
    r"_key$)"
)
NAMES = re.compile(
    rf"(?:.*_)?(?:{WORD}|{VARIABLE})(?:_.*)?|.*(?:token|secret|password|passwd|apikey)|.+_pwd|{NO_SECRET}.+_key",
    re.I,
)
# Names of secret config keys. `max_tokens` and `key` do not match.
KEYS = re.compile(rf"(?:.*_)?(?:{WORD}|pwd|pass)", re.I)
REFERENCE = re.compile(r"\$\{oc\.env:\s*\w+\s*\}")
IN_URL = re.compile(r"(?<=://)([^\s:/@'\"]*):([^\s/@'\"]+)(?=@)")
NO_REFERENCE = r"(?!\s*['\"]?\$\{)"
# A secret in an override: token=abc, token=choice(a,b).
IN_OVERRIDE = re.compile(rf"(\b(?:\w*_)?(?:{WORD})\s*=\s*){NO_REFERENCE}\S+", re.I)
# A secret in a dictionary: {token: abc}.
IN_DICT = re.compile(
    rf"((?<=[{{,'\"])\s*(?:\w*_)?(?:{WORD})['\"]?\s*:\s*){NO_REFERENCE}[^\s,;\]}}]+", re.I
)
# A secret in code: the rest of a line that assigns a value to a name such as token. A call without
# a literal is no secret, e.g. `self.cls_token = nn.Parameter(torch.zeros(1))`. The possessive +
# keeps the look-ahead at the start of the value.
IN_CODE = re.compile(
    rf"^(.*?\b(?:\w*_)?(?:{WORD}|pwd|pass)['\"\]]*[ \t]*[:=]=?+[ \t]*+){NO_REFERENCE}"
    r"(?![\w.]+\([^'\"\n]{0,200}$)\S.*$",
    re.I | re.M,
)


def is_secret_variable(name: str, value: str) -> bool:
    """Return True if an environment variable is secret, because of its name, or because its value
    is a URL with a password. Paths and short values are not secret.
    """
    if len(value) < SHORTEST or is_path(value):
        return False
    return NAMES.fullmatch(name) is not None or IN_URL.search(value) is not None


def is_path(text: str) -> bool:
    """Return True if a text is an absolute path that exists."""
    return text.startswith("/") and os.path.exists(text)  # noqa: PTH110  # Path.exists raises for a long text


def is_secret_key(key: str) -> bool:
    """Return True if the last part of a config key, such as `token`, names a secret."""
    return KEYS.fullmatch(re.split(r"[./]", key)[-1]) is not None


def is_written_out(key: str, value: Any) -> bool:
    """Return True if the value of a secret config key is the secret itself. A `${…}` reference or a
    path is allowed.
    """
    if value is None or isinstance(value, bool) or not is_secret_key(key):
        return False
    return REFERENCE.sub("", str(value)) not in ("", "???") and not is_path(str(value))


def hide(text: str) -> str:
    """Replace the value of each secret environment variable in a text by the reference
    `${oc.env:NAME}`.
    """
    for name, value in _secrets_of(tuple(os.environ.items())):
        text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def hide_in(tree: Any, key: str = "") -> Any:
    """Copy nested dicts and lists without secrets. In the copy, values of secret environment
    variables are `${oc.env:NAME}`, and values of secret keys are `***`.

    `key`: the key under which `tree` is stored; it decides if a plain value is secret.
    """
    if isinstance(tree, dict):
        return {hide_in(name): hide_in(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [hide_in(value, key) for value in tree]
    shown = hide(tree) if isinstance(tree, str) else tree
    return "***" if is_written_out(key, shown) else shown


def mask(text: str) -> str:
    """Replace secrets in a message and escape control characters. Secrets are values of secret
    environment variables, values after a key such as `token`, and passwords in URLs.
    """
    return for_terminal(
        IN_OVERRIDE.sub(r"\1***", IN_DICT.sub(r"\1***", IN_URL.sub(r"\1:***", hide(text))))
    )


def mask_code(text: str) -> str:
    """Replace secrets in source code. Secrets are values of secret environment variables, the rest
    of a line after a name such as `token`, and passwords in URLs.
    """
    return IN_CODE.sub(r"\1***", IN_URL.sub(r"\1:***", hide(text)))


class HidingFormatter(logging.Formatter):
    """Log formatter that replaces secrets and escapes control characters in log lines and
    tracebacks.
    """

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(hide(super().format(record)))


@lru_cache(maxsize=1)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Find the secret environment variables. Return (name, value) pairs. Further pairs have the
    value as it looks when it is escaped or URL-quoted. The longest value comes first.
    """
    secrets = {}
    for name, value in environment:
        if is_secret_variable(name, value):
            escaped = (
                repr(value)[1:-1],
                json.dumps(value)[1:-1],
                quote_plus(value),
                " ".join(value.split()),
            )
            secrets.update({form: name for form in (*escaped, value) if len(form) >= SHORTEST})
    return sorted(((name, form) for form, name in secrets.items()), key=lambda pair: -len(pair[1]))
