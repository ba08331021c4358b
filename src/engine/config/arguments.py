"""`key=value` words for the commands beside train.py, which need no Hydra: a run folder is already composed."""

from __future__ import annotations

from src.engine.config.names import hint


def parse_arguments(
    arguments: list[str], defaults: dict[str, str | None], needed: tuple[str, ...], about: str
) -> dict[str, str]:
    """The options given, over `defaults`; those that are neither given nor have a default are left out.

    `--help` prints `about` and leaves. Errors: ValueError for an unknown option, or a needed one that is missing.
    """
    given = {key: value for key, value in defaults.items() if value is not None}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in ("-h", "--help"):
            print(about)
            raise SystemExit(0)
        if key not in defaults or not value:
            raise ValueError(f"{argument}: unknown option{hint(key, defaults)}")
        given[key] = value
    for key in needed:
        if key not in given:
            raise ValueError(f"{key}=…: must be given; --help tells more")
    return given


def one_of(options: dict[str, str], key: str, *allowed: str) -> str | None:
    """An option that takes one of a few words; None where it is not given. Errors: ValueError."""
    value = options.get(key)
    if value is not None and value not in allowed:
        raise ValueError(f"{key}={value}: allowed: {', '.join(allowed)}")
    return value


def whole_number(options: dict[str, str], key: str, least: int = 1) -> int:
    """An option that is a number. Errors: ValueError."""
    if not (options[key].isascii() and options[key].isdigit() and int(options[key]) >= least):
        raise ValueError(f"{key}={options[key]}: give a whole number from {least}")
    return int(options[key])
