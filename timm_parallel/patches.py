"""All run-time patches of foreign libraries. Each patch states the versions that need it, and the
reason. The test of a patch fails when a newer version of the library no longer needs the patch.

Each function imports its library itself, because train.py composes a config without importing torch
and timm.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def any_help_text() -> Iterator[None]:
    """Hydra 1.3 with Python 3.14 or later: let Hydra build its argument parser in this block.

    Since 3.14, argparse checks each help text when an argument is added. Hydra has one that is no
    string, but an object that builds its text when it is printed, and the check fails with a
    ValueError (facebookresearch/hydra#3121). Skip the check in this block.
    """
    check = getattr(ArgumentParser, "_check_help", None)
    if check is None:
        yield
        return
    ArgumentParser._check_help = lambda parser, action: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ArgumentParser._check_help = check  # type: ignore[attr-defined]


def hydra_parser() -> ArgumentParser:
    """Build Hydra's argument parser, under Python 3.14 too: see `any_help_text`."""
    from hydra._internal.utils import get_args_parser

    with any_help_text():
        return get_args_parser()


def share_config_store() -> None:
    """Hydra 1.3: do not copy the config store for each composition.

    `CachingConfigRepository` copies its sources, and with them the whole config store, for each
    composition. That takes half the time of composing, and most of the time of --help
    (hydra-ecosystem/hydra#1543). The copy is not needed, because Hydra copies each loaded config
    again.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def keep_missing_values(loader: Any) -> None:
    """Hydra 1.3: let a value `???` of a config file replace the value of an earlier file, so that a
    later file or the command line has to set the key.

    OmegaConf ignores `???` when it merges one config into another. The default of the schema would
    then hide that the value is missing. OmegaConf does merge a reference such as `${…}`, so each
    `???` is a reference while the Hydra config `loader` merges the files.
    """
    load, compose = loader._load_single_config, loader._compose_config_from_defaults_list

    def load_single_config(default: Any, repo: Any) -> Any:
        result = load(default, repo)
        # Hydra's own config is a structured one, in which `???` marks what Hydra sets itself.
        if result.path.startswith("file://"):
            _replace_values(result.config, "???", "${missing:}")
        return result

    def compose_config(defaults: Any, repo: Any) -> Any:
        tree = compose(defaults, repo)
        _replace_values(tree, "${missing:}", "???")
        return tree

    loader._load_single_config = load_single_config
    loader._compose_config_from_defaults_list = compose_config


def _replace_values(node: Any, old: str, new: str) -> None:
    """Replace each value `old` in a tree of OmegaConf by `new`, a reference or `???`."""
    value = node._value()
    if value == old:
        node._set_value(new)
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            _replace_values(child, old, new)


def create_model_with_filter(name: str, arguments: dict[str, Any]) -> Any:
    """timm 1.0: build a model with random weights, and store timm's conversion function for weight
    files as `model.checkpoint_filter`.

    timm passes that function to its weight loader and does not keep it. So this function replaces
    the loader during the call and reads the loader's arguments.
    """
    import timm
    from timm.models import _builder

    passed: dict[str, Any] = {}

    def take_arguments(model: Any, **kwargs: Any) -> None:
        passed.update(kwargs)

    load = _builder.load_pretrained
    _builder.load_pretrained = take_arguments  # type: ignore[assignment]
    try:
        model: Any = timm.create_model(name, pretrained=True, **arguments)
    finally:
        _builder.load_pretrained = load
    model.checkpoint_filter = passed.get("filter_fn")
    return model


def posterize_to_black() -> None:
    """timm 1.0 with Pillow 13: make timm's Posterize augmentation return a black image for 0 bits.
    timm draws 0 bits, and Pillow rejects that number.
    """
    from timm.data import auto_augment

    for name in auto_augment.NAME_TO_OP:
        if "Posterize" in name:
            auto_augment.NAME_TO_OP[name] = _posterize


def _posterize(image: Any, bits_to_keep: int, **options: Any) -> Any:
    mask = -(2 ** (8 - min(8, bits_to_keep)))
    return image.point(lambda value: value & mask)


def report_unsent_batches(describe: Callable[[BaseException, Any], Exception]) -> None:
    """Python 3.11 to 3.14, torch 2.14: let a loader worker send an error in place of a batch that
    it cannot send.

    The worker would only print the error, and the loader would wait for the batch forever. Must be
    called in the worker process. `describe`: function that builds the error to send from the
    exception and the batch.
    """
    from multiprocessing.queues import Queue

    from torch._utils import ExceptionWrapper

    def send_error(queue: Any, error: BaseException, item: Any) -> None:
        number, batch = item
        reported = describe(error, batch)
        cause = (type(reported), reported, error.__traceback__)
        queue.put((number, ExceptionWrapper(cause, "in a loader worker")))

    Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]
