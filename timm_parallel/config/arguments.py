"""Command lines of the scripts: argparse that also accepts `key=value` options and prints an error
in one line.
"""

from __future__ import annotations

import argparse
import functools
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from timm_parallel.machine.process import exit_process
from timm_parallel.machine.secrets import mask


class CommandLine(argparse.ArgumentParser):
    """Argument parser that accepts `--topk 5`, `--topk=5` and `topk=5`. Call its
    parse_intermixed_args.
    """

    def __init__(self, about: str | None) -> None:
        super().__init__(
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        dashed = []
        for item in args or ():
            name, equals, _ = item.partition("=")
            is_option = equals and f"--{name}" in self._option_string_actions
            dashed.append(f"--{item}" if is_option else item)
        return super().parse_known_intermixed_args(dashed, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    exit_process = staticmethod(exit_process)

    @staticmethod
    def errors_in_one_line(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        """Wrap a script's `main`: a ValueError or Ctrl-C becomes one line on stderr, with exit code
        2 or 130.
        """
        name = Path(main.__code__.co_filename).name

        @functools.wraps(main)
        def guarded(argv: list[str]) -> int:
            try:
                return main(argv)
            except ValueError as error:
                print(f"{name}: {' '.join(mask(str(error)).split())}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print(f"{name}: stopped by SIGINT", file=sys.stderr)
                return 128 + signal.SIGINT

        return guarded

    @staticmethod
    def number(
        kind: type[int] | type[float] = float,
        *,
        least: float = 0,
        above: float = -math.inf,
        or_auto: bool = False,
    ) -> Callable[[str], Any]:
        """Return an argparse type for a finite number >= `least` or > `above`; `or_auto` also
        accepts `auto`.
        """
        bound = f"> {above:g}" if above >= least else f">= {least:g}"
        expected = (
            ("an integer " if kind is int else "a number ")
            + bound
            + (" or auto" if or_auto else "")
        )

        def read(text: str) -> float | str:
            if or_auto and text == "auto":
                return text
            try:
                value = kind(text)
            except ValueError:
                value = math.nan
            if not (least <= value < math.inf and value > above):
                raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
            return value

        return read

    @staticmethod
    def counts(text: str) -> list[int]:
        """Parse comma-separated integers >= 1; used as an argparse type."""
        return [CommandLine.number(int, least=1)(part) for part in text.split(",")]


def parse_command_line(words: list[str]) -> Any:
    """Parse the words of a command line with Hydra's parser, as train.py does. Returns argparse's
    namespace.
    """
    from hydra._internal.utils import get_args_parser

    return get_args_parser().parse_intermixed_args(words)
