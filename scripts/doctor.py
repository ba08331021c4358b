"""Looks at this machine and says which command to begin with, or what to mend: `python scripts/doctor.py [--json]`.

Tries a rendezvous and a step with every strategy that could run here; needs no network and no GPU. Exit code 1 when
training could not start.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  # whoever asks a doctor may have any Python
        print(f"Python {sys.version.split()[0]}: too old; make PYTHON=python3.12 VENV=.venv312 doctor", file=sys.stderr)
        return 1
    try:
        from src.engine.config.arguments import CommandLine, refused_in_a_line
        from src.engine.doctor.examine import examine
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: make doctor, or pip install -r requirements.txt", file=sys.stderr)
        return 1
    parser = CommandLine(__doc__)
    parser.add_argument("--json", action="store_true", help="what was found, for programs")
    return refused_in_a_line(lambda argv: examine(parser.read(argv).json))(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
