"""Print the size of the code in statements for each folder: `make size`.

Statements are counted with `ast`, without docstrings. Counting lines instead would reward long
lines and missing comments.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "timm_parallel/tests",
    "timm_parallel/testing",
    "timm_parallel/lab",
    "timm_parallel",
    "src",
    "scripts",
    "tests",
)
TOP = sorted({folder.partition("/")[0] for folder in FOLDERS})


def count_statements(source: str) -> int:
    """Count the statements of Python code, without docstrings and other bare strings."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(not _is_bare_string(node) for node in statements)


def _is_bare_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> None:
    """Print the number of statements of each folder. A file counts only for the first folder of
    FOLDERS that contains it.
    """
    sizes: Counter[str] = Counter()
    for path in (path for top in TOP for path in (ROOT / top).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        folder = next(folder for folder in FOLDERS if name.startswith(f"{folder}/"))
        sizes[folder] += count_statements(path.read_text(encoding="utf-8"))
    for folder in FOLDERS:
        print(f"{folder:22s} {sizes[folder]:7,} statements")


if __name__ == "__main__":
    main()
