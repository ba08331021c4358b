"""Dataclasses that declare the config keys of this project. Each key has a type, a default, bounds
and a help text. Hydra merges the YAML files of `conf/` into the dataclass `Config`.

The library declares the keys of the launcher, of sweeps, searches and trackers
(timm_parallel/keys.py). train.py rejects an undeclared key on the command line and in YAML. Only a
free dictionary, such as `model.kwargs`, accepts any key, because the constructor of another package
reads it. `make schema` writes docs/keys.md and conf/schema.json from these dataclasses.

A rule about several keys is in the method `problems` of a dataclass. The method yields an error
message for each broken rule, with the key, its value and the fix. train.py stops with the first
message; a sweep skips the configuration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm_parallel
from timm_parallel import (
    ResolvedParallel,
    import_name,
    is_own_class,
    is_timm_dataset,
    key,
    option_problems,
    own_class_problems,
)

# Dictionary from the name of a built-in dataset to its class. A config gives your own dataset as
# `src.<module>.<Class>`.
DATASETS = {
    "digits": "src.data.datasets.Digits",
    "synthetic": "src.data.datasets.Synthetic",
    "shapes": "src.data.datasets.Shapes",
    "folder": "timm_parallel.data.folder.FolderDataset",
    "csv": "timm_parallel.data.csv_listing.CsvDataset",
    "segmentation": "timm_parallel.data.masks.MaskDataset",
}
# Dictionary from the name of a task to its class. A config gives your own task as
# `src.tasks.<module>.<Class>`.
TASKS = {
    "classification": "src.tasks.classification.Classification",
    "multilabel": "src.tasks.multilabel.Multilabel",
    "regression": "src.tasks.regression.Regression",
    "segmentation": "src.tasks.segmentation.Segmentation",
}
# Built-in datasets that are made in memory. All their images have one size, and they do not read
# data.root.
MADE_IN_MEMORY = ("digits", "synthetic", "shapes")
SCHEDULES = ("constant", "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt")
# Modes of torch.compile. They are also the values of timm's option --torchcompile-mode.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Arguments of timm's create_scheduler_v2 that the config does not accept, because other keys, such
# as train.epochs, determine them.
DERIVED_ARGUMENTS = ("num_epochs", "step_on_epochs", "updates_per_epoch")
# Dictionary from an argument of timm's create_scheduler_v2 to the schedules that read it. Every
# schedule reads the arguments that are not listed.
SCHEDULES_WITH = {
    **dict.fromkeys(("cycle_mul", "cycle_decay", "cycle_limit"), ("cosine", "tanh", "poly")),
    "k_decay": ("cosine", "poly"),
    **dict.fromkeys(("decay_fn", "stable_timescale"), ("wsd", "rsqrt")),
    **dict.fromkeys(("patience_epochs", "plateau_mode"), ()),
}
# Optimizers that work under fsdp, where each rank updates its shard of a parameter. They update
# each element independently, or need only norms of whole tensors.
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


@dataclass
class EmaConfig:
    """Averaged weights (exponential moving average). Evaluation logs their metrics as
    `val/<metric>_ema`, next to those of the raw weights.
    """

    decay: float | None = key(
        None,
        gt=0,
        le=1,
        help="Decay per step; null: no averaged weights; timm uses 0.9998. A loss is not averaged.",
    )
    warmup: bool = key(
        True, help="Use a smaller decay in the first steps, so that the average follows sooner."
    )


@dataclass
class ModelConfig(timm_parallel.ModelConfig):
    """The model. The data determines its head, channels and image size."""

    freeze: int | str | None = key(
        None,
        help="Freeze the backbone, the first N of timm's coarse groups, or names that match a "
        "regex; parameters of a loss are not frozen.",
    )
    num_classes: int | None = key(
        None, ge=1, help="Outputs of the model; null: as many as the data has classes."
    )
    in_chans: int | None = key(None, ge=1, help="Image channels; null: from the data.")
    channels_last: bool | str = key(
        "auto",
        choices=("auto", False, True),
        help="Store images and weights in channels-last memory format; auto: on GPUs, if "
        "convolutions hold most parameters.",
    )
    compile: bool | str = key(
        False,
        choices=(False, True, *COMPILE_MODES),
        help="Compile the model (not under dp and fsdp); true: with torch's default mode.",
    )
    grad_checkpointing: bool = key(
        False, help="Recompute activations in the backward pass, to save memory."
    )
    sync_bn: bool = key(False, help="Take BatchNorm statistics over all ranks.")
    ema: EmaConfig = field(default_factory=EmaConfig)

    def for_evaluation(self) -> None:
        self.sync_bn, self.compile = False, False

    def problems(self, whole: Config) -> Iterator[str]:
        if self.sync_bn and whole.parallel.accelerator in ("cpu", "mps"):
            yield "model.sync_bn=true: torch's SyncBatchNorm requires CUDA; leave it at false"
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
        # Do not check the file if Slurm starts the run, because the file may exist only on the
        # nodes of the cluster.
        here = whole.cluster.scheduler == "local"
        if self.weights is not None and here and not Path(self.weights).is_file():
            yield f"model.weights={self.weights}: no such file"
        yield from super().problems(whole)
        if self.sync_bn and not whole.parallel.has_ranks:
            yield (
                "model.sync_bn=true: an option of ddp and fsdp, but "
                f"parallel={whole.parallel.strategy}"
            )
        chosen = f"model.compile={str(self.compile).lower()}"
        if self.compile and not whole.parallel.traits.compiles:
            yield (
                f"{chosen}: expected ddp or single, but parallel={whole.parallel.strategy}; "
                "leave it at false"
            )
        bucket = whole.parallel.bucket_cap_mb
        if self.compile and bucket is not None and bucket < 1:
            yield (
                f"parallel.bucket_cap_mb={bucket}: expected >= 1 with {chosen}, because the "
                "compiler splits the graph at each bucket"
            )


@dataclass
class AugmentConfig:
    """Augmentation of training images, with timm's names and meanings. null or 0 turns an
    augmentation off.
    """

    scale: list[float] | None = key(
        None, help="Area range of the random resized crop; null: resize and center crop."
    )
    ratio: list[float] | None = key(
        None, help="Aspect range of the random resized crop; null: 3/4 to 4/3."
    )
    train_crop_mode: str | None = key(
        None, choices=("rrc", "rkrc", "rkrr"), help="timm's crops; null: rrc if scale is set."
    )
    interpolation: str = key(
        "bilinear",
        choices=("bilinear", "bicubic", "random"),
        help="Interpolation of training images, also in aa.",
    )
    crop_padding: int = key(
        0, ge=0, help="Pixels of black around an image before a random crop of its size."
    )
    hflip: float = key(0.0, ge=0, le=1, help="Probability of a horizontal flip.")
    vflip: float = key(0.0, ge=0, le=1, help="Probability of a vertical flip.")
    color_jitter: float | None = key(
        None, ge=0, help="Strength of random brightness, contrast and saturation."
    )
    color_jitter_prob: float | None = key(
        None, ge=0, le=1, help="Probability of color jitter; null: always."
    )
    grayscale_prob: float = key(0.0, ge=0, le=1, help="Probability of a conversion to gray.")
    gaussian_blur_prob: float = key(0.0, ge=0, le=1, help="Probability of a Gaussian blur.")
    aa: str | None = key(
        None,
        syntax="auto_augment",
        help="timm's RandAugment, AugMix or AutoAugment string, e.g. rand-m9-mstd0.5-inc1.",
    )
    reprob: float = key(0.0, ge=0, le=1, help="Probability of random erasing, after normalization.")
    remode: str = key(
        "pixel",
        choices=("const", "rand", "pixel"),
        help="Erase with the mean, one color, or noise.",
    )
    recount: int = key(1, ge=1, help="Largest number of erased boxes in an image.")
    mixup: float = key(0.0, ge=0, help="Mixup alpha.")
    cutmix: float = key(0.0, ge=0, help="Cutmix alpha.")
    cutmix_minmax: list[float] | None = key(
        None, help="Range of the box's sides as shares; set it instead of cutmix."
    )
    mixup_prob: float = key(1.0, ge=0, le=1, help="Probability of mixup or cutmix.")
    mixup_switch_prob: float = key(
        0.5, ge=0, le=1, help="Probability of cutmix, not mixup, if both are set."
    )
    mixup_mode: str = key(
        "batch",
        choices=("batch", "pair", "elem"),
        help="Draw for each batch, pair of images, or image.",
    )
    mixup_off_epoch: int = key(0, ge=0, help="First epoch without mixup and cutmix; 0: none.")
    aug_repeats: int = key(
        1,
        ge=1,
        help="Augmented copies of an image in a batch; under ddp on different ranks, as in timm.",
    )

    @property
    def mixes(self) -> bool:
        """True if the config turns mixup or cutmix on."""
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
        # timm's other modes of cropping also enlarge an image.
        if self.scale and self.scale[-1] > 1 and self.train_crop_mode in (None, "rrc"):
            yield (
                f"data.augment.scale={self.scale}: expected shares of the image's area up to 1, "
                "e.g. [0.35,1.0]"
            )
        # Crops of such a shape do not fit into an image, so torchvision would crop no area.
        if self.ratio and self.ratio[-1] > 20:
            yield (
                f"data.augment.ratio={self.ratio}: expected widths divided by heights, up to 20, "
                "e.g. [0.75,1.33]"
            )
        if self.crop_padding and is_cropped:
            other = "train_crop_mode" if self.scale is None else "scale"
            yield (
                f"data.augment.crop_padding={self.crop_padding}: conflicts with "
                f"data.augment.{other}; set one of them"
            )
        if self.color_jitter and self.aa is not None and "3a" not in self.aa:
            yield (
                f"data.augment.color_jitter={self.color_jitter}: timm ignores it with "
                f"data.augment.aa={self.aa}; set one of them"
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
class DataConfig(timm_parallel.DataConfig):
    """The dataset, its batches and its preprocessing."""

    image_size: Any = key(
        None,
        help="Pixels per side, or [height, width]; null: the data's size, else the model's.",
    )
    eval_image_size: Any = key(
        None, help="Pixels per side, or [height, width], in evaluation; null: image_size."
    )
    mean: list[float] | None = key(
        None,
        ge=0,
        le=1,
        help="Mean per channel of images in 0..1; null: the data's, else the model's.",
    )
    std: list[float] | None = key(
        None, gt=0, le=1, help="Standard deviation per channel of images in 0..1; see mean."
    )
    crop_pct: float | None = key(
        None,
        gt=0,
        le=1,
        help="Side of the crop / side of the image; null: the model's, or 1 if crop_mode is squash "
        "or border.",
    )
    crop_mode: str | None = key(
        None,
        choices=("center", "squash", "border"),
        help="center: crop to the shape; squash: resize both sides to it; border: pad to it; in "
        "training too without augment.scale. null: the model's, center in training.",
    )
    interpolation: str | None = key(
        None,
        choices=("bilinear", "bicubic"),
        help="Interpolation of evaluation images; null: the model's.",
    )
    workers: int | str = key(
        "auto", ge=0, help="Loader processes per rank; auto: cores / ranks; mostly 0 in memory."
    )
    on_error: str = key(
        "raise",
        choices=("raise", "skip"),
        help="An unreadable image ends the run (raise), or is left out.",
    )
    balance: float = key(
        0.0, ge=0, le=1, help="1: draw all classes equally often, with replacement; 0: as they are."
    )
    replay_batches: int | None = key(
        None, ge=1, help="Train on so many batches again and again; see debug=headspace."
    )
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    @property
    def keeps_whole_images(self) -> bool:
        """True if data.crop_mode asks for images without a crop."""
        return self.crop_mode in ("squash", "border")

    @property
    def pairs_images(self) -> bool:
        return self.augment.mixes

    def problems(self, whole: Config) -> Iterator[str]:
        for name in ("image_size", "eval_image_size"):
            if not is_size(getattr(self, name)):
                yield (
                    f"data.{name}={getattr(self, name)}: expected a number of pixels, or [height, "
                    "width]"
                )
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
        if self.root is not None and self.name in MADE_IN_MEMORY:
            yield (
                f"data.root={self.root}: data.name={self.name} reads no folder; give data=folder "
                "too, or data.root=null"
            )
        if self.balance and self.augment.aug_repeats > 1:
            yield (
                f"data.balance={self.balance}: already draws images repeatedly; set "
                "data.augment.aug_repeats=1"
            )
        if (self.mean is None) != (self.std is None):
            yield "data.mean and data.std: set both or neither"

    def _split_problems(self) -> Iterator[str]:
        """Yield an error message for each key about splits or files that the dataset does not read.
        A dataset of your own may read all of these keys.
        """
        readers = {
            "val_fraction": ("folder", "csv", "segmentation"),
            "test_fraction": ("folder", "csv", "segmentation"),
            "group_pattern": ("folder", "segmentation"),
            "fold": ("csv",),
            "max_value": ("folder", "csv", "segmentation", "timm"),
        }
        # data=timm has several names of datasets.
        option = "timm" if is_timm_dataset(self.name) else self.name
        for name, datasets in readers.items():
            if getattr(self, name) is not None and not (
                option in datasets or is_own_class(self.name)
            ):
                yield (
                    f"data.{name}={getattr(self, name)}: only data={' and data='.join(datasets)} "
                    f"read it, not data={self.name}"
                )
        if self.fold is not None and self.test_fraction is not None:
            yield (
                f"data.test_fraction={self.test_fraction}: conflicts with data.fold={self.fold}; "
                "mark the test images by split=test in the CSV"
            )
        for name in ("test_fraction", "group_pattern"):
            if getattr(self, name) is not None and self.val_fraction is None:
                yield f"data.{name}={getattr(self, name)}: set data.val_fraction too"
        if (self.val_fraction or 0) + (self.test_fraction or 0) >= 1:
            yield (
                f"data.val_fraction={self.val_fraction}: the sum with data.test_fraction must be "
                "below 1"
            )
        if self.fold is not None and self.val_fraction is not None:
            yield (
                f"data.fold={self.fold}: data.val_fraction={self.val_fraction} already chooses the "
                "val split; set one of them"
            )
        if self.group_pattern is not None and not is_regular_expression(self.group_pattern):
            example = "'data.group_pattern=\"(patient_[0-9]+)\"'"
            yield (
                f"data.group_pattern={self.group_pattern}: not a regular expression; e.g. {example}"
            )


@dataclass
class OptimConfig(timm_parallel.OptimConfig):
    """Optimizer and learning-rate schedule, with the names of timm."""

    weight_decay: float = key(0.05, ge=0, help="Weight decay; norms and biases have none.")
    momentum: float = key(0.9, ge=0, le=1, help="Momentum, for optimizers that have it.")
    layer_decay: float | None = key(
        None,
        gt=0,
        le=1,
        help="Factor of the learning rate per layer below the head; parameters of a loss have "
        "none.",
    )
    head_lr_scale: float = key(
        1.0, gt=0, help="Factor of the learning rate of the head, and of the parameters of a loss."
    )
    clip_grad: float | None = key(
        None, gt=0, help="Largest gradient norm, or the limit of clip_mode."
    )
    clip_mode: str = key(
        "norm",
        choices=("norm", "value", "agc"),
        help="Clip the norm, each entry, or each unit adaptively.",
    )
    of: dict[str, Any] = key(
        {}, help="Other values in a phase of the task, e.g. {discriminator: {lr: 0.0004}}."
    )
    kwargs: dict[str, Any] = key(
        {}, help="More arguments of the optimizer, e.g. {betas: [0.9, 0.95]}."
    )
    lr_rule: str = key(
        "none",
        choices=("none", "linear", "sqrt"),
        help="Scale lr with (batch per update) / lr_base_batch.",
    )
    lr_base_batch: int = key(256, ge=1, help="Batch for which lr is meant, if lr_rule is not none.")
    sched: str = key(
        "cosine",
        help="timm's schedule by step; constant holds lr after the warm-up; or your own class.",
    )
    sched_kwargs: dict[str, Any] = key(
        {}, help="More arguments of timm's create_scheduler_v2, e.g. {cycle_limit: 2}."
    )
    warmup_epochs: float = key(0.5, ge=0, help="Epochs of linear warm-up.")
    warmup_lr: float = key(1e-5, ge=0, help="Learning rate at the start of the warm-up.")
    warmup_prefix: bool = key(
        True, help="Start the decay after the warm-up; false: at epoch 0, as timm's train.py does."
    )
    min_lr: float = key(0.0, ge=0, help="Learning rate at the end of the decay.")
    cooldown_epochs: float = key(0.0, ge=0, help="Epochs at the end with the last learning rate.")
    decay_epochs: float | None = key(
        None, gt=0, help="Epochs between drops (step), or of the decay (wsd, rsqrt)."
    )
    decay_milestones: list[float] | None = key(None, help="Epochs of the drops (multistep).")
    decay_rate: float = key(
        0.1, gt=0, help="Factor of a drop (step, multistep); power of poly (1: straight line)."
    )

    def of_phase(self, phase: str) -> OptimConfig:
        """Return the keys of a phase: these ones, changed by optim.of.<phase>."""
        return dataclasses.replace(self, of={}, **self.of.get(phase, {}))

    def problems(self, whole: Config) -> Iterator[str]:
        """Yield an error message for each key of optim that has no effect, or that contradicts
        optim.sched or train.epochs.
        """
        for phase, changed in self.of.items():
            if isinstance(changed, dict):
                yield from option_problems(f"optim.of.{phase}", OptimConfig, changed)
            else:
                yield (
                    f"optim.of.{phase}={changed}: expected the keys of a phase, e.g. "
                    "optim.of.<phase>.lr=0.0004"
                )
        if is_own_class(self.sched):
            yield from own_class_problems("optim.sched", self.sched)
        elif self.sched not in SCHEDULES:
            yield (
                f"optim.sched={self.sched}: allowed: {', '.join(SCHEDULES)}, or "
                "src.<module>.<Class> of your own"
            )
        epochs = whole.train.epochs
        if self.clip_mode != "norm" and self.clip_grad is None:
            yield f"optim.clip_mode={self.clip_mode}: has no effect without optim.clip_grad"
        if whole.parallel.traits.shards:
            yield from self._shard_problems(whole.parallel.strategy)
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
                f"optim.warmup_epochs={self.warmup_epochs}: the sum with optim.cooldown_epochs "
                f"must be below train.epochs={epochs}"
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

    def _shard_problems(self, strategy: str) -> Iterator[str]:
        """Yield an error message for each key of optim that needs whole tensors. A strategy that
        shards the model, such as fsdp, gives each rank a part of each tensor.
        """
        # A class of your own declares by this attribute that it can update a shard of a tensor.
        works_on_parts = self.opt in OPTIMIZERS_OF_PARTS or (
            is_own_class(self.opt) and getattr(import_name(self.opt), "works_on_parts", False)
        )
        if not works_on_parts:
            fix = f"use one of {', '.join(OPTIMIZERS_OF_PARTS)}"
            if is_own_class(self.opt):
                fix = f"set works_on_parts = True in it if it updates each number alone, or {fix}"
            yield f"optim.opt={self.opt}: needs whole tensors, but parallel={strategy}; {fix}"
        if self.clip_mode == "agc":
            yield (
                f"optim.clip_mode=agc: needs whole tensors, but parallel={strategy}; use norm or "
                "value"
            )
        if self.kwargs.get("fused") and self.opt not in ("adam", "adamw"):
            yield (
                f"optim.kwargs.fused=true: under {strategy}, torch supports it only for adam and "
                f"adamw, but optim.opt={self.opt}; leave it out"
            )


@dataclass
class TrainConfig(timm_parallel.TrainConfig):
    """Keys of the training loop."""

    task: str = key(
        "classification",
        help="What is learned: a name in src/tasks/, or `src.tasks.<module>.<Class>` of your own.",
    )
    loss: str = key("ce", help="A loss of the task by name, or `src.<module>.<Class>`.")
    loss_kwargs: dict[str, Any] = key({}, help="More arguments of the loss, e.g. {gamma: 2}.")
    class_weights: Any = key(
        None,
        help="Weights of the classes in the loss, scaled to mean 1: auto (by frequency) or a list.",
    )
    smoothing: float = key(0.0, ge=0, le=1, help="Label smoothing, in training only.")
    bce_target_thresh: float | None = key(
        None, ge=0, le=1, help="bce: a mixed target above this becomes 1, else 0."
    )

    def problems(self, whole: Config) -> Iterator[str]:
        yield from super().problems(whole)
        if self.early_stop is not None and not (self.evaluate_every or self.evaluate_every_steps):
            yield (
                f"train.early_stop={self.early_stop}: needs evaluations; set "
                "train.evaluate_every above 0"
            )
        if self.bce_target_thresh is not None and self.loss != "bce":
            yield (
                f"train.bce_target_thresh={self.bce_target_thresh}: has no effect with "
                f"train.loss={self.loss}; use train.loss=bce"
            )
        if is_own_class(self.loss):
            yield from own_class_problems("train.loss", self.loss)


@dataclass
class ResolvedTrain(TrainConfig, timm_parallel.ResolvedTrain):
    """Keys of the group train after `auto` is replaced by numbers."""

    accumulate: int = 1


@dataclass
class Config(timm_parallel.Config):
    """Config of a run: its groups of keys, and the keys that are in no group."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class ResolvedConfig(Config, timm_parallel.ResolvedConfig):
    """Config of a run after `auto` is replaced by values for this machine. A run writes it to
    config.yaml.
    """

    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)
    train: ResolvedTrain = field(default_factory=ResolvedTrain)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate: optim.lr, scaled by optim.lr_rule for the images of an optimizer step
        (global batch x train.accumulate).

        The rule linear is that of Goyal et al. 2017 (arXiv:1706.02677), sqrt that of Krizhevsky
        2014 (arXiv:1404.5997).
        """
        return self.rate_of(self.optim)

    def rate_of(self, optim: OptimConfig) -> float:
        """Peak learning rate of a phase, as `learning_rate`. `optim`: the keys of the phase."""
        ratio = self.global_batch * self.train.accumulate / optim.lr_base_batch
        return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[optim.lr_rule]

    @property
    def learning_rate_text(self) -> str:
        rate, rule = f"{self.learning_rate:g}", self.optim.lr_rule
        if rule != "none":
            batch = self.global_batch * self.train.accumulate
            rate += f" = {self.optim.lr:g} x {rule} rule to batch {batch}"
        return f"{rate}, {self.optim.sched}"


def is_regular_expression(text: str) -> bool:
    """Return True if a text is a valid regular expression of Python."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def is_size(sides: Any) -> bool:
    """Return True if a value is valid for data.image_size: a number of pixels, [height, width], or
    null.
    """
    pair = sides if isinstance(sides, list) else [sides, sides]
    return sides is None or (
        len(pair) == 2 and all(type(side) is int and side >= 1 for side in pair)
    )
