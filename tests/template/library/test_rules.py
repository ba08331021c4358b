"""Test rules on combinations of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from src.schema import (
    AugmentConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from src.tasks.classification import Classification, ClassLoss
from timm_parallel.config.validate import check_combination
from timm_parallel.keys import STRATEGIES, ParallelConfig, strategy_options
from timm_parallel.machine.imports import find_class, find_name, import_name
from timm_parallel.task_rules import check_task

pytestmark = pytest.mark.portable


@dataclass
class OwnModelConfig(ModelConfig):
    """Config class of a fork of this project. It adds a key and a rule on this key."""

    gamma: float | None = None

    def problems(self, whole: Config) -> Iterator[str]:
        yield from super().problems(whole)
        if self.gamma is not None and whole.train.loss != "focal":
            yield f"model.gamma={self.gamma}: has an effect with train.loss=focal only"


def test_config_validation_applies_the_rule_that_a_subclass_of_model_config_adds() -> None:
    check_combination(Config(model=OwnModelConfig()))
    with pytest.raises(ValueError, match=r"model\.gamma=2\.0"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0)))
    with pytest.raises(ValueError, match=r"model\.sync_bn=true"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0, sync_bn=True)))


def test_option_of_dp_ddp_or_fsdp_is_refused_under_another_strategy() -> None:
    assert set(strategy_options().values()) == {"dp", "ddp", "fsdp"}
    assert set(strategy_options()) <= {entry.name for entry in fields(ParallelConfig)}
    for key, owner in strategy_options().items():
        for strategy in (
            "auto",
            "single",
            "dp",
            "ddp",
            "fsdp",
            "timm_parallel.parallel.strategy.Single",
        ):
            parallel = ParallelConfig(strategy=strategy)
            setattr(parallel, key, 1)
            if strategy == owner:
                check_combination(Config(parallel=parallel))
                continue
            with pytest.raises(
                ValueError,
                match=rf"parallel\.{key}=1: an option of {owner}, but parallel={strategy}",
            ):
                check_combination(Config(parallel=parallel))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_table_of_built_in_strategies_states_the_attributes_of_their_classes(
    strategy: str,
) -> None:
    stated = asdict(STRATEGIES[strategy])
    strategy_class = import_name(stated.pop("name"))
    assert stated == {name: getattr(strategy_class, name) for name in stated}


def test_strategy_given_as_a_class_name_follows_the_same_rules_as_its_short_name() -> None:
    fsdp = ParallelConfig(strategy=STRATEGIES["fsdp"].name)
    assert fsdp.has_ranks and not fsdp.has_one_process
    check_combination(Config(parallel=fsdp, model=ModelConfig(sync_bn=True)))
    for refused, key in (
        (Config(parallel=fsdp, model=ModelConfig(compile=True)), "model.compile"),
        (Config(parallel=fsdp, optim=OptimConfig(opt="muon")), "optim.opt"),
        (
            Config(parallel=ParallelConfig(strategy=STRATEGIES["single"].name, devices=2)),
            "parallel.devices",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{key}="):
            check_combination(refused)


@pytest.mark.parametrize(
    ("train", "augment", "key"),
    [
        ({"smoothing": 0.1}, {}, "train.smoothing"),
        ({"class_weights": "auto"}, {}, "train.class_weights"),
        ({}, {"mixup": 0.2}, "data.augment.mixup"),
        ({}, {"cutmix": 1.0}, "data.augment.cutmix"),
        ({}, {"cutmix_minmax": [0.2, 0.8]}, "data.augment.cutmix_minmax"),
    ],
)
def test_option_is_refused_when_the_chosen_loss_does_not_read_the_option(
    train: dict[str, Any], augment: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config_with(loss: str) -> Config:
        data = DataConfig(augment=AugmentConfig(**augment))
        return Config(train=TrainConfig(loss=loss, **train), data=data)

    check_task(config_with("ce"))
    losses = Classification.known_losses
    monkeypatch.setattr(
        Classification, "known_losses", {**losses, "plain": ClassLoss(losses["ce"].build)}
    )
    # The second value of train.loss names a class that does not declare the options that it reads.
    for loss in ("plain", "src.models.segmenter.Segmenter"):
        with pytest.raises(ValueError, match=rf"^{key}=.* train\.loss={loss} does not read it"):
            check_task(config_with(loss))


def test_class_is_found_only_if_the_package_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "models.py").write_text("from pathlib import Path\nclass Net: ...\ndef f(): ...\n")
    (package / "broken.py").write_text("import package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_class("own_package.models.Net", "own_package")
    assert found is not None and found.__name__ == "Net"
    for name in ("models.Nett", "models.Path", "models.f", "nowhere.Net", "models.x.Net"):
        assert find_class(f"own_package.{name}", "own_package") is None, name
    assert find_class("own_package.models.Net", "src") is None
    assert callable(find_name("own_package.models.f", "own_package"))
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_installed"):
        find_class("own_package.broken.Net", "own_package")
