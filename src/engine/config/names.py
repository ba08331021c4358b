"""Names that exist (keys, metrics, losses, timm's models), and those that a misspelt one may mean.

Files of timm and of src/training are read as text: importing them would take 3 s.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from src.schema import Config, is_own_class, leaves

ROOT = Path(__file__).resolve().parents[3]


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?`, or what is allowed where the list is short, or nothing."""
    known = list(known)
    lower = {candidate.lower(): candidate for candidate in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; allowed: {', '.join(sorted(known))}" if 0 < len(known) <= 20 else ""


def is_known(key: str) -> bool:
    """True if the schema has `key`, or a section of that name, or it lies below a free dictionary."""
    return any(
        f"{known}.".startswith(f"{key}.") or (isinstance(value, dict) and key.startswith(f"{known}."))
        for known, value, _ in leaves(Config())
    )


def plain_values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value in nested dicts and lists; the items of a list have the list's key."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from plain_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from plain_values(value, key)
    else:
        yield key, node


def key_hint(key: str, more: Iterable[str] = ()) -> str:
    """`; did you mean …?`: keys with the same last part, else keys (or `more`) that look alike."""
    keys = [known for known, _, _ in leaves(Config())]
    sections = sorted({known.rsplit(".", depth)[0] for known in keys for depth in range(1, known.count(".") + 1)})
    last = key.rpartition(".")[2]
    elsewhere = [known for known in (*keys, *sections) if known.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {', '.join(elsewhere[:3])}?"
    return hint(key, [*keys, *sections, *more])


def explain(error: Exception, overrides: Iterable[str] = ()) -> str:
    """An error of Hydra, OmegaConf or the YAML parser in one line: the key as it was given, what is wrong, the remedy."""
    cause = error.__cause__ if getattr(error.__cause__, "full_key", None) else error
    text = " ".join(str(cause).split())
    if hasattr(error, "override"):  # Hydra could not parse this word of the command line
        return f"{error.override}: {text.split(' See https')[0]}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found[1]}: is set already, so leave the + away: {found[1]}=…"
    in_text = re.search(r"full_key: (\S+)", str(error))
    key = str(getattr(cause, "full_key", None) or (in_text.group(1) if in_text else ""))
    if not key:
        return text
    if re.search(r"Key '.*' not in|not in struct|is not in", text):
        if is_known(key) and not key.startswith("hydra"):
            return f"{key}: not set yet, so add it: +{key}=…"
        return f"{key}: unknown key{key_hint(key)}"
    if "Missing mandatory" in text:
        return f"{key}=???: must be given, e.g. {key}=…"
    as_given = {override.lstrip("+~").partition("=")[0]: override.lstrip("+~") for override in overrides}
    return f"{as_given.get(key, key)}: {text.split(' full_key: ')[0]}"


def own_class_exists(name: str) -> bool:
    """True if the module defines the class, or re-exports it from another module under src/.

    The file is read, not run. A config may name neither functions nor what comes from libraries.
    """
    module, _, class_name = name.rpartition(".")
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == class_name:
                    return True
                if isinstance(node, ast.ImportFrom) and is_own_class(f"{node.module}.Class"):
                    for alias in node.names:
                        if (alias.asname or alias.name) == class_name:
                            return own_class_exists(f"{node.module}.{alias.name}")
    return False


def own_class_hint(name: str) -> str:
    """`; did you mean …?`: the same class in a file of the same name elsewhere under src/, where it may have moved to."""
    *_, module, class_name = name.split(".")
    files = (path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "src").rglob(f"{module}.py")))
    found = [place for file in files if own_class_exists(place := ".".join([*file.parts, class_name]))]
    return f"; did you mean {found[0]}?" if found else ""


@cache
def metrics() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of all metrics, those that are better when lower), read from the text of src/training/metrics.py.

    They are the keys of the dict that `Evaluation.numbers` returns, and LOWER_IS_BETTER.
    """
    tree = _parsed("metrics.py")
    numbers = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "numbers")
    returned = next(node.value for node in ast.walk(numbers) if isinstance(node, ast.Return))
    return _keys(returned), tuple(ast.literal_eval(_assigned(tree, "LOWER_IS_BETTER")))


@cache
def losses() -> tuple[str, ...]:
    """The keys of LOSSES, read from the text of src/training/objective.py."""
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
    text = _timm_models_text()
    names = re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)
    for block in re.findall(r"register_model_deprecations\(__name__, \{(.*?)^\}\)", text, re.MULTILINE | re.DOTALL):
        names += re.findall(r"^\s*'(\w+)'\s*:", block, re.MULTILINE)
    return frozenset(names)


@cache
def timm_tags() -> frozenset[str]:
    """Models with the tag of their weights (`resnet18.a1_in1k`), as far as timm's files spell them out."""
    return frozenset(re.findall(r"'(\w+\.\w+)'\s*:", _timm_models_text()))


def _timm_models_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((_timm() / "models").glob("*.py")))


@cache
def timm_optimizers() -> frozenset[str]:
    text = (_timm() / "optim" / "_optim_factory.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"\bname='(\w+)'", text)) | {"nesterov", "nesterovw"}  # aliases, named nowhere else


def _timm() -> Path:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed: pip install -r requirements.txt")
    return Path(spec.origin).parent
