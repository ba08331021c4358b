"""Names that exist elsewhere, and the nearest one to a misspelling. Reads timm's files instead of importing it (3 s)."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from src.schema import is_own_class

ROOT = Path(__file__).resolve().parents[3]


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` known names that look like `name`, best first."""
    lower = {candidate.lower(): candidate for candidate in known}
    return [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=count, cutoff=0.6)]


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?`, or what is allowed where the list is short, or nothing."""
    known = list(known)
    close = nearest(name, known)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; allowed: {', '.join(sorted(known))}" if 0 < len(known) <= 12 else ""


def own_class_exists(name: str) -> bool:
    """True if the module defines the class, or re-exports it from another module under src/.

    The file is read and not run. Functions and what comes from libraries are not for a config to call.
    """
    module, _, wanted = name.rpartition(".")
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == wanted:
                    return True
                if isinstance(node, ast.ImportFrom) and is_own_class(f"{node.module}.Class"):
                    for alias in node.names:
                        if (alias.asname or alias.name) == wanted:
                            return own_class_exists(f"{node.module}.{alias.name}")
    return False


def own_class_hint(name: str) -> str:
    """`; did you mean …?`: the same class in a file of the same name elsewhere under src/, where it may have moved to."""
    *_, module, wanted = name.split(".")
    files = (path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "src").rglob(f"{module}.py")))
    found = [place for file in files if own_class_exists(place := ".".join([*file.parts, wanted]))]
    return f"; did you mean {found[0]}?" if found else ""


@cache
def metrics() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the metrics' names, those of them that are better when lower), as src/training/metrics.py says in its text.

    The keys of the dict that `Evaluation.numbers` returns, and LOWER_IS_BETTER: the file is read and not run.
    """
    tree = _parsed("metrics.py")
    numbers = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "numbers")
    returned = next(node.value for node in ast.walk(numbers) if isinstance(node, ast.Return))
    return _keys(returned), tuple(ast.literal_eval(_assigned(tree, "LOWER_IS_BETTER")))


@cache
def losses() -> tuple[str, ...]:
    """The keys of LOSSES in src/training/objective.py, read and not run."""
    return _keys(_assigned(_parsed("objective.py"), "LOSSES"))


def _parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / "src" / "training" / file).read_text(encoding="utf-8"))


def _assigned(tree: ast.Module, name: str) -> ast.expr:
    """What a module assigns to `name`."""
    found = (node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    return next(found).value


def _keys(node: ast.expr | None) -> tuple[str, ...]:
    assert isinstance(node, ast.Dict), "a dict that is written out, so that its keys can be read without running it"
    return tuple(str(ast.literal_eval(key)) for key in node.keys if key is not None)


def objectives() -> list[str]:
    """What `optimized_metric` can name."""
    numbers = [f"{split}/{name}{of}" for split in ("val", "test") for of in ("", "_ema") for name in metrics()[0]]
    return [*numbers, "val/acc_best", "train/loss", "images_per_sec"]


def is_lower_better(objective: str) -> bool:
    """`objective` as `objectives` has them."""
    return objective.rpartition("/")[2].removesuffix("_ema") in metrics()[1]


@cache
def timm_models() -> frozenset[str]:
    """Every model name timm registers, without its pretrained tag (`resnet18`, not `resnet18.a1_in1k`)."""
    names: set[str] = set()
    for path in (_timm() / "models").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        names.update(re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE))
        for block in re.findall(r"register_model_deprecations\(__name__, \{(.*?)^\}\)", text, re.MULTILINE | re.DOTALL):
            names.update(re.findall(r"^\s*'(\w+)'\s*:", block, re.MULTILINE))
    return frozenset(names)


@cache
def timm_tags() -> frozenset[str]:
    """`resnet18.a1_in1k` and the like, as far as they stand in timm's files; some are made by loops."""
    return frozenset(
        tag
        for path in (_timm() / "models").glob("*.py")
        for tag in re.findall(r"'(\w+\.\w+)'\s*:", path.read_text(encoding="utf-8"))
    )


@cache
def timm_optimizers() -> frozenset[str]:
    text = (_timm() / "optim" / "_optim_factory.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"\bname='(\w+)'", text)) | {"nesterov", "nesterovw"}  # aliases, named nowhere else


def _timm() -> Path:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed: pip install -r requirements.txt")
    return Path(spec.origin).parent
