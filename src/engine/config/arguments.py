"""The command line of the programs beside train.py: argparse, with options also as `key=value` and refusals in a line."""

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

    def read(self, words: list[str]) -> argparse.Namespace:
        """Raises ValueError for an unknown option, with the nearest known one."""
        arguments, unknown = self.read_known(words)
        if unknown:
            key = unknown[0].lstrip("-").partition("=")[0]
            raise ValueError(f"{unknown[0]}: unknown option{hint(key, self._names())}")
        return arguments

    def read_known(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The same, with the words that are none of these options."""
        names = self._names()
        dashed = [f"--{word}" if "=" in word and word.partition("=")[0] in names else word for word in words]
        return self.parse_known_intermixed_args(dashed)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"--(?=\w)", "", message).removeprefix("argument "))

    def _names(self) -> list[str]:
        flags = [flag for action in self._actions for flag in action.option_strings]
        return [flag.removeprefix("--") for flag in flags if flag.startswith("--")]


def refused_in_a_line(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """A program's `main`, for which ValueError is a refusal: one line on stderr, and exit code 2."""

    @functools.wraps(main)
    def guarded(words: list[str]) -> int:
        try:
            return main(words)
        except ValueError as error:
            print(f"{Path(main.__code__.co_filename).name}: {' '.join(mask(str(error)).split())}", file=sys.stderr)
            return 2

    return guarded


def whole_number(least: int = 1) -> Callable[[str], int]:
    """A type of option: numbers from `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
        return int(text)

    return read


def number_or_auto(least: int = 1) -> Callable[[str], int | str]:
    """A type of option: numbers from `least`, or the word auto."""
    return lambda text: text if text == "auto" else whole_number(least)(text)


def number(*, least: float = 0.0, above: float = -math.inf) -> Callable[[str], float]:
    """A type of option: finite numbers from `least`, or above `above`."""

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
    """A type of option: numbers from 1 with commas between them."""
    return [whole_number()(part) for part in text.split(",")]
