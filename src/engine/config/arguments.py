"""The command line of the scripts: argparse, with options also as `key=value`, and refusals in one line."""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from src.engine.config.names import hint
from src.engine.machine.secrets import mask


class CommandLine(argparse.ArgumentParser):
    """`--topk 5`, `--topk=5` and `topk=5` mean the same."""

    def __init__(self, about: str | None) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def read(self, argv: list[str]) -> argparse.Namespace:
        """Parse `argv`; an unknown option is refused with the nearest known one."""
        arguments, unknown = self.read_known(argv)
        if unknown:
            key = unknown[0].lstrip("-").partition("=")[0]
            raise ValueError(f"{unknown[0]}: unknown option{hint(key, self._names())}")
        return arguments

    def read_known(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(known options, the arguments that are none)."""
        names = self._names()
        dashed = [f"--{item}" if "=" in item and item.partition("=")[0] in names else item for item in argv]
        return self.parse_known_intermixed_args(dashed)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"--(?=\w)", "", message).removeprefix("argument "))

    def _names(self) -> list[str]:
        flags = [flag for action in self._actions for flag in action.option_strings]
        return [flag.removeprefix("--") for flag in flags if flag.startswith("--")]


def refused_in_a_line(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wrap a script's `main`: a ValueError is a refusal, which becomes one line on stderr and exit code 2."""

    @functools.wraps(main)
    def guarded(argv: list[str]) -> int:
        try:
            return main(argv)
        except ValueError as error:
            print(f"{Path(main.__code__.co_filename).name}: {' '.join(mask(str(error)).split())}", file=sys.stderr)
            return 2

    return guarded


def whole_number(least: int = 1) -> Callable[[str], int]:
    """An argparse type: whole numbers from `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
        return int(text)

    return read


def number_or_auto(least: int = 1) -> Callable[[str], int | str]:
    """An argparse type: whole numbers from `least`, or `auto`."""
    return lambda text: text if text == "auto" else whole_number(least)(text)


def number(*, least: float = 0.0, above: float = -math.inf) -> Callable[[str], float]:
    """An argparse type: finite numbers from `least`, or above `above`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value < math.inf and value > above):
            bound = f"above {above:g}" if above >= least else f"from {least:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is no number {bound}")
        return value

    return read


def counts(text: str) -> list[int]:
    """An argparse type: whole numbers from 1, separated by commas."""
    return [whole_number()(part) for part in text.split(",")]
