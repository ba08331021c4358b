"""Secrets written out in a config: refused early, because a run would write them into its files.

As `${oc.env:NAME}` they may be anywhere but in names of files, and src/engine/machine/secrets.py keeps their values out of
what is written. No message here quotes the value.
"""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.engine.config.names import plain_values
from src.engine.machine.secrets import IN_URL, SHORTEST, held_by, is_path, is_secret_key, is_secret_variable, reference

REFERENCE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*\}")
IN_TEXT = re.compile(r"([\w.]+)['\"]?\s*[:=]\s*['\"]?(?!\$\{)[\w.+/-]")  # `{token: abc}`, not `{token: ${…}}`
NOT_A_CHOICE = ("runtime", "overrides")  # of the hydra block: what Hydra itself notes down
# What names files, folders and studies, where nothing can be hidden afterwards.
NAMES = (
    "task_name",
    "paths.output_dir",
    "search.study_name",
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job.name",
)


def check_overrides(overrides: list[str]) -> None:
    """Refuse secrets among the overrides, before Hydra parses them: its errors would quote them."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        _check(key, value.strip("'\""), swept=True)


def check_literals(tree: DictConfig) -> None:
    """Refuse secrets in a composed config, wherever its values come from."""
    whole: Any = OmegaConf.to_container(tree)
    for key in NOT_A_CHOICE:
        whole.get("hydra", {}).pop(key, None)
    for key, value in plain_values(whole):
        _check(key, value)
    for key in NAMES:
        name = held_by(str(OmegaConf.select(tree, key, throw_on_resolution_failure=False, throw_on_missing=False)))
        if name is not None:
            raise ValueError(f"{key}: holds the value of {name}, which must not become the name of a file or a study")


def _check(key: str, value: Any, swept: bool = False) -> None:
    """Refuse one value. `swept`: it may be a sweep or a dictionary in Hydra's notation."""
    if value is None or isinstance(value, bool):
        return
    text = str(value)
    held = held_by(text)
    if held is not None:
        raise ValueError(f"{key}: holds the value of {held}; give it as '{reference(held)}', so that no file holds it")
    url = IN_URL.search(text)
    if url is not None and REFERENCE.fullmatch(url.group(2)) is None:
        raise ValueError(f"{key}: {_advice('is a URL with a password', 'PASSWORD', 'give the password')}")
    if is_secret_key(key):
        _check_secret(key, text)
    elif swept:
        inner = next((name for name in IN_TEXT.findall(text) if is_secret_key(name)), None)
        if inner is not None:
            _check_secret(f"{key}.{inner}", "literal")


def _check_secret(key: str, text: str) -> None:
    """Refuse the value of a key that is named like a secret, unless it is a reference to a variable named like one."""
    if text in ("", "null", "true", "false", "True", "False", "???") or is_path(text):
        return
    name = re.split(r"[./]", key)[-1].upper()
    variables, rest = REFERENCE.findall(text), REFERENCE.sub("", text).removeprefix("choice")
    if not variables or rest.strip("(), '\""):
        raise ValueError(f"{key}: {_advice('looks like a secret', name, 'give it')}")
    for variable in variables:
        value = os.environ.get(variable, "x" * SHORTEST)
        if len(value) < SHORTEST:
            raise ValueError(f"{key}: {variable} has fewer than {SHORTEST} characters, too few to be kept out of files")
        if not is_secret_variable(variable, value) and not is_path(value):
            raise ValueError(
                f"{key}: {variable} is no name of a secret; {_advice('known by its name only', name, 'give it')}"
            )


def _advice(what: str, name: str, give: str) -> str:
    return f"{what}; {give} as '{reference(f'MY_{name}')}', so that it is written to no file"
