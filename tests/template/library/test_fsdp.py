"""parallel=fsdp: blocks, memory per rank, training, checkpoints, evaluation and refusals."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from src.schema import OPTIMIZERS_OF_PARTS
from src.train.build import build_run
from src.train.run import train
from tests.template.runs import parts_of, resolved, start_run
from timm_parallel.data.samplers import EvalSampler
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.fully_sharded import LockstepNetworks, blocks_of, vector_layers
from timm_parallel.parallel.strategy import build_strategy, part, whole
from timm_parallel.run import checkpoint, restoring
from timm_parallel.run.evaluation import evaluate
from timm_parallel.run.parts import RunParts, evaluation_networks
from timm_parallel.testing.ranks import in_ranks

SETTINGS = (
    "data.batch_size=24",
    "data.limit_train=48",
    "train.log_every=1",
)


def fsdp(devices: int, *overrides: str) -> Any:
    return resolved(*SETTINGS, "parallel=fsdp", f"parallel.devices={devices}", *overrides)


def built(ranks: Any, store: Any, name: str, *overrides: str) -> RunParts:
    """Build a run under fsdp, or single without a store. `name`: prefix of its keys."""
    if store is None:
        config = resolved(*SETTINGS, "parallel=single", *overrides)
        return parts_of(config, ranks)
    config = fsdp(ranks.world_size, *overrides)
    return parts_of(config, ranks, PrefixStore(name, store))


def backward(parts: RunParts) -> None:
    losses, _ = parts.state.phases[0].wrapped(next(parts.train_loader.epoch(0)))
    losses.mean().backward()


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("vit_tiny_patch16_224", "Block", 12),
        ("resnet18", "BasicBlock", 8),
        ("convnext_atto", "ConvNeXtBlock", 12),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),
        ("mixer_s32_224", "MixerBlock", 8),
    ],
)
def test_fsdp_shards_the_repeated_blocks_of_a_timm_model(name: str, kind: str, count: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    blocks = blocks_of(model)
    assert [type(block).__name__ for block in blocks].count(kind) == count
    assert {type(block).__name__ for block in blocks} <= {kind, "PatchMerging"}


class Own(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(3))
        self.head = nn.Linear(4, 2)
        if tied:
            self.layers[0].linear1 = self.layers[1].linear1


def test_fsdp_shards_the_untied_layers_of_a_custom_model_or_those_that_it_names() -> None:
    class Named(Own):
        def shard_blocks(self) -> list[nn.Module]:
            return [self.layers[1]]

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = timm.create_model("vit_tiny_patch16_224", depth=3)

    own, tied, named = Own(), Own(tied=True), Named()
    assert blocks_of(own) == list(own.layers)
    assert blocks_of(tied) == [tied.layers[2]]
    assert blocks_of(named) == [named.layers[1]]
    assert len(blocks_of(Wrapped())) == 3


def test_vector_layers_returns_the_layer_norm_and_layer_scale_modules_of_a_vit() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, init_values=0.1)
    assert {type(layer).__name__ for layer in vector_layers(model)} == {"LayerNorm", "LayerScale"}


def sizes_of_parts(ranks: Any, store: Any) -> tuple[dict[str, tuple[int, int]], int]:
    """Train one step under fsdp. Return a dictionary from weights, gradients, optimizer and ema to
    (number of elements on this rank, number on all ranks), and the number of elements that the
    contents of a checkpoint have on this rank. All ranks must call this function.
    """
    parts = built(ranks, store, "sizes", "model.ema.decay=0.9")
    state = parts.state
    backward(parts)
    gradients = [parameter.grad for parameter in state.model.parameters()]
    optimizer = state.phases[0].optimizer
    optimizer.step()
    assert state.ema is not None
    held: dict[str, list[Any]] = {
        "weights": list(state.model.parameters()),
        "gradients": gradients,
        "optimizer": [s["exp_avg"] for s in optimizer.state.values()],
        "ema": list(state.ema.parameters()),
    }
    sizes = {
        name: (
            sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in ts),
            sum(t.numel() for t in ts),
        )
        for name, ts in held.items()
    }
    saved = restoring.snapshot(state, parts.strategy)
    tensors = tree_leaves([saved["model"], saved["phases"], saved["averages"]])
    assert not any(isinstance(tensor, DTensor) for tensor in tensors)
    parts.strategy.group.close()
    return sizes, sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))


@pytest.mark.slow(seconds=2)
def test_each_of_3_fsdp_ranks_holds_a_third_of_a_run_and_rank_0_gathers_its_checkpoint() -> None:
    of_ranks = in_ranks(sizes_of_parts, 3)
    sizes = [sizes for sizes, _ in of_ranks]
    for name, (_, total) in sizes[0].items():
        assert sum(own[name][0] for own in sizes) == total, name
        # fsdp splits tensors only between rows, so rank 0 holds slightly more than a third.
        assert max(own[name][0] for own in sizes) < 0.36 * total, name
    first, *others = [saved for _, saved in of_ranks]
    assert others == [0, 0]
    # The checkpoint must contain the weights, their moving average and two moments of AdamW for
    # each parameter.
    model = timm.create_model("vit_tiny_patch16_224", **resolved("model=tiny").model.kwargs)
    assert first > 4 * sum(p.numel() for p in model.get_submodule("blocks").parameters())


def three_steps_of_each_optimizer(ranks: Any, store: Any) -> dict[str, Any]:
    weights = {}
    for name in OPTIMIZERS_OF_PARTS:
        parts = built(ranks, store, name, "optim=sgd", f"optim.opt={name}")
        state, draw = parts.state, torch.Generator().manual_seed(0)
        for step in range(3):
            # Use random gradients instead of those of a loss. Some optimizers amplify rounding
            # errors of gradients near zero.
            for parameter in state.model.parameters():
                parameter.grad = part(torch.randn(parameter.shape, generator=draw), parameter)
            nn.utils.clip_grad_norm_(state.model.parameters(), 1)
            state.phases[0].optimizer.step()
            state.phases[0].optimizer.zero_grad()
            if step == 1:
                saved = parts.strategy.group.share_state(restoring.snapshot(state, parts.strategy))
                restoring.restore(state, parts.strategy, saved)
        tensors = [whole(parameter.detach()).flatten() for parameter in state.model.parameters()]
        weights[name] = torch.cat(tensors).numpy()
        parts.strategy.group.close()
    return weights


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
def test_each_permitted_optimizer_updates_fsdp_shards_like_whole_tensors() -> None:
    [whole] = in_ranks(_without_store, 1)
    of_ranks = in_ranks(three_steps_of_each_optimizer, 2)
    for name, expected in whole.items():
        for ours in (rank[name] for rank in of_ranks):
            assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < 1e-5, name


def _without_store(ranks: Any, store: Any) -> dict[str, Any]:
    return three_steps_of_each_optimizer(ranks, None)


def collectives_of_a_step(ranks: Any, store: Any) -> list[dict[str, int]]:
    counts = []
    for batches in (1, 3):
        parts = built(ranks, store, str(batches), "train.precision=bf16")
        # Do not count the first step, because it also initializes fsdp.
        backward(parts)
        with CommDebugMode() as communication:
            for _ in range(batches - 1):
                with parts.strategy.skip_sync(parts.state.phases[0].wrapped):
                    backward(parts)
            backward(parts)
        counts.append({str(op): number for op, number in communication.get_comm_counts().items()})
        parts.strategy.group.close()
    return counts


@pytest.mark.slow(seconds=2)
def test_fsdp_step_has_three_collectives_per_block_also_when_batches_are_accumulated() -> None:
    for one, three in in_ranks(collectives_of_a_step, 2):
        scattered = next(name for name in one if "reduce_scatter" in name)
        gathered = next(name for name in one if "allgather" in name or "all_gather" in name)
        # The model has two blocks, which are gathered again for the backward pass, and other
        # parameters, which stay gathered. Norms must not have collectives of their own.
        assert one[gathered] == 5
        assert one[scattered] == three[scattered] == 3
        assert three[gathered] == 3 * one[gathered]


def trained(ranks: Any, store: Any, folder: str, *overrides: str) -> dict[str, Any]:
    """Train one epoch under fsdp, or under single if there is one rank. Return the loss, and a
    dictionary from the type of a layer inside of a block to the data type of its weight in the
    forward pass. All ranks must call this function.
    """
    strategy, devices = ("fsdp", ranks.world_size) if ranks.world_size > 1 else ("single", 1)
    config = resolved(
        *SETTINGS,
        f"parallel={strategy}",
        f"parallel.devices={devices}",
        "train.epochs=1",
        *overrides,
    )
    Path(folder).mkdir(exist_ok=True)
    run = start_run(config, Path(folder), ranks, store if ranks.world_size > 1 else None)
    seen = {}
    for module in (m for block in blocks_of(run.parts.state.model) for m in block.modules()):
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.BatchNorm2d | nn.Conv2d):

            def see(module: Any, inputs: Any, kind: str = type(module).__name__) -> None:
                seen[kind] = str(module.weight.dtype)

            module.register_forward_pre_hook(see)
    with run.training() as training:
        train(training)
    return {"seen": seen, "loss": run.parts.progress.epoch_means["loss"]}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16",),
        pytest.param(
            ("train.precision=fp16", "optim.clip_grad=1"), marks=pytest.mark.slow(seconds=3)
        ),
        pytest.param(
            ("train.precision=bf16", "model=resnet18", "model.name=resnet10t"),
            marks=pytest.mark.slow(seconds=3),
        ),
    ],
    ids=["bf16", "fp16", "bf16_with_batchnorm"],
)
@pytest.mark.slow(seconds=4)
@pytest.mark.sample(2)
def test_fsdp_gathers_matrices_in_16_bits_and_norm_weights_in_32_bits(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    of_ranks = in_ranks(trained, 2, str(tmp_path), *overrides)
    low = "torch.float16" if "train.precision=fp16" in overrides else "torch.bfloat16"
    for kind, dtype in of_ranks[0]["seen"].items():
        assert dtype == ("torch.float32" if "Norm" in kind else low), kind
    if "resnet10t" in str(overrides):
        # Do not compare losses with one device if the model has BatchNorm, because each rank has
        # statistics of a part of the batch.
        return
    (tmp_path / "alone").mkdir()
    [alone] = in_ranks(trained, 1, str(tmp_path / "alone"), *overrides)
    assert of_ranks[0]["loss"] == pytest.approx(alone["loss"], rel=5e-3)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.freeze=backbone",),
        ("model.freeze=1",),
        ("model.grad_checkpointing=true",),
        ("model.channels_last=true",),
    ],
)
@pytest.mark.sample(4)
def test_fsdp_matches_single_with_freeze_grad_checkpointing_or_channels_last(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    of_ranks = in_ranks(trained, 2, str(tmp_path), *overrides)
    (tmp_path / "alone").mkdir()
    [alone] = in_ranks(trained, 1, str(tmp_path / "alone"), *overrides)
    assert of_ranks[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    ours, theirs = (
        checkpoint.load(at / "checkpoints/last.pt")["model"]
        for at in (tmp_path, tmp_path / "alone")
    )
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=1e-4, atol=1e-5), name


def evaluated(ranks: Any, store: Any, stops: bool) -> list[float | None] | None:
    """Evaluate 25 images in batches of 8 per rank. With 3 ranks, one rank has a batch more than the
    others. All ranks must call this function.
    """
    parts = built(ranks, store, f"evaluation{stops}")
    loader = parts.eval_loaders["val"]
    assert isinstance(loader.sampler, EvalSampler)
    loader.sampler.indices = loader.sampler.indices[
        : {0: 9, 1: 8, 2: 0}[ranks.rank] if store is not None else 540
    ]
    networks = evaluation_networks(parts.state.evaluated(), parts.config, parts.strategy)
    assert isinstance(networks, LockstepNetworks)
    calls = itertools.count()
    actual = evaluate(
        networks,
        loader,
        parts.task,
        parts.strategy.group,
        should_stop=(lambda: ranks.rank == 0 and next(calls) == 1) if stops else None,
    )
    assert all(isinstance(parameter, DTensor) for parameter in parts.state.model.parameters())
    # Check that a training step still works after the evaluation.
    parts.state.phases[0].wrapped.train()
    backward(parts)
    parts.strategy.group.close()
    return None if actual is None else [actual.samples, actual.numbers["loss"]]


def _evaluated_without_count(ranks: Any, store: Any) -> list[list[float | None] | None]:
    from timm_parallel.run import evaluation

    # Replace the check of the number of samples. This test gives the ranks other samples than the
    # sampler would, and the check would fail.
    evaluation._check_count = lambda loader, samples, group: int(group.sum(torch.tensor(samples)))  # type: ignore[assignment]
    return [evaluated(ranks, store, stops) for stops in (False, True)]


@pytest.mark.slow(seconds=3)
def test_fsdp_evaluation_ends_when_batches_of_ranks_differ_or_one_rank_requests_a_stop() -> None:
    of_ranks = in_ranks(_evaluated_without_count, 3)
    whole = [values for values, _ in of_ranks]
    assert whole[0] == whole[1] == whole[2]
    assert whole[0] is not None and whole[0][0] == 17
    assert [stopped for _, stopped in of_ranks] == [None] * 3


# Let configs refer to the classes of this file by a name below src, because a config may name only
# classes of src/.
HERE = "src.fsdp_of_test"
sys.modules[HERE] = sys.modules[__name__]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(self.linear(features).relu())  # type: ignore[no-any-return]


class ReadsWeight(nn.Module):
    """Model that reads the weight of a block outside of the forward pass of the block."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.block, self.head = Block(in_chans * 64), nn.Linear(in_chans * 64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block(images.flatten(1))
        return self.head(functional.linear(features, self.block.linear.weight))  # type: ignore[no-any-return]


class NamesNoBlocks(ReadsWeight):
    def shard_blocks(self) -> list[nn.Module]:
        return []


class Scaled(ReadsWeight):
    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__(num_classes, in_chans)
        self.scale = nn.Parameter(torch.tensor(2.0))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * self.scale, targets)


def refusals_of_fsdp(ranks: Ranks, store: Any) -> list[str]:
    """Train a step under fsdp with each model or loss; return the error messages."""
    messages = []
    for number, name in enumerate(("ReadsWeight", "Scaled", "Temperature", "NamesNoBlocks")):
        config = resolved(
            "parallel=fsdp", "parallel.devices=2", "data.image_size=8", "data.batch_size=24"
        )
        if name == "Temperature":
            config.train.loss = f"{HERE}.{name}"
        else:
            config.model.name, config.model.kwargs = f"{HERE}.{name}", {}
        strategy = build_strategy(config, ranks, PrefixStore(str(number), store))
        try:
            backward(build_run(config, strategy))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        strategy.group.close()
    return messages


@pytest.mark.slow(seconds=3)
def test_fsdp_error_for_a_model_or_loss_that_cannot_be_sharded_names_key_and_fix() -> None:
    for reads_weight, scaled, temperature, names_no_blocks in in_ranks(refusals_of_fsdp, 2):
        assert "shard_blocks()" in reads_weight and "parallel=ddp" in reads_weight
        assert scaled.startswith("model.name: scale ") and "parallel=ddp" in scaled
        assert temperature.startswith("train.loss: scale ")
        assert names_no_blocks == ""
