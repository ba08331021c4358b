"""Every key that can be set, with its type, default and bounds. The YAML under `conf/` is merged into this tree.

A key that is not here does not exist: `python train.py modle=resnet18` is refused, wherever the misspelling stands.
Free dictionaries appear only where a third-party constructor reads them (`kwargs`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def choice(default: Any, *allowed: Any) -> Any:
    """A key that takes one of a few values."""
    return field(default=default, metadata={"choices": allowed})


def number(default: Any, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """A finite number with bounds: `least` and `most` are allowed themselves, `above` is not. Of texts, only `auto`."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass
class EmaConfig:
    decay: float | None = number(None, above=0, most=1)  # None: no averaged weights; 0.9998 is timm's default
    warmup: bool = True  # let the average follow quickly at first


@dataclass
class ModelConfig:
    name: str = "resnet18"  # any timm name, or `src.<module>.<Class>` of your own
    pretrained: bool = False  # timm's own weights, from the Hugging Face hub or its cache
    weights: str | None = None  # a file: .safetensors, or a checkpoint of this project or of timm
    num_classes: int | None = number(None, least=1)  # None: from the data
    in_chans: int | None = number(None, least=1)  # None: from the data
    kwargs: dict[str, Any] = field(default_factory=dict)  # to timm.create_model
    channels_last: bool = False
    compile: bool = False
    grad_checkpointing: bool = False
    sync_bn: bool = False
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class AugmentConfig:
    """timm's names and meanings. None or 0 leaves a step out; the defaults change nothing."""

    scale: list[float] | None = None  # area range of the random resized crop; None: resize, no random crop
    ratio: list[float] | None = None  # aspect range of that crop; None: timm's 3/4 to 4/3
    interpolation: str = choice("bilinear", "bilinear", "bicubic", "random")  # of crops; timm's train_interpolation
    crop_padding: int = number(0, least=0)  # pixels of black around images of one size, then a random crop
    hflip: float = number(0.0, least=0, most=1)
    color_jitter: float | None = number(None, least=0)
    aa: str | None = None  # timm's strings, e.g. rand-m9-mstd0.5-inc1
    reprob: float = number(0.0, least=0, most=1)
    mixup: float = number(0.0, least=0)
    cutmix: float = number(0.0, least=0)
    aug_repeats: int = number(1, least=1)  # copies of an image in a batch, each with its own draws; fewer images


@dataclass
class DataConfig:
    name: str = "digits"  # digits | folder | synthetic, a name of timm's, or `src.<module>.<Class>` of your own
    root: str | None = None
    batch_size: int | None = number(64, least=1)  # global: all devices together
    batch_size_per_device: int | None = number(None, least=1)  # instead of batch_size (weak scaling)
    image_size: int | None = number(None, least=1)  # pixels; None: the data's own, else the model's
    eval_image_size: int | None = number(None, least=1)  # None: image_size
    mean: list[float] | None = None  # per channel, of images in 0..1; None: the data's own, else the model's
    std: list[float] | None = None
    crop_pct: float | None = number(None, above=0, most=1)  # share of an evaluation image's side; None: the model's
    interpolation: str | None = choice(None, "bilinear", "bicubic")  # of evaluation images; None: the model's
    workers: int | str = number("auto", least=0)  # loader processes per rank; auto: 0 for data in memory
    on_error: str = choice("raise", "raise", "skip")  # an unreadable image: end the run by its name, or leave it out
    limit_train: int | None = number(None, least=1)  # use only the first N training images
    kwargs: dict[str, Any] = field(default_factory=dict)  # to the dataset's constructor
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass
class ParallelConfig:
    """How a run is spread over devices. None leaves an option at torch's default."""

    strategy: str = "auto"  # auto, single, dp, ddp, or `src.parallel.<module>.<Class>` of your own
    # of a strategy of your own, whose YAML says both
    process_per_device: bool | None = None  # True: a rank per device, as in ddp; False: one process
    options: dict[str, Any] = field(default_factory=dict)  # what its class reads of `config.options`
    devices: int | str = number("auto", least=1)
    accelerator: str = choice("auto", "auto", "cpu", "cuda", "mps")
    threads_per_device: int | str = number("auto", least=1)  # CPU threads of a rank or replica; auto: cores / devices
    # process group (ddp)
    backend: str = choice("auto", "auto", "nccl", "gloo", "mpi")
    start_timeout: int = number(300, least=1)  # seconds a rank may take to join and reach its first step
    timeout: int = number(120, least=1)  # seconds a rank may be silent between later steps
    max_restarts: int = number(0, least=0)
    # devices by number (dp and ddp on CUDA)
    device_ids: list[int] | None = None
    output_device: int | None = number(None, least=0)
    # dp only
    dim: int | None = number(None, least=0)
    loss_in_replica: bool | None = None
    # ddp only
    bucket_cap_mb: float | None = number(None, above=0)
    broadcast_buffers: bool | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    comm_hook: str | None = choice(None, "bf16", "fp16")  # gradients travel in 16 bits
    dist_bn: str | None = choice(None, "broadcast", "reduce")  # BatchNorm statistics that are evaluated; None: rank 0's

    @property
    def has_ranks(self) -> bool:
        """True if every device has a process of its own. False under `auto`, which is resolved first."""
        return self.strategy == "ddp" if self.process_per_device is None else self.process_per_device


@dataclass
class OptimConfig:
    """timm's names for its optimizers and schedules."""

    opt: str = "adamw"
    lr: float = number(1e-3, above=0)
    weight_decay: float = number(0.05, least=0)
    momentum: float = number(0.9, least=0, most=1)
    layer_decay: float | None = number(None, above=0, most=1)
    clip_grad: float | None = number(None, above=0)  # largest gradient norm
    kwargs: dict[str, Any] = field(default_factory=dict)  # to the optimizer, e.g. {betas: [0.9, 0.95]}
    lr_rule: str = choice("none", "none", "linear", "sqrt")
    lr_base_batch: int = number(256, least=1)  # lr is meant for this batch when lr_rule is not none
    sched: str = choice("cosine", "none", "constant", "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt")
    sched_kwargs: dict[str, Any] = field(default_factory=dict)  # to timm's create_scheduler_v2, e.g. {cycle_limit: 2}
    warmup_epochs: float = number(0.0, least=0)
    warmup_lr: float = number(1e-5, least=0)
    min_lr: float = number(0.0, least=0)
    cooldown_epochs: float = number(0.0, least=0)
    decay_epochs: float | None = number(None, above=0)  # step: between two drops; wsd, rsqrt: of the decay at the end
    decay_milestones: list[float] | None = None  # multistep: the epochs of the drops
    decay_rate: float = number(0.1, above=0)


@dataclass
class TrainConfig:
    epochs: int = number(10, least=1)
    max_steps: int | None = number(None, least=1)  # optimizer steps; ends earlier than `epochs` would
    precision: str = choice("fp32", "fp32", "tf32", "bf16", "fp16")
    deterministic: bool = False  # torch's deterministic algorithms only: the same bits again on a GPU, at a price
    accumulate: int = number(1, least=1)  # batches per optimizer step
    evaluate_every: int = number(1, least=0)  # epochs; 0: never during training
    target_loss: float | None = number(None, above=0)  # the last lines say whether train/loss got below it
    early_stop: int | None = number(None, least=1)  # evaluations without a better `checkpoint.metric`
    loss: str = "ce"  # one of LOSSES in src/training/objective.py
    smoothing: float = number(0.0, least=0, most=1)
    bce_target_thresh: float | None = number(None, least=0, most=1)  # bce: mixed targets above it become 1
    log_every: int = number(10, least=1)  # steps between two logged lines
    profile_steps: int | None = number(None, least=1)  # record so many with torch.profiler, and split the others' time
    on_nonfinite: str = choice("stop", "stop", "skip")  # skip: leave such steps out; slower, as it waits for the device
    max_skipped: int = number(10, least=0)  # more such steps end the run

    @property
    def untimed_steps(self) -> int | None:
        """With profile_steps, the steps before the timed ones: ten to warm up, one to start the profiler in, and those."""
        return None if self.profile_steps is None else 11 + self.profile_steps


@dataclass
class CheckpointConfig:
    every_steps: int | None = number(None, least=1)  # None: at the end of every epoch
    every_minutes: float | None = number(None, above=0)  # by rank 0's clock, at the next logged step
    keep: int = number(1, least=1)  # step_N.pt files kept beside last.pt and best.pt
    metric: str = "val/acc"  # what best.pt is best by: val/<a number of src/training/metrics.py>, or with _ema


@dataclass
class ClusterConfig:
    """Who starts the command of each node. Sizes are per node; None leaves one to the scheduler."""

    scheduler: str = choice("local", "local", "slurm", "kubernetes")
    nodes: int = number(1, least=1)
    gpus: int | None = number(None, least=0)  # None: a run on CPU
    cpus: int | None = number(None, least=1)
    memory: str | None = None  # e.g. 64G
    time: str | None = None  # hh:mm:ss or d-hh:mm:ss, after which the job is stopped
    submit: bool = True  # false: write the job's file and leave it for you
    wait: bool = False  # until the job has ended; its exit code is ours
    # slurm
    partition: str | None = None
    account: str | None = None
    gres: str | None = None  # instead of gpus, e.g. gpu:a100:4
    signal_seconds: int = number(90, least=10)  # the warning before the time is up: save, and queue again
    setup: str | None = None  # shell lines before the run, e.g. "module load cuda"; never taken from a frozen config
    extra: list[str] = field(default_factory=list)  # more lines, each `#SBATCH …`; as setup
    # kubernetes
    image: str | None = None
    namespace: str | None = None
    claim: str | None = None  # a PersistentVolumeClaim that all nodes can mount, for the run folder


@dataclass
class SweepConfig:
    """Only read with --multirun."""

    # blocks: each runs every point once, with the seed + its number; auto: until `precision` or `max_repeats` is reached
    repeats: int | str = number(1, least=1)
    precision: float = number(0.05, above=0)  # auto: half the 95 % interval of each ratio that the report states
    max_repeats: int = number(10, least=2)  # auto: blocks at the most
    smallest_difference: float = number(0.03, above=0, most=1)  # in speed that matters to you; below it "does not hold"
    shuffle: bool | None = None  # draw each block's order anew; None: where there are repeats, against drift
    resume: str | None = None  # a sweep folder: run what is missing or failed
    dry_run: bool = False  # print the jobs with their derived values, and leave
    jobs: int | str = number(1, least=1)  # side by side, each on devices of its own; auto: as many as fit
    timed: bool = False  # the jobs' speed is what counts, so they run alone


@dataclass
class SearchConfig:
    """Only read with --multirun. `search=optuna` sets it; the names are those of Hydra's own Optuna sweeper."""

    sampler: str | None = choice(None, "tpe", "random")  # None: no search
    n_trials: int = number(20, least=1)  # in all, resumed or not
    n_jobs: int | str = number(1, least=1)  # trials at a time, on devices of their own; auto: as sweep.jobs
    direction: str | None = choice(None, "maximize", "minimize")  # None: what optimized_metric asks for
    storage: str | None = None  # database URL; None: study.db in the sweep folder (a password belongs in ${oc.env:…})
    study_name: str | None = None  # None: task_name and the sweep folder's name
    # key -> interval(a,b), tag(log,interval(a,b)), choice(a,b), range(a,b) or a,b
    params: dict[str, Any] = field(default_factory=dict)
    max_failure_rate: float = number(0.5, least=0, most=1)  # share of n_trials; more failed ones end the search
    seed: int | None = number(None, least=0)  # None: `seed`
    pruner: str = choice("median", "median", "none")
    n_startup_trials: int = number(5, least=0)  # finished trials before the pruner stops any
    n_warmup_steps: int = number(0, least=0)  # evaluations of a trial before the pruner may stop it


@dataclass
class PathsConfig:
    output_dir: str = "outputs"


@dataclass
class Config:
    task_name: str = "train"
    tags: list[str] = field(default_factory=list)
    seed: int = number(42, least=0, most=2**63 - 1)
    resume: str | None = None  # a run folder, or auto: the newest unfinished run of this task
    resume_strict: bool = True
    optimized_metric: str = "val/acc_best"  # what train.py hands to a search
    print_config: bool | str = choice(True, True, False, "full")  # what differs from the defaults; full: all of it
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class ResolvedParallel(ParallelConfig):
    """Without `auto` in what decides what a run computes."""

    devices: int = 1
    threads_per_device: int = 1


@dataclass
class ResolvedConfig(Config):
    """What engine/config/resolve.py makes of a Config for a machine, and a run's config.yaml holds."""

    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)

    @property
    def global_batch(self) -> int:
        """Images per forward pass over all devices."""
        if self.data.batch_size is not None:
            return self.data.batch_size
        assert self.data.batch_size_per_device is not None
        return self.data.batch_size_per_device * self.parallel.devices

    @property
    def learning_rate(self) -> float:
        """optim.lr after optim.lr_rule, whose batch is the one per optimizer step: global batch x accumulate.

        linear: Goyal et al. 2017, arXiv:1706.02677; sqrt: Krizhevsky 2014, arXiv:1404.5997.
        """
        ratio = self.global_batch * self.train.accumulate / self.optim.lr_base_batch
        return self.optim.lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.optim.lr_rule]


def as_resolved(config: Config) -> ResolvedConfig:
    """`config` by the type that has no `auto` left in it."""
    parallel = ResolvedParallel(**vars(config.parallel))
    for key in ("devices", "threads_per_device"):
        if not isinstance(getattr(parallel, key), int):
            raise ValueError(f"parallel.{key}=auto: not resolved, so no config of a run; give a whole number")
    return ResolvedConfig(**{**vars(config), "parallel": parallel})


def is_timm_dataset(name: str) -> bool:
    """A dataset by the name that timm's factory knows: `torch/cifar10`, `hfds/<name>`, `wds/…`, or `tar`."""
    return name.partition("/")[0] in ("torch", "hfds", "wds", "tar")


def is_own_class(name: str) -> bool:
    """`src.<module>.<Class>`: a class of this project, the only kind of class a config may name."""
    return re.fullmatch(r"src(\.[A-Za-z_]\w*){2,}", name) is not None


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, field) of every leaf of a config dataclass."""
    for entry in dataclasses.fields(tree):
        value, key = getattr(tree, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, entry
