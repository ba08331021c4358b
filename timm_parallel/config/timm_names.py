"""Names of timm's models and optimizers. They are read from timm's source files, because importing
timm takes 3 s.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path


@cache
def timm_models() -> frozenset[str]:
    """Read the names of all timm models from timm's source, without the tags of their weights
    (`resnet18`, not `resnet18.a1_in1k`).
    """
    text = _timm_models_text()
    names = re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)
    for block in re.findall(
        r"register_model_deprecations\(__name__, \{(.*?)^\}\)", text, re.MULTILINE | re.DOTALL
    ):
        names += re.findall(r"^\s*'(\w+)'\s*:", block, re.MULTILINE)
    return frozenset(names)


@cache
def timm_tags() -> frozenset[str]:
    """Read the names of timm models with the tags of their weights (`resnet18.a1_in1k`) from timm's
    source. Names that timm builds at run time are missing.
    """
    return frozenset(re.findall(r"'(\w+\.\w+)'\s*:", _timm_models_text()))


def _timm_models_text() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted((_timm() / "models").glob("*.py"))
    )


@cache
def timm_optimizers() -> frozenset[str]:
    text = (_timm() / "optim" / "_optim_factory.py").read_text(encoding="utf-8")
    # Add two optimizer names that timm accepts but does not list in _optim_factory.py.
    return frozenset(re.findall(r"\bname='(\w+)'", text)) | {"nesterov", "nesterovw"}


def _timm() -> Path:
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed: pip install -r requirements.txt")
    return Path(spec.origin).parent
