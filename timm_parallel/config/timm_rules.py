"""Error messages for values of a config that timm does not support: names of models, datasets and
optimizers, and arguments that load files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from timm_parallel.config.suggest import hint
from timm_parallel.config.timm_names import timm_models, timm_optimizers, timm_tags
from timm_parallel.keys import is_timm_dataset

OF_TORCH = (
    *("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365"),
    *("inaturalist", "imagenet"),
)
# Regular expressions for the texts that timm.data.auto_augment can parse.
AUTO_AUGMENT = (
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Arguments of timm.create_model that would load weights from any file or URL.
LOADING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def model_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no model of this name, or no weights with the tag in the
    name.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        yield f"model.name={name}: timm has no such model{hint(architecture, timm_models())}"
    tags = [known for known in timm_tags() if known.startswith(f"{architecture}.")] if tag else []
    if tags and name not in tags:
        yield f"model.name={name}: timm has no such weights{hint(name, tags)}"


def weights_problems(kwargs: Iterable[str]) -> Iterator[str]:
    """Yield an error message for each model argument (model.kwargs) that would load weights from a
    file or URL.
    """
    for key in sorted(set(kwargs).intersection(LOADING)):
        yield f"model.kwargs.{key}: not allowed; to load timm's weights set model.pretrained=true"


def dataset_problems(name: str, own: Iterable[str]) -> Iterator[str]:
    """Yield an error message if a dataset name belongs neither to a dataset of the project nor to
    timm's factory. `own`: the names of the project's datasets.
    """
    source, _, dataset = name.partition("/")
    if source == "torch" and dataset not in OF_TORCH:
        yield f"data.name={name}: timm has no such dataset{hint(dataset, OF_TORCH)}"
    elif not is_timm_dataset(name) and name not in own:
        yield f"data.name={name}: no such dataset{hint(name, own)}, or torch/…, hfds/…"


def is_auto_augment(text: str) -> bool:
    """Return True if timm can parse the text as RandAugment, AugMix or AutoAugment."""
    return any(re.fullmatch(pattern, text) for pattern in AUTO_AUGMENT)


def optimizer_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no optimizer of this name, or if the training step cannot
    run the optimizer.
    """
    if name not in timm_optimizers():
        yield f"optim.opt={name}: timm has no such optimizer{hint(name, timm_optimizers())}"
    if name == "adahessian":
        yield (
            "optim.opt=adahessian: requires second derivatives, which the training step does "
            "not compute; use e.g. adamw"
        )
