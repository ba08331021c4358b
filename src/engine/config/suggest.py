"""Names that a config may use, and suggestions for a misspelled name. timm's files are read as text: its import takes 3 s."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf.errors import ValidationError

from src.engine.config.removed import REMOVED
from src.engine.keys import leaves
from src.engine.machine.secrets import is_secret_key
from src.engine.machine.text import yaml_text
from src.engine.metric import Metric
from src.schema import Config, known_metrics

ROOT = Path(__file__).resolve().parents[3]
# Types of keys in src/schema.py, in words.
TYPES = {
    "int": "an integer",
    "int | str": "auto or an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "None": "null",
    "dict[str, Any]": "a dictionary, {name: value}",
    "list[int]": "a list of integers, [0,1]",
    "list[float]": "a list of numbers, [0.5,1.0]",
    "list[str]": "a list of texts, [a,b]",
}


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean a, b?`, or all known names if they are few, or an empty string."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower)]
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; allowed: {', '.join(sorted(lower.values()))}" if 0 < len(lower) <= 20 else ""


def is_known(key: str) -> bool:
    """Return True if `key` is a key or section of the schema, or an entry of a dictionary such as model.kwargs."""
    return any(
        f"{known}.".startswith(f"{key}.") or (isinstance(value, dict) and key.startswith(f"{known}."))
        for known, value, _ in leaves(Config())
    )


def plain_values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each plain value in nested dicts and lists; an item of a list has the key of the list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from plain_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from plain_values(value, key)
    else:
        yield key, node


def key_hint(key: str, more: Iterable[str] = ()) -> str:
    """Return `; did you mean …?` with keys of the schema or `more` that have the same last part or a similar name."""
    if key in REMOVED:
        return f"; it was removed: the project now always does what {key}={REMOVED[key]} did"
    keys = [known for known, _, _ in leaves(Config())]
    sections = sorted({known.rsplit(".", depth)[0] for known in keys for depth in range(1, known.count(".") + 1)})
    section, _, last = key.rpartition(".")
    elsewhere = [known for known in (*keys, *sections) if known.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {', '.join(elsewhere[:3])}?"
    similar = hint(key, [*keys, *sections, *more])
    if f"{section}.kwargs" in keys:
        similar += f"; arguments of what {section} builds go below kwargs: +{section}.kwargs.{last}=…"
    return similar


def check_option(group: str, choice: Any, options: list[str]) -> None:
    """Raise ValueError if `choice`, an option or a list of them, is not in the `options` of a config group. Suggests a name."""
    for value in choice if isinstance(choice, list) else [choice]:
        name = yaml_text(value).strip("'\"")
        if isinstance(value, dict | None) or name in options:
            continue
        if group == "model" and name.partition(".")[0] in timm_models():
            raise ValueError(f"model={name}: no such option; timm has a model of this name: model.name={name}")
        raise ValueError(f"{group}={name}: no such option{hint(name, options)}; python train.py --help lists all")


def explain(error: Exception, overrides: Iterable[str] = ()) -> str:
    """Convert an error from Hydra, OmegaConf or the YAML parser to one line: the key as given, the reason, the fix."""
    cause = error.__cause__ if getattr(error.__cause__, "full_key", None) else error
    text = " ".join(str(cause).split())
    # Hydra could not parse this override, and quotes parts of its value.
    if hasattr(error, "override"):
        is_secret = is_secret_key(str(error.override).partition("=")[0])
        if is_secret or re.search(r"input '|NoViableAlt|token recognition", text):
            text = "cannot be parsed; write a list as [a,b], and quote a text with special characters: 'key=\"a=b\"'"
        return f"{error.override}: {text.split(' See https')[0]}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)' 1\. ", text):
        return f"{ambiguous.group(1)}: expected one value (0.1, not 0,1); write a list as [a,b], or add -m to sweep"
    in_text = re.search(r"full_key: (\S+)", str(error))
    key = str(getattr(cause, "full_key", None) or (in_text.group(1) if in_text else ""))
    if not key:
        # Hydra names the key in the middle of its sentence: "Could not append to config. An item is already at 'x'."
        named = [given for given in overrides if f"'{given.lstrip('+~').partition('=')[0]}'" in text]
        return f"{named[0]}: {text}" if named else text
    if re.search(r"Key '.*' not in|not in struct|is not in", text):
        if is_known(key) and not key.startswith("hydra"):
            return f"{key}: not set yet; add it with +{key}=…"
        return f"{key}: unknown key{key_hint(key)}"
    if "Missing mandatory" in text:
        return f"{key}=???: required; set {key}=…"
    as_given = {override.lstrip("+~").partition("=")[0]: override.lstrip("+~") for override in overrides}
    # Without the index of a list's item.
    declared = key.partition("[")[0]
    if isinstance(cause, ValidationError) and (expected := _expected(declared)):
        return f"{as_given.get(declared, f'{key}={yaml_text(cause.value)}')}: {expected}"
    return f"{as_given.get(key, key)}: {text.split(' full_key: ')[0]}"


def _expected(key: str) -> str:
    """Return a text with the type and default of a key, or with the first key of a section; empty for an unknown key."""
    below = [(known, value, entry) for known, value, entry in leaves(Config()) if f"{known}.".startswith(f"{key}.")]
    if not below:
        return ""
    known, value, entry = below[0]
    if known != key:
        return f"expected keys below it; set one, e.g. {known}=…"
    default = "" if value is None else f"; the default is {key}={yaml_text(value)}"
    if "choices" in entry.metadata:
        return f"allowed: {', '.join(map(yaml_text, entry.metadata['choices']))}{default}"
    types = TYPES.get(entry.type) or " or ".join(TYPES[name] for name in entry.type.split(" | "))
    return f"expected {types}{default}"


def own_class_exists(name: str) -> bool:
    """Return True if the module in `name` defines its class. The file is parsed, not imported."""
    module, _, class_name = name.rpartition(".")
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            nodes = ast.parse(file.read_text(encoding="utf-8")).body
            return any(isinstance(node, ast.ClassDef) and node.name == class_name for node in nodes)
    return False


def objectives() -> list[str]:
    """Return the allowed values of `optimized_metric`."""
    names = [f"{name}{suffix}" for suffix in ("", "_ema") for name in known_metrics()]
    best = [f"val/{name}_best" for name in known_metrics()]
    return [*(f"{split}/{name}" for split in ("val", "test") for name in names), *best, "train/loss", "images_per_sec"]


def is_lower_better(objective: str) -> bool:
    """Return True if `objective`, a value of `optimized_metric`, must be minimized."""
    return _metric_of(objective).lower_is_better


def is_proportion(objective: str) -> bool:
    """Return True if `objective`, a value of `optimized_metric`, is from 0 to 1."""
    return _metric_of(objective).is_proportion


def _metric_of(objective: str) -> Metric:
    # images_per_sec is no metric; it has the defaults of one.
    return known_metrics().get(objective.rpartition("/")[2].removesuffix("_ema").removesuffix("_best"), Metric())


@cache
def timm_models() -> frozenset[str]:
    """Return the names of all timm models, without the tag of their weights (`resnet18`, not `resnet18.a1_in1k`)."""
    text = _timm_models_text()
    names = re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)
    for block in re.findall(r"register_model_deprecations\(__name__, \{(.*?)^\}\)", text, re.MULTILINE | re.DOTALL):
        names += re.findall(r"^\s*'(\w+)'\s*:", block, re.MULTILINE)
    return frozenset(names)


@cache
def timm_tags() -> frozenset[str]:
    """Return the models with the tag of their weights (`resnet18.a1_in1k`) that timm's files contain literally."""
    return frozenset(re.findall(r"'(\w+\.\w+)'\s*:", _timm_models_text()))


def _timm_models_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((_timm() / "models").glob("*.py")))


@cache
def timm_optimizers() -> frozenset[str]:
    text = (_timm() / "optim" / "_optim_factory.py").read_text(encoding="utf-8")
    # The last two are aliases that this file does not list.
    return frozenset(re.findall(r"\bname='(\w+)'", text)) | {"nesterov", "nesterovw"}


def _timm() -> Path:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed: pip install -r requirements.txt")
    return Path(spec.origin).parent
