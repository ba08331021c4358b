"""Rules across the groups of a config: keys that do not go together. In a sweep such a point is skipped. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from src.engine.config.cluster import cluster_rules
from src.engine.config.rules import refuse
from src.schema import Config, TrainConfig, is_own_class

DP_ONLY = ("dim", "loss_in_replica")
DDP_ONLY = (
    "bucket_cap_mb",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "comm_hook",
    "dist_bn",
)
FOLLOWING = ("num_epochs", "warmup_prefix", "step_on_epochs", "updates_per_epoch")  # of a schedule, from other keys
SCHEDULES_WITH = {  # argument of create_scheduler_v2 -> the schedules that read it; any other argument: all
    **dict.fromkeys(("cycle_mul", "cycle_decay", "cycle_limit"), ("cosine", "tanh", "poly")),
    "k_decay": ("cosine", "poly"),
    **dict.fromkeys(("decay_fn", "stable_timescale"), ("wsd", "rsqrt")),
    **dict.fromkeys(("patience_epochs", "plateau_mode"), ()),
}


def check_combination(config: Config) -> None:
    """Refuse keys that cannot work together."""
    refuse(*(rule(config) for rule in (cluster_rules, _data, _weights, _strategy, _time, _schedule)))


def _data(config: Config) -> Iterator[str]:
    data, augment, per_device = config.data, config.data.augment, config.data.batch_size_per_device
    if data.batch_size is not None and per_device is not None:
        yield f"data.batch_size={data.batch_size} and data.batch_size_per_device={per_device}: set one, the other to null"
    for key, pair in (("scale", augment.scale), ("ratio", augment.ratio)):
        if pair is not None and (len(pair) != 2 or not 0 < pair[0] <= pair[1]):
            yield f"data.augment.{key}={pair}: give two numbers, [smallest, largest], above 0"
    if augment.ratio is not None and augment.scale is None:
        yield f"data.augment.ratio={augment.ratio}: has no effect without data.augment.scale"
    if augment.crop_padding and augment.scale is not None:
        yield f"data.augment.crop_padding={augment.crop_padding}: data.augment.scale crops already; set one"
    if data.eval_image_size is not None and data.name in ("digits", "synthetic"):
        yield f"data.eval_image_size={data.eval_image_size}: the images of {data.name} have one size"
    for key, values in (("mean", data.mean), ("std", data.std)):
        if values is not None and not all(0 <= value <= 1 for value in values):
            yield f"data.{key}={values}: of images in 0..1; give one number per channel"
    if data.std is not None and 0 in data.std:
        yield f"data.std={data.std}: must be above 0"
    if (data.mean is None) != (data.std is None):
        yield "data.mean and data.std: set both or neither"


def _weights(config: Config) -> Iterator[str]:
    model = config.model
    if model.weights is not None and model.pretrained:
        yield f"model.weights={model.weights}: model.pretrained=true loads other ones; set one of them"
    here = config.cluster.scheduler == "local"  # on a cluster, the job looks
    if model.weights is not None and here and not Path(model.weights).is_file():
        yield f"model.weights={model.weights}: no such file"
    for key, metric in (("checkpoint.metric", config.checkpoint.metric), ("optimized_metric", config.optimized_metric)):
        if metric.endswith("_ema") and model.ema.decay is None:
            yield f"{key}={metric}: there are no averaged weights; set model.ema.decay, e.g. 0.9998"
    if config.train.bce_target_thresh is not None and config.train.loss != "bce":
        yield f"train.bce_target_thresh={config.train.bce_target_thresh}: has an effect with train.loss=bce only"
    if model.pretrained and is_own_class(model.name):
        yield f"model.pretrained=true: {model.name} is not timm's; give a file: model.weights=<file>"


def _strategy(config: Config) -> Iterator[str]:
    parallel, model, strategy = config.parallel, config.model, config.parallel.strategy
    if strategy == "single" and parallel.devices not in ("auto", 1):
        yield f"parallel.devices={parallel.devices}: single uses one device; choose parallel=ddp or parallel=dp"
    for owner, keys in (("dp", DP_ONLY), ("ddp", DDP_ONLY)):
        for key in keys:
            if getattr(parallel, key) is not None and strategy != owner:
                yield f"parallel.{key}={getattr(parallel, key)}: an option of {owner}, but parallel={strategy}"
    for key in ("device_ids", "output_device"):
        if getattr(parallel, key) is not None and strategy in ("auto", "single"):
            yield f"parallel.{key}={getattr(parallel, key)}: an option of dp and ddp, but parallel={strategy}"
    if is_own_class(strategy):
        if parallel.process_per_device is None:
            yield f"parallel.process_per_device: {strategy} needs it; true: a rank per device, false: one process"
    else:
        for key in ("process_per_device", "options"):
            if getattr(parallel, key) not in (None, {}):
                yield f"parallel.{key}={getattr(parallel, key)}: of a strategy of your own, but parallel={strategy}"
    if parallel.max_restarts and not parallel.has_ranks:
        yield f"parallel.max_restarts={parallel.max_restarts}: an option of ddp, but parallel={strategy}"
    if model.compile and strategy == "dp":
        yield "model.compile=true: torch.compile does not work inside DataParallel replicas; use ddp or single"
    if model.compile and parallel.bucket_cap_mb is not None and parallel.bucket_cap_mb < 1:
        yield f"parallel.bucket_cap_mb={parallel.bucket_cap_mb}: give at least 1: model.compile=true splits there"
    if model.sync_bn and not parallel.has_ranks:
        yield f"model.sync_bn=true: synchronises the ranks of ddp, but parallel={strategy}"


def _time(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    if optim.warmup_epochs + optim.cooldown_epochs >= train.epochs and optim.sched not in ("none", "constant"):
        yield f"optim.warmup_epochs={optim.warmup_epochs}: with optim.cooldown_epochs no shorter than train.epochs={train.epochs}"
    if train.early_stop is not None and train.evaluate_every == 0:
        yield f"train.early_stop={train.early_stop}: needs evaluations; set train.evaluate_every above 0"
    if train.max_steps is not None:
        yield from profile_rules(train, train.max_steps)


def profile_rules(train: TrainConfig, steps: int) -> Iterator[str]:
    """A line if a run of so many steps has none left to time after those that the profiler records."""
    if train.untimed_steps is not None and steps <= train.untimed_steps:
        yield (
            f"train.profile_steps={train.profile_steps}: profiling needs steps after the warm-up and the recorded ones, "
            f"{train.untimed_steps + 1} or more; this run has {steps}: raise train.max_steps or train.epochs"
        )


def _schedule(config: Config) -> Iterator[str]:
    """No part of a schedule may lie after the end of training: it would not be what its name says."""
    optim, epochs = config.optim, config.train.epochs
    if optim.sched == "multistep" and not optim.decay_milestones:
        yield "optim.sched=multistep: set optim.decay_milestones, e.g. [30,60,90] (epochs)"
    late = [milestone for milestone in optim.decay_milestones or [] if milestone >= epochs]
    if late:
        yield f"optim.decay_milestones={optim.decay_milestones}: {late[0]} is after train.epochs={epochs}"
    if optim.sched == "step" and optim.decay_epochs is None:
        yield "optim.sched=step: set optim.decay_epochs, the epochs between two drops"
    if optim.decay_epochs is not None and optim.decay_epochs >= epochs - optim.warmup_epochs:
        yield f"optim.decay_epochs={optim.decay_epochs}: longer than training: train.epochs={epochs} without its warm-up"
    for key, users in (("decay_milestones", ("multistep",)), ("decay_epochs", ("step", "wsd", "rsqrt"))):
        if getattr(optim, key) is not None and optim.sched not in users:
            yield f"optim.{key}={getattr(optim, key)}: has no effect with optim.sched={optim.sched}"
    for key in optim.sched_kwargs:
        if optim.sched not in SCHEDULES_WITH.get(key, (optim.sched,)):
            yield f"optim.sched_kwargs.{key}: has no effect with optim.sched={optim.sched}"
        if hasattr(optim, key):
            yield f"optim.sched_kwargs.{key}: set optim.{key} instead"
        if key in FOLLOWING:
            yield f"optim.sched_kwargs.{key}: follows from other keys, e.g. train.epochs; leave it out"
