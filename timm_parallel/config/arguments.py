"""Argument parser of the scripts. It accepts options as `key=value` too, and prints an error in one
line.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from timm_parallel.machine.files import finite
from timm_parallel.machine.secrets import mask
from timm_parallel.machine.streams import open_closed_streams


def print_json(value: Any) -> None:
    """Print a value as one line of JSON. NaN and infinity become null, because JSON does not have
    them.
    """
    print(json.dumps(finite(value)), flush=True)


class _CommandLine(argparse.ArgumentParser):
    """Argument parser of scripts, which `command_line` builds."""

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        dashed = []
        for item in args or ():
            name, equals, value = item.partition("=")
            option = self._option_string_actions.get(f"--{name}") if equals else None
            if option is not None and option.nargs == 0:
                if value not in ("true", "false"):
                    raise ValueError(f"{item}: expected {name}=true or {name}=false")
                dashed += [f"--{name}"] if value == "true" else []
            else:
                dashed.append(item if option is None else f"--{item}")
        return super().parse_known_intermixed_args(dashed, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def command_line(about: str | None) -> argparse.ArgumentParser:
    """Build a parser that accepts `--topk 5`, `--topk=5` and `topk=5`, and a flag as `--json` or
    `json=true`. Scripts must call its method parse_intermixed_args, because only that method
    accepts `topk=5`. `about`: text of --help.
    """
    return _CommandLine(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def errors_in_one_line(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Decorate the `main` function of a script. A ValueError or the error of a file then prints
    one line on stderr and returns exit code 2. Ctrl-C prints one line and returns 130.
    """
    name = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def guarded(argv: list[str]) -> int:
        open_closed_streams()
        try:
            return main(argv)
        except ValueError as error:
            print(f"{name}: {' '.join(mask(str(error)).split())}", file=sys.stderr)
            return 2
        except OSError as error:
            # An error without a number is not that of a file, so it keeps its traceback.
            if error.errno is None:
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"{name}: {mask(f'{where}{error.strerror}')}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{name}: stopped by SIGINT", file=sys.stderr)
            return 128 + signal.SIGINT

    return guarded


def number_argument(
    kind: type[int] | type[float] = float,
    *,
    least: float = 0,
    or_auto: bool = False,
) -> Callable[[str], Any]:
    """Build an argparse type that accepts a finite number.

    `kind`: int or float. `least`: smallest allowed value. `or_auto`: also accept the
    text `auto`.
    """
    number = "an integer" if kind is int else "a number"
    expected = f"{number} >= {least:g}{' or auto' if or_auto else ''}"

    def read(text: str) -> float | str:
        if or_auto and text == "auto":
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return value

    return read


def counts_argument(text: str) -> list[int]:
    """Parse comma-separated integers >= 1, e.g. `1,2,4`. Scripts use this function as an
    argparse type.
    """
    return [number_argument(int, least=1)(part) for part in text.split(",")]


def file_argument(text: str) -> Path:
    """Parse the path of a file that a script writes. Scripts use this function as an argparse type,
    which refuses a folder before the script computes anything.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: is a folder; give the path of a file")
    return path


def parse_command_line(words: list[str]) -> Any:
    """Parse the arguments of train.py, e.g. `["model=tiny", "-m"]`, with Hydra's parser. Returns
    the argparse namespace. Raises ValueError for an option that does not exist.
    """
    from timm_parallel.config.explain import key_hint
    from timm_parallel.patches import hydra_parser

    def refuse(message: str) -> NoReturn:
        # Explain an argument that starts with a dash and is not an option of Hydra, such as
        # --lr=0.1.
        if unknown := re.match(r"(?:unrecognized arguments|ambiguous option): (-\S+)", message):
            word = unknown.group(1)
            key = word.partition("=")[0].lstrip("-").replace("-", "_")
            message = f"{word}: no such option; keys have no dashes in front{key_hint(key)}"
        raise ValueError(f"{message}; python train.py --help lists the valid arguments")

    parser = hydra_parser()
    # Raise an error with a one-line message, where argparse would print its usage and exit.
    parser.error = refuse  # type: ignore[method-assign]
    # Use the intermixed parser, because overrides may stand before and after a flag: `model=tiny -m
    # seed=1,2`.
    return parser.parse_intermixed_args(words)
