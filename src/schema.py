"""Every key that a fork may edit, with its type, default, bounds and help. The YAML under `conf/`
is merged into `Config`.

Keys of the launcher, sweeps, searches and trackers are in timm_parallel/keys.py. train.py rejects
an undeclared key, wherever it is set: `python train.py modle=resnet18`. Free dictionaries appear
only where a third-party constructor reads them (`kwargs`). `make schema` writes docs/keys.md and
conf/schema.json.

Rules that tie keys together are in the method `problems` of their group, which yields an error
message per broken rule: key, value and fix. train.py refuses a config with the first message; a
sweep skips that configuration. A message that other code must recognize is a `Problem`, which
carries a code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timm_parallel.errors import ONE_DEVICE, Problem
from timm_parallel.keys import (
    ClusterConfig,
    PathsConfig,
    SearchConfig,
    SweepConfig,
    TrackerConfig,
    choice,
    is_own_class,
    is_regular_expression,
    key,
    number,
)
from timm_parallel.machine.text import yaml_text
from timm_parallel.metric import Metric

# Built-in strategies and datasets: name -> class. A config refers to your own as
# `src.<module>.<Class>`.
STRATEGIES = {
    "single": "src.parallel.single.Single",
    "dp": "src.parallel.data_parallel.DataParallelStrategy",
    "ddp": "src.parallel.distributed.Distributed",
    "fsdp": "src.parallel.fully_sharded.FullySharded",
}
DATASETS = {
    "digits": "src.data.datasets.Digits",
    "synthetic": "src.data.datasets.Synthetic",
    "folder": "timm_parallel.data.folder.FolderDataset",
    "csv": "timm_parallel.data.csv_listing.CsvDataset",
    "tar": "timm_parallel.data.tar_index.TarDataset",
    "wds": "timm_parallel.data.tar_index.TarDataset",
}
# The class of timm's datasets, by names such as torch/cifar10.
TIMM = "src.data.timm_datasets.TimmImages"
# Datasets made in memory. They have one image size and do not read data.root.
MADE_IN_MEMORY = ("digits", "synthetic")
SCHEDULES = ("constant", "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt")
# Modes of torch.compile, which timm names in --torchcompile-mode.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Arguments of timm's create_scheduler_v2 that other keys decide.
DERIVED_ARGUMENTS = ("num_epochs", "step_on_epochs", "updates_per_epoch")
# Arguments of timm's create_scheduler_v2 that not every schedule reads -> the schedules that do.
SCHEDULES_WITH = {
    **dict.fromkeys(("cycle_mul", "cycle_decay", "cycle_limit"), ("cosine", "tanh", "poly")),
    "k_decay": ("cosine", "poly"),
    **dict.fromkeys(("decay_fn", "stable_timescale"), ("wsd", "rsqrt")),
    **dict.fromkeys(("patience_epochs", "plateau_mode"), ()),
}
# Optimizers that work under fsdp: they update each number alone, or with norms of tensors, so that
# a rank can update its shard.
OPTIMIZERS_OF_PARTS = (
    *(
        "adabelief",
        "adadelta",
        "adagrad",
        "adam",
        "adamw",
        "adamax",
        "adan",
        "adanw",
        "adopt",
        "adoptw",
        "lamb",
    ),
    *(
        "lambw",
        "laprop",
        "lars",
        "lion",
        "madgrad",
        "momentum",
        "nadam",
        "nadamw",
        "nesterov",
        "nesterovw",
        "radam",
    ),
    *("radamw", "rmsprop", "rmsproptf", "sgd", "sgdw"),
)
# timm's optimizers with Nesterov momentum, which must be above 0.
NESTEROV = ("csgdc", "csgdw", "nesterov", "nesterovw", "nlarc", "nlars", "sgd", "sgdc", "sgdw")


@dataclass
class EmaConfig:
    """Averaged weights (exponential moving average), evaluated next to the raw ones as
    `val/<metric>_ema`.
    """

    decay: float | None = number(
        None,
        gt=0,
        le=1,
        help="Decay per step; null: no averaged weights; timm uses 0.9998. A loss is not averaged.",
    )
    warmup: bool = key(
        True, help="Use a smaller decay in the first steps, so that the average follows sooner."
    )


@dataclass
class ModelConfig:
    """The model. Its head, channels and image size follow the data."""

    name: str = key("resnet18", help="Any timm model, or `src.<module>.<Class>` of your own.")
    pretrained: bool = key(
        False, help="Load timm's weights from the Hugging Face hub or its cache."
    )
    weights: str | None = key(
        None, help="File to load: .safetensors, or a checkpoint of this project or of timm."
    )
    weights_strict: bool = key(
        True,
        help="false: train what the file lacks, or does not fit, from scratch; a loss always "
        "starts so.",
    )
    freeze: int | str | None = key(
        None,
        help="backbone, the first N of timm's coarse groups, or a regex of names; not parameters "
        "of a loss.",
    )
    num_classes: int | None = number(
        None, ge=1, help="Outputs of the model; null: as many as the data has classes."
    )
    in_chans: int | None = number(None, ge=1, help="Image channels; null: from the data.")
    kwargs: dict[str, Any] = key(
        {}, help="More arguments of `timm.create_model`, or of your class."
    )
    channels_last: bool = key(
        False, help="Store images and weights in channels-last memory format."
    )
    compile: bool | str = choice(
        False,
        False,
        True,
        *COMPILE_MODES,
        help="Compile the model (not under dp and fsdp); true: with torch's default mode.",
    )
    grad_checkpointing: bool = key(
        False, help="Recompute activations in the backward pass, to save memory."
    )
    sync_bn: bool = key(False, help="Take BatchNorm statistics over all ranks.")
    ema: EmaConfig = field(default_factory=EmaConfig)

    def problems(self, whole: Config) -> Iterator[str]:
        if self.weights is not None and self.pretrained:
            yield (
                f"model.weights={self.weights}: conflicts with model.pretrained=true; set one "
                "of them"
            )
        if isinstance(self.freeze, int) and self.freeze < 1:
            yield (
                f"model.freeze={self.freeze}: expected a number of groups >= 1, backbone, or a "
                "regular expression"
            )
        if isinstance(self.freeze, str) and not is_regular_expression(self.freeze):
            example = "'model.freeze=\"(stem|layer1)\"'"
            yield (
                f"model.freeze={self.freeze}: not a regular expression; give backbone, a "
                f"number, or e.g. {example}"
            )
        if self.weights is None and not self.weights_strict:
            yield "model.weights_strict=false: has no effect without model.weights=<file>"
        # On a cluster, the job checks that the file exists.
        here = whole.cluster.scheduler == "local"
        if self.weights is not None and here and not Path(self.weights).is_file():
            yield f"model.weights={self.weights}: no such file"
        if self.pretrained and is_own_class(self.name):
            yield (
                f"model.pretrained=true: timm has no weights for {self.name}; give a file: "
                "model.weights=<file>"
            )
        if self.sync_bn and not whole.parallel.has_ranks:
            yield (
                "model.sync_bn=true: an option of ddp and fsdp, but "
                f"parallel={whole.parallel.strategy}"
            )
        chosen = f"model.compile={yaml_text(self.compile)}"
        if self.compile and whole.parallel.strategy in ("dp", "fsdp"):
            yield (
                f"{chosen}: expected ddp or single, but parallel={whole.parallel.strategy}; "
                "leave it at false"
            )
        bucket = whole.parallel.bucket_cap_mb
        if self.compile and bucket is not None and bucket < 1:
            yield (
                f"parallel.bucket_cap_mb={bucket}: expected >= 1 with {chosen}, which splits "
                "the graph there"
            )


@dataclass
class AugmentConfig:
    """Augmentation of training images, with timm's names and meanings.
    null or 0 leaves a step out.
    """

    scale: list[float] | None = key(
        None, help="Area range of the random resized crop; null: resize and center crop."
    )
    ratio: list[float] | None = key(
        None, help="Aspect range of the random resized crop; null: 3/4 to 4/3."
    )
    train_crop_mode: str | None = choice(
        None, "rrc", "rkrc", "rkrr", help="timm's crops; null: rrc if scale is set."
    )
    interpolation: str = choice(
        "bilinear", "bilinear", "bicubic", "random", help="For training images, and in aa."
    )
    crop_padding: int = number(
        0, ge=0, help="Pixels of black around an image before a random crop of its size."
    )
    hflip: float = number(0.0, ge=0, le=1, help="Probability of a horizontal flip.")
    vflip: float = number(0.0, ge=0, le=1, help="Probability of a vertical flip.")
    color_jitter: float | None = number(
        None, ge=0, help="Strength of random brightness, contrast and saturation."
    )
    color_jitter_prob: float | None = number(
        None, ge=0, le=1, help="Probability of color jitter; null: always."
    )
    grayscale_prob: float = number(0.0, ge=0, le=1, help="Probability of a conversion to gray.")
    gaussian_blur_prob: float = number(0.0, ge=0, le=1, help="Probability of a Gaussian blur.")
    aa: str | None = key(
        None, help="timm's RandAugment, AugMix or AutoAugment string, e.g. rand-m9-mstd0.5-inc1."
    )
    reprob: float = number(
        0.0, ge=0, le=1, help="Probability of random erasing, after normalization."
    )
    remode: str = choice(
        "pixel", "const", "rand", "pixel", help="Erase with the mean, one color, or noise."
    )
    recount: int = number(1, ge=1, help="Largest number of erased boxes in an image.")
    mixup: float = number(0.0, ge=0, help="Mixup alpha.")
    cutmix: float = number(0.0, ge=0, help="Cutmix alpha.")
    cutmix_minmax: list[float] | None = key(
        None, help="Range of the box's sides as shares; set it instead of cutmix."
    )
    mixup_prob: float = number(1.0, ge=0, le=1, help="Probability of mixup or cutmix.")
    mixup_switch_prob: float = number(
        0.5, ge=0, le=1, help="Probability of cutmix, not mixup, if both are set."
    )
    mixup_mode: str = choice(
        "batch", "batch", "pair", "elem", help="Draw for each batch, pair of images, or image."
    )
    mixup_off_epoch: int = number(0, ge=0, help="First epoch without mixup and cutmix; 0: none.")
    aug_repeats: int = number(
        1,
        ge=1,
        help="Augmented copies of an image in a batch; under ddp on different ranks, as in timm.",
    )

    @property
    def mixes(self) -> bool:
        """True if mixup or cutmix is on."""
        return bool(self.mixup or self.cutmix or self.cutmix_minmax)

    def problems(self, whole: Config) -> Iterator[str]:
        is_cropped = self.scale is not None or self.train_crop_mode is not None
        needed = {
            "ratio": ("scale", is_cropped),
            "color_jitter_prob": ("color_jitter", self.color_jitter),
            "remode": ("reprob", self.reprob),
            "recount": ("reprob", self.reprob),
            "mixup_switch_prob": (
                "mixup and cutmix",
                self.mixup and (self.cutmix or self.cutmix_minmax),
            ),
            **dict.fromkeys(
                ("mixup_prob", "mixup_mode", "mixup_off_epoch"), ("mixup or cutmix", self.mixes)
            ),
        }
        for name, (others, is_met) in needed.items():
            if getattr(self, name) != getattr(AugmentConfig, name) and not is_met:
                yield (
                    f"data.augment.{name}={getattr(self, name)}: has no effect without "
                    f"data.augment.{others}"
                )
        for name in ("scale", "ratio", "cutmix_minmax"):
            pair = getattr(self, name)
            if pair is not None and (len(pair) != 2 or not 0 < pair[0] <= pair[1]):
                yield (
                    f"data.augment.{name}={pair}: expected [smallest, largest], two numbers above 0"
                )
        if self.crop_padding and is_cropped:
            other = "train_crop_mode" if self.scale is None else "scale"
            yield (
                f"data.augment.crop_padding={self.crop_padding}: conflicts with "
                f"data.augment.{other}; set one of them"
            )
        if self.color_jitter and self.aa is not None and "3a" not in self.aa:
            yield (
                f"data.augment.color_jitter={self.color_jitter}: timm leaves it out next to "
                f"data.augment.aa={self.aa}; set one"
            )
        if self.cutmix_minmax and not self.cutmix_minmax[0] < self.cutmix_minmax[-1] <= 1:
            yield (
                f"data.augment.cutmix_minmax={self.cutmix_minmax}: expected [smallest, largest] "
                "with smallest < largest <= 1"
            )
        if self.cutmix and self.cutmix_minmax:
            yield (
                f"data.augment.cutmix={self.cutmix}: has no effect with "
                "data.augment.cutmix_minmax; set one"
            )
        if self.mixup_off_epoch >= whole.train.epochs:
            yield (
                f"data.augment.mixup_off_epoch={self.mixup_off_epoch}: must be below "
                f"train.epochs={whole.train.epochs}"
            )


@dataclass
class DataConfig:
    """The dataset, its batches and its preprocessing."""

    name: str = key(
        "digits",
        help="digits, folder, csv, synthetic, a timm dataset, or `src.<module>.<Class>` of your "
        "own.",
    )
    root: str | None = key(
        None, help="Folder (or CSV file) to read; digits and synthetic refuse it."
    )
    val_fraction: float | None = number(
        None, gt=0, le=1, help="Share of images for val, by a hash of path or group."
    )
    test_fraction: float | None = number(
        None, gt=0, le=1, help="Share of images for test, with val_fraction."
    )
    group_pattern: str | None = key(
        None, help="folder: regex; images whose paths match the same text share a split."
    )
    fold: int | None = number(None, ge=0, help="csv: the fold that is val.")
    batch_size: int | None = number(
        64, ge=1, help="Global batch: images per forward pass over all devices."
    )
    batch_size_per_device: int | None = number(
        None, ge=1, help="Set instead of batch_size, e.g. for weak scaling."
    )
    image_size: int | None = number(
        None, ge=1, help="Pixels per side; null: the data's size, else the model's."
    )
    eval_image_size: int | None = number(
        None, ge=1, help="Pixels per side in evaluation; null: image_size."
    )
    mean: list[float] | None = key(
        None, help="Mean per channel of images in 0..1; null: the data's, else the model's."
    )
    std: list[float] | None = key(
        None, help="Standard deviation per channel of images in 0..1; see mean."
    )
    crop_pct: float | None = number(
        None, gt=0, le=1, help="Side of the crop / side of the image; null: the model's."
    )
    interpolation: str | None = choice(
        None, "bilinear", "bicubic", help="For evaluation images; null: the model's."
    )
    workers: int | str = number(
        "auto", ge=0, help="Loader processes per rank; auto: cores / ranks; mostly 0 in memory."
    )
    on_error: str = choice(
        "raise", "raise", "skip", help="An unreadable image ends the run (raise), or is left out."
    )
    balance: float = number(
        0.0, ge=0, le=1, help="1: draw all classes equally often, with replacement; 0: as they are."
    )
    limit_train: int | None = number(
        None, ge=1, help="Train on so many images, of a fixed permutation."
    )
    kwargs: dict[str, Any] = key({}, help="More arguments of the dataset's class.")
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def problems(self, whole: Config) -> Iterator[str]:
        yield from self._split_problems()
        yield from self.augment.problems(whole)
        per_device = self.batch_size_per_device
        if self.batch_size is not None and per_device is not None:
            yield (
                f"data.batch_size={self.batch_size} and data.batch_size_per_device={per_device}: "
                "set one, the other to null"
            )
        if self.eval_image_size is not None and self.name in MADE_IN_MEMORY:
            yield (
                f"data.eval_image_size={self.eval_image_size}: images of {self.name} have one "
                "size; leave it at null"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not all(0 <= value <= 1 for value in values):
                yield f"data.{name}={values}: expected a number in 0..1 per channel"
        if self.std is not None and 0 in self.std:
            yield f"data.std={self.std}: expected numbers above 0"
        if self.balance and self.augment.aug_repeats > 1:
            yield (
                f"data.balance={self.balance}: draws images repeatedly already; set "
                "data.augment.aug_repeats=1"
            )
        if (self.mean is None) != (self.std is None):
            yield "data.mean and data.std: set both or neither"

    def _split_problems(self) -> Iterator[str]:
        """Yield an error message for each split key that the dataset does not read. Your own
        dataset may read all of them.
        """
        readers = {
            "val_fraction": ("folder", "csv"),
            "test_fraction": ("folder", "csv"),
            "group_pattern": ("folder",),
            "fold": ("csv",),
        }
        for name, datasets in readers.items():
            if getattr(self, name) is not None and not (
                self.name in datasets or is_own_class(self.name)
            ):
                yield (
                    f"data.{name}={getattr(self, name)}: only data={' and data='.join(datasets)} "
                    f"read it, not data={self.name}"
                )
        if self.fold is not None and self.test_fraction is not None:
            yield (
                f"data.test_fraction={self.test_fraction}: data.fold={self.fold} divides the "
                "images; write split=test in the CSV"
            )
        for name in ("test_fraction", "group_pattern"):
            if getattr(self, name) is not None and self.val_fraction is None:
                yield f"data.{name}={getattr(self, name)}: set data.val_fraction too"
        if (self.val_fraction or 0) + (self.test_fraction or 0) >= 1:
            yield (
                f"data.val_fraction={self.val_fraction}: with data.test_fraction it must be below 1"
            )
        if self.fold is not None and self.val_fraction is not None:
            yield (
                f"data.fold={self.fold}: data.val_fraction={self.val_fraction} chooses val "
                "already; set one"
            )
        if self.group_pattern is not None and not is_regular_expression(self.group_pattern):
            example = "'data.group_pattern=\"(patient_[0-9]+)\"'"
            yield (
                f"data.group_pattern={self.group_pattern}: not a regular expression; e.g. {example}"
            )


@dataclass
class ParallelConfig:
    """Placement of a run on devices. null leaves an option at torch's default."""

    strategy: str = key(
        "auto", help="auto, single, dp, ddp, fsdp, or `src.parallel.<module>.<Class>` of your own."
    )
    process_per_device: bool | None = key(
        None, help="Your own strategy: true for a rank per device, else one process."
    )
    options: dict[str, Any] = key(
        {}, help="For a strategy class of your own: what it reads of `config.options`."
    )
    devices: int | str = number(
        "auto", ge=1, help="Number; auto: CUDA devices that divide the batch, else 1 or 2."
    )
    accelerator: str = choice(
        "auto", "auto", "cpu", "cuda", "mps", help="Kind of device; auto: cuda, mps, else cpu."
    )
    threads_per_device: int | str = number(
        "auto", ge=1, help="CPU threads per rank or replica; auto: cores / devices."
    )
    backend: str = choice(
        "auto",
        "auto",
        "nccl",
        "gloo",
        "mpi",
        help="Backend of ranks; auto: nccl on CUDA, else gloo.",
    )
    start_timeout: int = number(
        300, ge=1, help="Seconds without progress before a rank's first step that end the run."
    )
    timeout: int = number(
        120, ge=1, help="Seconds without progress between later steps, after which the run ends."
    )
    max_restarts: int = number(
        0, ge=0, help="How often ddp or fsdp restarts all ranks after one has failed."
    )
    device_ids: list[int] | None = key(
        None, help="CUDA devices by number (not of single); null: the first ones."
    )
    output_device: int | None = number(
        None, ge=0, help="CUDA device of the outputs (dp, ddp); null: the first one."
    )
    dim: int | None = number(
        None, ge=0, only="dp", help="Dimension along which DataParallel splits a batch."
    )
    loss_in_replica: bool | None = key(
        None, only="dp", help="Compute the loss in each replica, not on the outputs."
    )
    bucket_cap_mb: float | None = number(
        None, gt=0, only="ddp", help="Size of DDP's gradient buckets in MiB."
    )
    broadcast_buffers: bool | None = key(
        None, only="ddp", help="Send rank 0's buffers to all ranks in every step."
    )
    find_unused_parameters: bool | None = key(
        None, only="ddp", help="Let DDP look for parameters without a gradient."
    )
    gradient_as_bucket_view: bool | None = key(
        None, only="ddp", help="Keep gradients in DDP's buckets to save a copy."
    )
    batched_grad_copy: bool | None = key(
        None, only="ddp", help="Copy gradients to a bucket in one go (torch >= 2.14)."
    )
    static_graph: bool | None = key(
        None, only="ddp", help="Promise DDP that the graph is the same in every step."
    )
    comm_hook: str | None = choice(
        None, "bf16", "fp16", only="ddp", help="Send gradients in 16 bits; null: unchanged."
    )
    dist_bn: str | None = choice(
        None,
        "broadcast",
        "reduce",
        only="ddp",
        help="Evaluate BatchNorm with rank 0's statistics (also null) or with the mean over the "
        "ranks.",
    )
    reshard_after_forward: bool | None = key(
        None, only="fsdp", help="false: gather weights once a batch, not twice."
    )
    shard_size: int | None = number(
        None, ge=2, only="fsdp", help="Devices that hold a model together; null: all."
    )

    @property
    def has_ranks(self) -> bool:
        """True if every device has its own process. False under `auto`, which must be resolved
        first.
        """
        return (
            self.strategy in ("ddp", "fsdp")
            if self.process_per_device is None
            else self.process_per_device
        )

    @property
    def has_one_device(self) -> bool:
        """True if the strategy uses one device, whatever the machine has."""
        return self.strategy == "single"

    @property
    def has_one_process(self) -> bool:
        """True if one process drives all devices. It cannot span nodes and has no process group."""
        return self.strategy != "auto" and not self.has_ranks

    def choose_strategy(self, several: bool) -> None:
        """Replace strategy `auto`: by ddp for `several` devices, by single for one."""
        if self.strategy == "auto":
            self.strategy = "ddp" if several else "single"

    def problems(self, whole: Config) -> Iterator[str]:
        strategy = self.strategy
        if strategy == "single" and self.devices not in ("auto", 1):
            message = (
                f"parallel.devices={self.devices}: single uses one device; choose "
                "parallel=ddp or parallel=dp"
            )
            yield Problem(message, ONE_DEVICE)
        for name, owner in strategy_options().items():
            if getattr(self, name) is not None and strategy != owner:
                yield (
                    f"parallel.{name}={getattr(self, name)}: an option of {owner}, but "
                    f"parallel={strategy}"
                )
        for name in ("device_ids", "output_device"):
            without = ("auto", "single", "fsdp") if name == "output_device" else ("auto", "single")
            if getattr(self, name) is not None and strategy in without:
                yield (
                    f"parallel.{name}={getattr(self, name)}: an option of dp and ddp, but "
                    f"parallel={strategy}"
                )
        if is_own_class(strategy):
            if self.process_per_device is None:
                yield (
                    f"parallel.process_per_device: {strategy} needs it; set true (a rank per "
                    "device) or false (one process)"
                )
        else:
            for name in ("process_per_device", "options"):
                if getattr(self, name) not in (None, {}):
                    yield (
                        f"parallel.{name}={getattr(self, name)}: an option of your own strategy "
                        f"classes, but parallel={strategy}"
                    )
        if self.max_restarts and not self.has_ranks:
            yield (
                f"parallel.max_restarts={self.max_restarts}: an option of ddp and fsdp, but "
                f"parallel={strategy}"
            )
        if self.broadcast_buffers and self.dist_bn == "reduce":
            yield (
                "parallel.broadcast_buffers=true: every step would undo "
                "parallel.dist_bn=reduce; leave it at null"
            )


def strategy_options() -> dict[str, str]:
    """Map each `parallel` key that only one strategy reads to the name of that strategy."""
    fields = dataclasses.fields(ParallelConfig)
    return {entry.name: entry.metadata["only"] for entry in fields if entry.metadata.get("only")}


@dataclass
class OptimConfig:
    """Optimizer and schedule, with timm's names."""

    opt: str = key("adamw", help="Any optimizer that timm knows, by its name there.")
    lr: float = number(1e-3, gt=0, help="Peak learning rate, before lr_rule.")
    weight_decay: float = number(0.05, ge=0, help="Weight decay; norms and biases have none.")
    momentum: float = number(0.9, ge=0, le=1, help="Momentum, for optimizers that have it.")
    layer_decay: float | None = number(
        None,
        gt=0,
        le=1,
        help="Factor of the learning rate per layer below the head; parameters of a loss have "
        "none.",
    )
    head_lr_scale: float = number(
        1.0, gt=0, help="Factor of the learning rate of the head, and of the parameters of a loss."
    )
    clip_grad: float | None = number(
        None, gt=0, help="Largest gradient norm, or the limit of clip_mode."
    )
    clip_mode: str = choice(
        "norm", "norm", "value", "agc", help="Clip the norm, each entry, or each unit adaptively."
    )
    kwargs: dict[str, Any] = key(
        {}, help="More arguments of the optimizer, e.g. {betas: [0.9, 0.95]}."
    )
    lr_rule: str = choice(
        "none", "none", "linear", "sqrt", help="Scale lr with (batch per update) / lr_base_batch."
    )
    lr_base_batch: int = number(
        256, ge=1, help="Batch for which lr is meant, if lr_rule is not none."
    )
    sched: str = choice(
        "cosine", *SCHEDULES, help="timm's schedule by step; constant holds lr after the warm-up."
    )
    sched_kwargs: dict[str, Any] = key(
        {}, help="More arguments of timm's create_scheduler_v2, e.g. {cycle_limit: 2}."
    )
    warmup_epochs: float = number(0.5, ge=0, help="Epochs of linear warm-up.")
    warmup_lr: float = number(1e-5, ge=0, help="Learning rate at the start of the warm-up.")
    warmup_prefix: bool = key(
        True, help="Start the decay after the warm-up; false: at epoch 0, as timm's train.py does."
    )
    min_lr: float = number(0.0, ge=0, help="Learning rate at the end of the decay.")
    cooldown_epochs: float = number(
        0.0, ge=0, help="Epochs at the end with the last learning rate."
    )
    decay_epochs: float | None = number(
        None, gt=0, help="Epochs between drops (step), or of the decay (wsd, rsqrt)."
    )
    decay_milestones: list[float] | None = key(None, help="Epochs of the drops (multistep).")
    decay_rate: float = number(
        0.1, gt=0, help="Factor of a drop (step, multistep); power of poly (1: straight line)."
    )

    def problems(self, whole: Config) -> Iterator[str]:
        """Yield an error message for each key that has no effect, or does not fit the schedule or
        train.epochs.
        """
        epochs = whole.train.epochs
        if self.clip_mode != "norm" and self.clip_grad is None:
            yield f"optim.clip_mode={self.clip_mode}: has no effect without optim.clip_grad"
        if whole.parallel.strategy == "fsdp":
            yield from self._fsdp_problems()
        if self.momentum == 0 and self.opt in NESTEROV and self.kwargs.get("nesterov", True):
            fix = "use optim.opt=momentum, or +optim.kwargs.nesterov=false"
            yield (
                f"optim.momentum=0: the Nesterov momentum of optim.opt={self.opt} must be above 0; "
                f"{fix}"
            )
        if (
            self.sched == "rsqrt"
            and self.warmup_epochs == 0
            and not self.sched_kwargs.get("stable_timescale")
        ):
            fix = "set it above 0, or +optim.sched_kwargs.stable_timescale=<epochs>"
            yield (
                f"optim.warmup_epochs=0: the warm-up is the time scale of optim.sched=rsqrt; {fix}"
            )
        if not self.warmup_prefix and self.sched in ("constant", "wsd", "rsqrt"):
            yield f"optim.warmup_prefix=false: has no effect with optim.sched={self.sched}"
        if self.warmup_epochs + self.cooldown_epochs >= epochs and self.sched != "constant":
            yield (
                f"optim.warmup_epochs={self.warmup_epochs}: with optim.cooldown_epochs, "
                f"expected less than train.epochs={epochs}"
            )
        if self.sched == "multistep" and not self.decay_milestones:
            yield "optim.sched=multistep: set optim.decay_milestones, e.g. [30,60,90] (epochs)"
        if self.decay_milestones and max(self.decay_milestones) >= epochs:
            yield (
                f"optim.decay_milestones={self.decay_milestones}: each must be below "
                f"train.epochs={epochs}"
            )
        if self.sched == "step" and self.decay_epochs is None:
            yield "optim.sched=step: set optim.decay_epochs, the epochs between two drops"
        before = self.warmup_epochs if self.warmup_prefix else 0
        length = epochs - before - (self.cooldown_epochs if self.sched in ("wsd", "rsqrt") else 0)
        if self.decay_epochs is not None and self.decay_epochs >= length:
            yield (
                f"optim.decay_epochs={self.decay_epochs}: must be below {length:g}, "
                "train.epochs without warm-up and cool-down"
            )
        for name, schedules in (
            ("decay_milestones", ("multistep",)),
            ("decay_epochs", ("step", "wsd", "rsqrt")),
        ):
            if getattr(self, name) is not None and self.sched not in schedules:
                yield (
                    f"optim.{name}={getattr(self, name)}: has no effect with "
                    f"optim.sched={self.sched}"
                )
        for name in self.sched_kwargs:
            if self.sched not in SCHEDULES_WITH.get(name, (self.sched,)):
                yield f"optim.sched_kwargs.{name}: has no effect with optim.sched={self.sched}"
            if hasattr(self, name):
                yield f"optim.sched_kwargs.{name}: set optim.{name} instead"
            if name in DERIVED_ARGUMENTS:
                yield (
                    f"optim.sched_kwargs.{name}: follows from other keys, e.g. train.epochs; "
                    "leave it out"
                )

    def _fsdp_problems(self) -> Iterator[str]:
        """Yield an error for each setting that needs unsharded tensors, because fsdp shards
        parameters and gradients.
        """
        if self.opt not in OPTIMIZERS_OF_PARTS:
            yield (
                f"optim.opt={self.opt}: needs whole tensors, but parallel=fsdp; use one of "
                f"{', '.join(OPTIMIZERS_OF_PARTS)}"
            )
        if self.clip_mode == "agc":
            yield "optim.clip_mode=agc: needs whole tensors, but parallel=fsdp; use norm or value"
        if self.kwargs.get("fused") and self.opt not in ("adam", "adamw"):
            yield (
                "optim.kwargs.fused=true: torch has it for adam and adamw under fsdp, but "
                f"optim.opt={self.opt}; leave it out"
            )


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = number(8, ge=1, help="Epochs to train; the schedule has this length.")
    max_steps: int | None = number(
        None, ge=1, help="Optimizer steps after which training ends, if epochs is longer."
    )
    precision: str = choice(
        "fp32", "fp32", "tf32", "bf16", "fp16", help="Number format; bf16, fp16: autocast."
    )
    deterministic: bool = key(
        False, help="Use only torch's deterministic algorithms, for equal bits on a GPU; slower."
    )
    accumulate: int = number(1, ge=1, help="Batches per optimizer step.")
    evaluate_every: int = number(
        1, ge=0, help="Epochs between two evaluations; 0: only at the end."
    )
    target_loss: float | None = number(
        None, gt=0, help="The last lines state whether train/loss fell below it."
    )
    early_stop: int | None = number(
        None, ge=1, help="Stop after so many evaluations without a better checkpoint.metric."
    )
    loss: str = key(
        "ce",
        help="A name in LOSSES of src/train/losses.py (ce, bce, asl), or `src.<module>.<Class>`.",
    )
    task: str = choice(
        "classification", "classification", "multilabel", help="One label per image, or any number."
    )
    class_weights: Any = key(
        None,
        help="Weights of the classes in the loss, scaled to mean 1: auto (by frequency) or a list.",
    )
    loss_kwargs: dict[str, Any] = key({}, help="More arguments of the loss, e.g. {gamma: 2}.")
    smoothing: float = number(0.0, ge=0, le=1, help="Label smoothing, in training only.")
    bce_target_thresh: float | None = number(
        None, ge=0, le=1, help="bce: a mixed target above this becomes 1, else 0."
    )
    log_every: int = number(10, ge=1, help="Steps between two logged lines.")
    profile_steps: int | None = number(
        None, ge=1, help="Record so many steps with torch.profiler; see debug=profile."
    )

    @property
    def untimed_steps(self) -> int | None:
        """Number of first steps that a profiled run does not time: 10 of warm-up, one to start the
        profiler, the profiled ones.
        """
        return None if self.profile_steps is None else 11 + self.profile_steps

    def problems(self, whole: Config) -> Iterator[str]:
        yield from self._task_problems(whole)
        if self.early_stop is not None and self.evaluate_every == 0:
            yield (
                f"train.early_stop={self.early_stop}: needs evaluations; set "
                "train.evaluate_every above 0"
            )
        if self.bce_target_thresh is not None and self.loss != "bce":
            yield (
                f"train.bce_target_thresh={self.bce_target_thresh}: has no effect with "
                f"train.loss={self.loss}; use train.loss=bce"
            )
        if self.max_steps is not None:
            yield from self.profile_problems(self.max_steps)

    def _task_problems(self, whole: Config) -> Iterator[str]:
        """Yield an error for each key that does not fit train.task."""
        from src.train.metrics import metrics_of

        weights, data = self.class_weights, whole.data
        is_list = isinstance(weights, list) and all(
            isinstance(w, int | float) and w >= 0 for w in weights
        )
        if weights not in (None, "auto") and not is_list:
            yield f"train.class_weights={weights}: expected auto, or a number >= 0 for each class"
        if weights is not None and data.balance:
            yield (
                f"data.balance={data.balance}: train.class_weights={weights} corrects for rare "
                "classes too; use one of the two"
            )
        if not is_own_class(self.loss) and self.task not in loss_tasks()[self.loss]:
            fitting = ", ".join(name for name, tasks in loss_tasks().items() if self.task in tasks)
            yield f"train.loss={self.loss}: not for train.task={self.task}; use {fitting}"
        metrics = {
            "checkpoint.metric": whole.checkpoint.metric,
            "optimized_metric": whole.objective,
        }
        for setting, metric in metrics.items():
            if metric.endswith("_ema") and whole.model.ema.decay is None:
                yield (
                    f"{setting}={metric}: needs averaged weights; set model.ema.decay, e.g. 0.9998"
                )
            name = metric.removeprefix("val/").removesuffix("_best").removesuffix("_ema")
            if metric.startswith("val/") and name not in metrics_of(self.task):
                known = ", ".join(f"val/{name}" for name in metrics_of(self.task))
                yield (
                    f"{setting}={metric}: not a metric of train.task={self.task}; use one of "
                    f"{known}"
                )
        if self.task == "multilabel":
            if data.augment.mixes:
                yield (
                    "data.augment.mixup and cutmix: mix images of one label each, but "
                    "train.task=multilabel; set both to 0"
                )
            if data.balance:
                yield (
                    f"data.balance={data.balance}: draws images by their one label, but "
                    "train.task=multilabel; set it to 0"
                )
            if data.name != "csv" and not is_own_class(data.name):
                yield (
                    f"train.task=multilabel: data={data.name} has one label per image; use data=csv"
                )

    def profile_problems(self, steps: int) -> Iterator[str]:
        """Yield an error if no steps are left to time after the profiled steps."""
        if self.untimed_steps is not None and steps <= self.untimed_steps:
            yield (
                f"train.profile_steps={self.profile_steps}: expected a run of "
                f"{self.untimed_steps + 1} steps or more (warm-up, recorded and timed ones), got "
                f"{steps}; raise train.max_steps or train.epochs"
            )


@dataclass
class CheckpointConfig:
    """Checkpoints: last.pt, best.pt and step_N.pt in `checkpoints/` of the run folder."""

    every_steps: int | None = number(
        None, ge=1, help="Steps between two saves; null: save after each epoch."
    )
    every_minutes: float | None = number(
        None, gt=0, help="Minutes between two saves, at the next logged step."
    )
    keep: int = number(1, ge=1, help="Number of step_N.pt files to keep.")
    top: int = number(
        1,
        ge=1,
        help="Number of best checkpoints to keep, by metric: best_step_N.pt; 1: best.pt only.",
    )
    metric: str = key(
        "val/acc", help="Metric of best.pt: val/<name in src/train/metrics.py>, or with _ema."
    )


@dataclass
class Config:
    """Keys of a run that are in no group."""

    task_name: str = key("train", help="Name of the task; its runs are in outputs/<task_name>/.")
    tags: list[str] = key([], help="Labels of your own, stored with the run.")
    seed: int = number(
        42, ge=0, le=2**63 - 1, help="Seed of weights, sample order, augmentation and dropout."
    )
    resume: str | None = key(
        None,
        help="Run folder; auto: newest unfinished run; auto_or_new: of task_name, or a new one.",
    )
    resume_strict: bool = key(
        True, help="false: a resume may change model, data, seed and optimizer."
    )
    optimized_metric: str | None = key(
        None, help="Metric that a search optimizes; null: the best checkpoint.metric."
    )
    print_config: bool | str = choice(
        True, True, False, "full", help="Print what differs from a plain run, all (full) or none."
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)

    @property
    def objective(self) -> str:
        """Metric that a search optimizes. Under checkpoint.metric=val/acc_ema, val/acc_best is of
        averaged weights.
        """
        return self.optimized_metric or f"{self.checkpoint.metric.removesuffix('_ema')}_best"


@dataclass
class ResolvedParallel(ParallelConfig):
    """ParallelConfig in which the numbers of devices and threads are integers, not `auto`."""

    devices: int = 1
    threads_per_device: int = 1


@dataclass
class ResolvedConfig(Config):
    """Config resolved for a machine by engine/config/resolve.py; the content of a run's
    config.yaml.
    """

    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)

    @property
    def global_batch(self) -> int:
        """Images per forward pass over all devices."""
        if self.data.batch_size is not None:
            return self.data.batch_size
        assert self.data.batch_size_per_device is not None
        return self.data.batch_size_per_device * self.parallel.devices

    @property
    def headline_metric(self) -> str:
        """Name of checkpoint.metric without split and `_ema`: the metric that the console and the
        report show first.
        """
        return self.checkpoint.metric.removeprefix("val/").removesuffix("_ema")

    @property
    def learning_rate(self) -> float:
        """optim.lr scaled by optim.lr_rule for the batch of an optimizer step: global batch x
        accumulate.

        linear: Goyal et al. 2017, arXiv:1706.02677; sqrt: Krizhevsky 2014, arXiv:1404.5997.
        """
        ratio = self.global_batch * self.train.accumulate / self.optim.lr_base_batch
        return (
            self.optim.lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.optim.lr_rule]
        )


def as_resolved(config: Config) -> ResolvedConfig:
    """Convert a Config without `auto` values to a ResolvedConfig. Raises ValueError if an `auto` is
    left.
    """
    parallel = ResolvedParallel(**vars(config.parallel))
    for name in ("devices", "threads_per_device"):
        if not isinstance(getattr(parallel, name), int):
            raise ValueError(f"parallel.{name}=auto: expected an integer in the config of a run")
    return ResolvedConfig(**{**vars(config), "parallel": parallel})


def known_metrics() -> dict[str, Metric]:
    """Return the metrics of src/train/metrics.py, of all tasks, by name."""
    from src.train.metrics import METRICS, MULTILABEL_METRICS

    return METRICS | MULTILABEL_METRICS


def loss_tasks() -> dict[str, tuple[str, ...]]:
    """Map the name of each loss in src/train/losses.py to the tasks that it supports."""
    from src.train.losses import LOSSES

    return {name: loss.tasks for name, loss in LOSSES.items()}


def is_timm_dataset(name: str) -> bool:
    """Return True for a dataset name of timm's factory: `torch/cifar10`, `hfds/<name>`, `wds/…`, or
    `tar`.
    """
    return name.partition("/")[0] in ("torch", "hfds", "wds", "tar")
