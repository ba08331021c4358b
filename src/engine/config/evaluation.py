"""The config of an evaluation: a run's frozen one with other data or devices, or one composed from the command line."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.engine.config.compose import compose_command, read_frozen, to_config
from src.engine.config.confidential import check_words
from src.engine.config.names import explain, is_known, key_hint
from src.engine.config.resolve import resolve
from src.engine.machine.ranks import Ranks
from src.schema import Config, ParallelConfig, ResolvedConfig

OF_A_RUN = ("data", "parallel", "train.precision", "paths")  # what may differ from how it was trained
OF_A_MODEL = (*OF_A_RUN, "model", "experiment", "seed")
GROUPS = {"parallel": "parallel.strategy", "data": "data.name"}  # a frozen config has no groups left


def evaluation_config(run: Path | None, words: list[str], ranks: Ranks | None) -> ResolvedConfig:
    """Resolved. `words` are train.py's; `ranks` are given where somebody has started them."""
    for word in words:
        _check_part(word, OF_A_MODEL if run is None else OF_A_RUN)
    config = _composed(words) if run is None else _frozen(run, words)
    config.model.sync_bn = False
    if run is None and not config.model.pretrained and config.model.weights is None:
        raise ValueError("nothing to evaluate: give run=<run folder>, model.pretrained=true or model.weights=<file>")
    return resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))


def _check_part(word: str, allowed: tuple[str, ...]) -> None:
    key = word.lstrip("+").partition("=")[0]
    if "=" not in word or not (is_known(key) or key == "experiment"):
        raise ValueError(f"{word}: unknown option{key_hint(key, ('run', 'split', 'checkpoint'))}")
    if not any(key == part or key.startswith(f"{part}.") for part in allowed):
        raise ValueError(f"{word}: has no part in an evaluation; give {', '.join(f'{part}…' for part in allowed)}")


def _composed(words: list[str]) -> Config:
    from hydra._internal.utils import get_args_parser

    if not any(word.startswith(("parallel=", "parallel.strategy=")) for word in words):
        words = ["parallel=single", *words]
    return compose_command(get_args_parser().parse_args(words)).config


def _frozen(run: Path, words: list[str]) -> Config:
    frozen = read_frozen(run)
    config = Config(**vars(frozen))
    per_device = max(1, frozen.global_batch // frozen.parallel.devices)
    config.parallel = ParallelConfig(strategy="single")
    config.model.pretrained, config.model.weights = False, None
    if not any(word.startswith("data.batch_size=") for word in words):
        config.data.batch_size, config.data.batch_size_per_device = None, per_device
    else:
        config.data.batch_size_per_device = None
    check_words(words)
    dotted = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        dotted.append(f"{GROUPS.get(key, key)}={value}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(dotted))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, dotted)) from error
    return to_config(OmegaConf.create(OmegaConf.to_container(merged)))  # type: ignore[arg-type]
