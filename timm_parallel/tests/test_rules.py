"""Rules on combinations of keys are methods of config classes. The engine calls the rules of every
config group.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields

import pytest

from src.schema import Config, ModelConfig
from timm_parallel.config.validate import check_combination
from timm_parallel.keys import ParallelConfig, strategy_options
from timm_parallel.testing.commands import ROOT

pytestmark = pytest.mark.portable


@dataclass
class OwnModelConfig(ModelConfig):
    """Config class of a fork, which adds a key and the rule on this key."""

    gamma: float | None = None

    def problems(self, whole: Config) -> Iterator[str]:
        yield from super().problems(whole)
        if self.gamma is not None and whole.train.loss != "focal":
            yield f"model.gamma={self.gamma}: has an effect with train.loss=focal only"


def test_config_validation_calls_the_rule_that_a_model_config_subclass_adds() -> None:
    check_combination(Config(model=OwnModelConfig()))
    with pytest.raises(ValueError, match=r"model\.gamma=2\.0"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0)))
    with pytest.raises(ValueError, match=r"model\.sync_bn=true"):
        check_combination(Config(model=OwnModelConfig(gamma=2.0, sync_bn=True)))


def test_option_of_dp_ddp_or_fsdp_is_refused_when_a_different_strategy_is_chosen() -> None:
    assert set(strategy_options().values()) == {"dp", "ddp", "fsdp"}
    assert set(strategy_options()) <= {entry.name for entry in fields(ParallelConfig)}
    for key, owner in strategy_options().items():
        for strategy in ("auto", "single", "dp", "ddp", "fsdp", "src.parallel.single.Single"):
            parallel = ParallelConfig(
                strategy=strategy, process_per_device=False if "." in strategy else None
            )
            setattr(parallel, key, 1)
            if strategy == owner:
                check_combination(Config(parallel=parallel))
                continue
            with pytest.raises(
                ValueError,
                match=rf"parallel\.{key}=1: an option of {owner}, but parallel={strategy}",
            ):
                check_combination(Config(parallel=parallel))


def test_config_validation_imports_no_torch_timm_or_hydra() -> None:
    program = (
        "import sys\nfrom timm_parallel.config.validate import check_combination\nfrom src.schema "
        "import Config\n"
        "check_combination(Config())\nassert not {'torch', 'timm', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
