"""Tests that every accepted config trains. Randomly drawn valid combinations of settings train for
two steps and are evaluated.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from src.schema import ResolvedConfig
from tests.template.runs import resolved, train_run
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.testing.ranks import in_ranks

FIXED = (
    "model=tiny",
    "print_config=false",
    "train.max_steps=2",
    "data.limit_train=288",
    "optim.warmup_epochs=0",
    "parallel.accelerator=cpu",
    "parallel.threads_per_device=1",
)
VALUES: dict[str, tuple[str, ...]] = {
    "optim": ("sgd", "adamw"),
    "optim.opt": ("adamw", "lamb", "muon", "rmsprop", "adafactor", "lion"),
    "optim.sched": (
        "constant",
        "cosine",
        "step optim.decay_epochs=1",
        "poly",
        "tanh",
        "multistep optim.decay_milestones=[1]",
    ),
    "optim.layer_decay": ("0.7", "null"),
    "optim.clip_grad": ("1.0", "1.0 optim.clip_mode=agc", "null"),
    "optim.lr_rule": ("linear", "sqrt", "none"),
    "train.precision": ("fp32", "bf16"),
    "train.accumulate": ("1", "2"),
    "train.smoothing": ("0", "0.1"),
    "train.loss": ("ce", "bce"),
    "train.log_every": ("1", "50"),
    "model.ema.decay": ("0.9", "0.9 checkpoint.metric=val/acc_ema", "null"),
    "model.channels_last": ("true", "false"),
    "model.grad_checkpointing": ("true", "false"),
    "+model.kwargs.drop_path_rate": ("0.1",),
    "data.batch_size": ("12", "8"),
    "data.image_size": ("16", "32"),
    "data.augment.mixup": ("0.2", "0"),
    "data.augment.cutmix": ("1.0", "0"),
    "data.augment.hflip": ("0.5",),
    "data.augment.scale": ("[0.3,1]", "null"),
    "data.augment.aa": ("rand-m5-inc1", "augmix-m3", "v0", "null"),
    "data.augment.color_jitter": ("0.3 data.augment.aa=null", "0.3 data.augment.aa=3a"),
    "data.augment.reprob": ("0.5", "0.5 data.augment.remode=const data.augment.recount=3"),
    "data.augment.aug_repeats": ("2",),
    "data.augment.crop_padding": ("2 data.augment.scale=null",),
    "checkpoint.metric": ("val/acc", "val/loss"),
    "seed": ("0", "9223372036854775807"),
}
SPREADS = (
    ("parallel=single",),
    ("parallel=dp", "parallel.devices=2"),
    ("parallel=ddp", "parallel.devices=2"),
    (
        "parallel=ddp",
        "parallel.devices=2",
        "parallel.gradient_as_bucket_view=true",
        "parallel.bucket_cap_mb=1",
    ),
    ("parallel=ddp", "parallel.devices=2", "parallel.find_unused_parameters=true"),
    ("parallel=fsdp", "parallel.devices=2"),
)


def combinations(count: int, world_size: int) -> list[tuple[str, ...]]:
    """Draw `count` random combinations of settings for a number of ranks. The seed is fixed, so
    that every test run draws the same combinations.
    """
    draw = random.Random(count * 10 + world_size)
    spreads = [
        spread for spread in SPREADS if spread[0].endswith(("ddp", "fsdp")) == (world_size > 1)
    ]
    chosen = []
    for _ in range(count):
        keys = draw.sample(sorted(VALUES), draw.randint(2, 6))
        words = [word for key in keys for word in f"{key}={draw.choice(VALUES[key])}".split(" ")]
        chosen.append((*draw.choice(spreads), *sorted(words, key=lambda word: "." in word)))
    return chosen


def two_steps(ranks: Ranks, store: Any, base: str, cases: dict[str, ResolvedConfig]) -> list[str]:
    """Train each config for two steps on all ranks. Return one error message per config, which is
    empty if the config trained.
    """
    from torch.distributed import PrefixStore

    torch.set_num_threads(1)
    errors = []
    for number, (words, config) in enumerate(cases.items()):
        folder = Path(base) / str(number)
        folder.mkdir(exist_ok=True)
        try:
            train_run(config, folder, ranks, PrefixStore(str(number), store))
            errors.append("" if read_result(folder).status == "done" else "no result")
        except Exception as error:
            errors.append(f"{words}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if ranks.world_size > 1:
                # Stop after the first error. The other rank waits in a collective and cannot start
                # the next config.
                break
    return errors


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_randomly_drawn_valid_configs_train_for_two_steps(tmp_path: Path, world_size: int) -> None:
    cases = {" ".join(words): resolved(*FIXED, *words) for words in combinations(20, world_size)}
    errors = in_ranks(two_steps, world_size, str(tmp_path), cases)
    assert [line for rank in errors for line in rank if line] == []
    assert [len(rank) for rank in errors] == [len(cases)] * world_size
