"""Dataclasses of the config, and the function `key` that declares one config key.

The groups cluster, sweep, search, tracker and paths are complete here. Of the other groups, this
file declares the keys that the library reads. A project extends them with its own keys and
builds the whole schema.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from timm_parallel.machine.imports import import_name
from timm_parallel.machine.text import yaml_text


@dataclass(frozen=True)
class StrategyTraits:
    """Abilities of a strategy, which train.py must know before it imports torch."""

    # True: one process per device. False: one process that drives all devices.
    process_per_device: bool = False
    # True if the strategy uses one device, even if the machine has more.
    has_one_device: bool = False
    # True if each rank holds a part of every parameter as a DTensor.
    shards: bool = False
    # True if the strategy works with model.compile.
    compiles: bool = True


# Built-in strategies: name in a config -> dotted name of the class, whose attribute `traits` is the
# entry of TRAITS. A config names a strategy of the project as `src.parallel.<module>.<Class>`.
STRATEGIES = {
    "single": "timm_parallel.parallel.strategy.Single",
    "dp": "timm_parallel.parallel.data_parallel.DataParallelStrategy",
    "ddp": "timm_parallel.parallel.distributed.Distributed",
    "fsdp": "timm_parallel.parallel.fully_sharded.FullySharded",
}
TRAITS = {
    "single": StrategyTraits(has_one_device=True),
    "dp": StrategyTraits(compiles=False),
    "ddp": StrategyTraits(process_per_device=True),
    "fsdp": StrategyTraits(process_per_device=True, shards=True, compiles=False),
}
# Class that reads datasets of timm by names such as torch/cifar10.
TIMM_DATASETS = "timm_parallel.data.timm_datasets.TimmImages"
# Built-in trackers -> class. The name is that of the tracker's Python package and of its file in
# timm_parallel/trackers/.
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "Wandb", "mlflow": "Mlflow"}
# Keys whose value is a path. A run saves it as an absolute path, because later commands may start
# in another folder.
PATHS = ("data.root", "model.weights")
# Number of first steps that are not timed.
WARM_UP_STEPS = 10
Bound = float | None


def key(
    default: Any,
    *,
    help: str,
    only: str = "",
    choices: Sequence[Any] | None = None,
    ge: Bound = None,
    gt: Bound = None,
    le: Bound = None,
    syntax: str = "",
) -> Any:
    """Declare a config key, as a field of a config dataclass, with its default and, for a number,
    the bounds `ge`, `gt` and `le`.

    `help`: one sentence for docs/keys.md. `only`: the strategy, tracker or scheduler that reads the
    key; empty if all do. `choices`: the allowed values. `ge`, `gt`, `le`: the bounds >=, > and <=.
    A key with bounds also accepts `auto` if its type allows text. `syntax`: `auto_augment` for a
    text that timm must be able to parse.
    """
    metadata = {
        "help": help,
        "only": only,
        "choices": choices,
        "syntax": syntax,
        "ge": ge,
        "gt": gt,
        "le": le,
    }
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, dataclass field) for each key of a config dataclass, nested groups
    included.
    """
    for entry in dataclasses.fields(tree):
        value = getattr(tree, entry.name)
        key = f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, entry


def plain_values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each single value in nested dicts and lists. Items of a list
    have the key of the list.
    """
    if isinstance(node, dict):
        for name, value in node.items():
            yield from plain_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from plain_values(value, key)
    else:
        yield key, node


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Return True if a dotted key is one of the given keys, or is in one of the given sections."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def is_own_class(name: str) -> bool:
    """Return True if `name` has the form `src.<module>.<Class>`, which names a class of the
    project. train.py rejects such a name if the class is not in the package of the project.
    """
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2,}", name) is not None


def is_timm_dataset(name: str) -> bool:
    """Return True if a dataset name belongs to timm's dataset factory: `torch/cifar10` or
    `hfds/<name>`.
    """
    return name.partition("/")[0] in ("torch", "hfds")


@dataclass
class ClusterConfig:
    """Job scheduler of a run, and the resources to request for each node. null leaves a resource to
    the scheduler's default.
    """

    scheduler: str = key(
        "local", choices=("local", "slurm", "kubernetes"), help="Job scheduler; local: none."
    )
    nodes: int = key(1, ge=1, help="Number of nodes.")
    gpus: int | None = key(None, ge=0, help="GPUs per node; null: a run on CPU.")
    cpus: int | None = key(None, ge=1, help="CPU cores per node.")
    memory: str | None = key(None, help="Memory per node, e.g. 64G.")
    time: str | None = key(
        None, help="Time limit, hh:mm:ss or d-hh:mm:ss, after which the scheduler stops the job."
    )
    submit: bool = key(True, only="slurm", help="false: write the job's file and do not submit it.")
    wait: bool = key(
        False, only="slurm", help="Wait until the job has ended, and exit with its code."
    )
    partition: str | None = key(None, only="slurm", help="Partition of the job.")
    account: str | None = key(None, only="slurm", help="Account of the job.")
    gres: str | None = key(
        None, only="slurm", help="Generic resources instead of gpus, e.g. gpu:a100:4."
    )
    signal_seconds: int = key(
        90, ge=10, only="slurm", help="Seconds before cluster.time to save and requeue."
    )
    image: str | None = key(None, only="kubernetes", help="Container image.")
    namespace: str | None = key(None, only="kubernetes", help="Namespace of the job.")
    claim: str | None = key(
        None,
        only="kubernetes",
        help="Volume claim for the run folder, which all nodes can mount.",
    )


@dataclass
class SweepConfig:
    """Settings of a sweep. They are read with --multirun only."""

    repeats: int | str = key(
        "auto",
        ge=1,
        help="Blocks that run every point once, with new seeds; auto: in a verdict, and in a sweep "
        "over settings with a baseline, as many as it needs; else 1.",
    )
    max_repeats: int = key(12, ge=4, le=1000, help="Most repeats with repeats=auto.")
    smallest: float | None = key(
        None,
        gt=0,
        help="Largest difference of equal versions or settings, with repeats=auto, in points of a "
        "proportion, else in percent; null: it does not decide if they are equal.",
    )
    smallest_difference: float = key(
        0.03, gt=0, le=1, help="Smallest relative difference that matters, see docs/results.md."
    )
    baseline: str | None = key(
        None, help="Settings that the report compares with, as optim.lr=1e-3; null: the first."
    )
    resume: str | None = key(None, help="A sweep folder: run its missing and failed jobs.")
    dry_run: bool = key(False, help="Print the jobs with their derived values, and exit.")
    jobs: int | str = key(
        1, ge=1, help="Concurrent jobs, each on other devices or cores; auto: as many as fit."
    )
    timed: bool = key(False, help="The sweep compares speed, so its jobs run one at a time.")
    tune: list[str] = key(
        [], help="Settings to try for speed, each as overrides; see experiment=tune."
    )

    @property
    def num_repeats(self) -> int:
        """Number of repeats of a sweep, which cannot stop by itself."""
        return 1 if self.repeats == "auto" else int(self.repeats)


@dataclass
class SearchConfig:
    """Settings of a hyper-parameter search with Optuna. They are read with --multirun only, and
    have the names of Hydra's Optuna sweeper.
    """

    sampler: str | None = key(
        None, choices=("tpe", "random"), help="Sampler of the trials; null: no search."
    )
    n_trials: int = key(20, ge=1, help="Trials in total, those before a resume included.")
    n_jobs: int | str = key(1, ge=1, help="Concurrent trials, as sweep.jobs.")
    direction: str | None = key(
        None, choices=("maximize", "minimize"), help="Direction of optimized_metric; null: its own."
    )
    storage: str | None = key(
        None, help="Database URL; null: study.db in the sweep folder; passwords: ${oc.env:…}."
    )
    study_name: str | None = key(
        None, help="Name of the study; null: task_name and the name of the sweep folder."
    )
    params: dict[str, Any] = key(
        {},
        help="Key: interval(a,b), tag(log,interval(a,b)), choice(a,b), range(a,b) or a,b.",
    )
    max_failure_rate: float = key(
        0.5, ge=0, le=1, help="Share of n_trials; more failed trials end the search."
    )
    seed: int | None = key(None, ge=0, help="Seed of the sampler; null: the key seed.")
    pruner: str = key(
        "median",
        choices=("median", "none"),
        help="median stops a trial that is worse than the median of the others at the same "
        "evaluation.",
    )
    n_startup_trials: int = key(5, ge=0, help="Finished trials before the pruner stops any.")
    n_warmup_steps: int = key(0, ge=0, help="Evaluations of a trial before the pruner may stop it.")


@dataclass
class TrackerConfig:
    """Trackers, which store numbers and images of a run for display. Choose one by tracker=<name>,
    or several by tracker=[<name>,<name>].
    """

    use: dict[str, Any] | None = key(
        None, help="Name: true, or `src.<module>.<Class>`; null: tensorboard alone."
    )
    project: str | None = key(None, help="Project of wandb, experiment of mlflow; null: task_name.")
    entity: str | None = key(None, only="wandb", help="User or team; null: your default one.")
    mode: str | None = key(
        None,
        choices=("online", "offline"),
        only="wandb",
        help="null: the variable WANDB_MODE, or online.",
    )
    uri: str | None = key(
        None, only="mlflow", help="Server; null: MLFLOW_TRACKING_URI, or <output_dir>/mlflow.db."
    )

    def classes(self) -> dict[str, str]:
        """Return a dictionary from the name of each chosen tracker to the dotted name of its
        class.
        """
        use = {"tensorboard": True} if self.use is None else self.use
        return {
            name: f"timm_parallel.trackers.{name}.{TRACKERS.get(name)}"
            if value is True
            else str(value)
            for name, value in use.items()
        }

    def problems(self, whole: object) -> Iterator[str]:
        for key, value, entry in leaves(self, "tracker."):
            tracker = entry.metadata.get("only")
            if value is not None and tracker and tracker not in self.classes():
                yield f"{key}={value}: has no effect without tracker={tracker}"


@dataclass
class PathsConfig:
    """Folder in which runs and sweeps are stored."""

    output_dir: str = key("outputs", help="Folder for runs and sweeps.")


@dataclass
class ModelConfig:
    """Config keys of the model that the library reads. A project adds its own."""

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
    kwargs: dict[str, Any] = key(
        {}, help="More arguments of `timm.create_model`, or of your class."
    )

    def problems(self, whole: Any) -> Iterator[str]:
        """Yield an error message for each model key that does not fit the other keys of the
        config.
        """
        if not (self.pretrained and is_own_class(self.name)):
            return
        if not getattr(import_name(self.name), "has_pretrained", False):
            yield (
                f"model.pretrained=true: timm has no weights for {self.name}; give a file: "
                "model.weights=<file>"
            )

    def for_evaluation(self) -> None:
        """Reset the model keys that only training uses. Called on the config of an evaluation. This
        base class resets nothing, because it has no such key.
        """


@dataclass
class DataConfig:
    """Config keys of the data that the library reads. A project adds its own."""

    name: str = key(
        "digits",
        help="digits, folder, csv, segmentation, shapes, synthetic, a timm dataset, or "
        "`src.<module>.<Class>` of your own.",
    )
    root: str | None = key(
        None, help="Folder (or CSV file) to read; digits and synthetic refuse it."
    )
    val_fraction: float | None = key(
        None, gt=0, le=1, help="Share of images for val, by a hash of path or group."
    )
    test_fraction: float | None = key(
        None, gt=0, le=1, help="Share of images for test, with val_fraction."
    )
    group_pattern: str | None = key(
        None, help="folder: regex; images whose paths match the same text share a split."
    )
    fold: int | None = key(None, ge=0, help="csv: the fold that is val.")
    batch_size: int | None = key(
        64, ge=1, help="Global batch: images per forward pass over all devices."
    )
    batch_size_per_device: int | None = key(
        None, ge=1, help="Set instead of batch_size, e.g. for weak scaling."
    )
    limit_train: int | None = key(
        None, ge=1, help="Train on so many images, of a fixed permutation."
    )
    max_value: float | None = key(
        None,
        gt=0,
        help="White in images of more than 8 bits, such as 4095; null: 65535; floats: 1 or 255.",
    )
    kwargs: dict[str, Any] = key({}, help="More arguments of the dataset's class.")

    @property
    def pairs_images(self) -> bool:
        """True if mixup or cutmix mixes pairs of images, so that each rank needs an even batch."""
        return False


@dataclass
class ParallelConfig:
    """Devices of a run, and the strategy that distributes the training over them. null leaves an
    option at torch's default.
    """

    strategy: str = key(
        "auto", help="auto, single, dp, ddp, fsdp, or `src.parallel.<module>.<Class>` of your own."
    )
    options: dict[str, Any] = key(
        {}, help="For a strategy class of your own: what it reads of `config.options`."
    )
    devices: int | str = key(
        "auto", ge=1, help="Number; auto: CUDA devices that divide the batch, else 1 or 2."
    )
    accelerator: str = key(
        "auto",
        choices=("auto", "cpu", "cuda", "mps"),
        help="Kind of device; auto: cuda, mps, else cpu.",
    )
    threads_per_device: int | str = key(
        "auto", ge=1, help="CPU threads per rank or replica; auto: cores / devices."
    )
    backend: str = key(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="Backend of ranks; auto: nccl on CUDA, else gloo.",
    )
    start_timeout: int = key(
        300, ge=1, help="Seconds without progress before a rank's first step that end the run."
    )
    timeout: int = key(
        120, ge=1, help="Seconds without progress between later steps, after which the run ends."
    )
    max_restarts: int = key(
        0, ge=0, help="How often ddp or fsdp restarts all ranks after one has failed."
    )
    device_ids: list[int] | None = key(
        None, help="CUDA devices by number (not of single); null: the first ones."
    )
    output_device: int | None = key(
        None, ge=0, help="CUDA device of the outputs (dp, ddp); null: the first one."
    )
    dim: int | None = key(
        None, ge=0, only="dp", help="Dimension along which DataParallel splits a batch."
    )
    bucket_cap_mb: float | None = key(
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
    static_graph: bool | None = key(
        None, only="ddp", help="Promise DDP that the graph is the same in every step."
    )
    dist_bn: str | None = key(
        None,
        choices=("broadcast", "reduce"),
        only="ddp",
        help="Evaluate BatchNorm with rank 0's statistics (also null) or with the mean over the "
        "ranks.",
    )
    reshard_after_forward: bool | None = key(
        None, only="fsdp", help="false: gather weights once a batch, not twice."
    )

    @property
    def traits(self) -> StrategyTraits:
        """Abilities of the strategy. A class of the project is imported. Strategy `auto` has the
        defaults, and must be resolved first.
        """
        if is_own_class(self.strategy):
            # A class that is no Strategy has no traits. The ranks reject it.
            traits: StrategyTraits = getattr(import_name(self.strategy), "traits", StrategyTraits())
            return traits
        return TRAITS.get(self.strategy, StrategyTraits())

    @property
    def has_ranks(self) -> bool:
        """True if the strategy has one process (rank) per device."""
        return self.traits.process_per_device

    @property
    def has_one_process(self) -> bool:
        """True if one process drives all devices of the strategy. Such a strategy has no process
        group and cannot span nodes.
        """
        return self.strategy != "auto" and not self.has_ranks

    def choose_strategy(self, several: bool) -> None:
        """Replace strategy `auto` by ddp if the run has `several` devices, otherwise by single.
        Keep any other strategy.
        """
        if self.strategy == "auto":
            self.strategy = "ddp" if several else "single"

    def problems(self, whole: Config) -> Iterator[str]:
        strategy = self.strategy
        if self.traits.has_one_device and self.devices not in ("auto", 1):
            yield (
                f"parallel.devices={self.devices}: {strategy} uses one device; choose "
                "parallel=ddp or parallel=dp"
            )
        for name, owner in strategy_options().items():
            if getattr(self, name) is not None and strategy != owner:
                yield (
                    f"parallel.{name}={yaml_text(getattr(self, name))}: an option of {owner}, but "
                    f"parallel={strategy}"
                )
        for name in ("device_ids", "output_device"):
            has_none = strategy == "auto" or self.traits.has_one_device
            has_none |= name == "output_device" and self.traits.shards
            if getattr(self, name) is not None and has_none:
                yield (
                    f"parallel.{name}={getattr(self, name)}: an option of dp and ddp, but "
                    f"parallel={strategy}"
                )
        if self.options and not is_own_class(strategy):
            yield (
                f"parallel.options={self.options}: an option of your own strategy classes, but "
                f"parallel={strategy}"
            )
        if self.max_restarts and not self.has_ranks:
            yield (
                f"parallel.max_restarts={self.max_restarts}: an option of ddp and fsdp, but "
                f"parallel={strategy}"
            )
        if self.broadcast_buffers and self.dist_bn == "reduce":
            yield (
                "parallel.broadcast_buffers=true: sends rank 0's BatchNorm statistics to all ranks "
                "in each step, so parallel.dist_bn=reduce has nothing to average; use null"
            )


def strategy_options() -> dict[str, str]:
    """Find the `parallel` keys that only one strategy reads. Return a dictionary from key to name
    of the strategy.
    """
    return {
        entry.name: entry.metadata["only"]
        for entry in dataclasses.fields(ParallelConfig)
        if entry.metadata.get("only")
    }


@dataclass
class OptimConfig:
    """Config keys of the optimizer that the library reads. A project adds its own."""

    opt: str = key("adamw", help="Any timm optimizer, or `src.<module>.<Class>` of your own.")
    lr: float = key(1e-3, gt=0, help="Peak learning rate, before lr_rule.")


@dataclass
class TrainConfig:
    """Config keys of the training loop that the library reads. A project adds its own."""

    epochs: int = key(8, ge=1, help="Epochs to train; the schedule has this length.")
    max_steps: int | None = key(
        None, ge=1, help="Optimizer steps after which training ends, if epochs is longer."
    )
    max_minutes: float | None = key(
        None,
        gt=0,
        help="Minutes of training steps, of all segments, after which training ends at a logged "
        "step; evaluations do not count, and the schedule keeps the length of epochs.",
    )
    log_every: int = key(10, ge=1, help="Steps between two logged lines.")
    task: str = key("", help="What is learned: a task by name, or a class of your own.")
    task_kwargs: dict[str, Any] = key({}, help="Options of the task, see its class.")
    loop: str | None = key(
        None, help="A training loop of your own, `src.<module>.<function>`; null: that of run.py."
    )
    precision: str = key(
        "auto",
        choices=("auto", "fp32", "tf32", "bf16", "fp16"),
        help="Number format; bf16, fp16: autocast; auto: bf16 on GPUs that compute it, else fp32.",
    )
    deterministic: bool = key(
        False, help="Use only torch's deterministic algorithms, for equal bits on a GPU; slower."
    )
    accumulate: int | str = key(
        1, ge=1, help="Batches per optimizer step; auto: divide the batch until it fits in memory."
    )
    evaluate_every: int = key(1, ge=0, help="Epochs between two evaluations; 0: only at the end.")
    evaluate_every_steps: int | None = key(
        None, ge=1, help="Steps between two evaluations within an epoch, each saved; null: none."
    )
    early_stop: int | None = key(
        None, ge=1, help="Stop after so many evaluations without a better checkpoint.metric."
    )
    profile_steps: int | None = key(
        None, ge=1, help="Record so many steps with torch.profiler; see debug=profile."
    )

    @property
    def untimed_steps(self) -> int | None:
        """Number of first steps that are not timed if train.profile_steps is set: the warm-up, one
        that starts the profiler, and the profiled ones.
        """
        return None if self.profile_steps is None else WARM_UP_STEPS + 1 + self.profile_steps

    def problems(self, whole: Any) -> Iterator[str]:
        """Yield an error message for each key of the training loop that does not fit the others."""
        if self.max_steps is not None:
            yield from self.profile_problems(self.max_steps)

    def profile_problems(self, steps: int) -> Iterator[str]:
        """Yield an error message if a run of so many steps has none left to time after the profiled
        ones.
        """
        if self.untimed_steps is not None and steps <= self.untimed_steps:
            yield (
                f"train.profile_steps={self.profile_steps}: expected a run of "
                f"{self.untimed_steps + 1} steps or more (warm-up, recorded and timed ones), got "
                f"{steps}; raise train.max_steps or train.epochs"
            )


def is_out_of_time(train: TrainConfig, seconds: float) -> bool:
    """Return True if train.max_minutes is reached after `seconds` of training steps."""
    return train.max_minutes is not None and seconds >= 60 * train.max_minutes


@dataclass
class CheckpointConfig:
    """Config keys for the checkpoint files of a run: last.pt, best.pt and step_N.pt in
    `checkpoints/` of the run folder.
    """

    every_steps: int | None = key(
        None, ge=1, help="Save also every N steps within an epoch; each epoch is saved anyway."
    )
    every_minutes: float | None = key(
        None, gt=0, help="Save also every N minutes within an epoch, at the next logged step."
    )
    keep: int = key(1, ge=1, help="Number of step_N.pt files to keep.")
    metric: str = key(
        "auto", help="Metric of best.pt: val/<metric>, or with _ema; auto: the task's headline."
    )


@dataclass
class Config:
    """Config of a run: all groups, and the keys that belong to no group. A project replaces
    some groups by its own classes.
    """

    task_name: str = key("train", help="Name of the task; its runs are in outputs/<task_name>/.")
    tags: list[str] = key([], help="Labels of your own, stored with the run.")
    seed: int = key(
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
    print_config: bool | str = key(
        True,
        choices=(True, False, "full"),
        help="Print what differs from a plain run, all (full) or none.",
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
        """Name of the metric that a search optimizes. It is optimized_metric if that key is set,
        otherwise the best value of checkpoint.metric, e.g. val/loss_best for val/loss.
        checkpoint.metric=val/loss_ema gives val/loss_best too, which is then the loss of the
        averaged weights.
        """
        return self.optimized_metric or f"{self.checkpoint.metric.removesuffix('_ema')}_best"


@dataclass
class ResolvedParallel(ParallelConfig):
    """Config group `parallel` with integers for the numbers of devices and threads, where
    ParallelConfig may have `auto`.
    """

    devices: int = 1
    threads_per_device: int = 1


@dataclass
class ResolvedTrain(TrainConfig):
    """Config group `train` with an integer for the number of batches per optimizer step, where
    TrainConfig may have `auto`.
    """

    accumulate: int = 1

    def count_steps(self, batches_per_epoch: int) -> tuple[int, int]:
        """Compute (optimizer steps per epoch, optimizer steps in total) for an epoch of
        `batches_per_epoch` global batches.
        """
        per_epoch = batches_per_epoch // self.accumulate
        total = self.epochs * per_epoch
        return per_epoch, total if self.max_steps is None else min(total, self.max_steps)


@dataclass
class ResolvedConfig(Config):
    """Config in which each `auto` is replaced by a value for one machine. config.yaml of a run
    folder stores it.
    """

    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)
    train: ResolvedTrain = field(default_factory=ResolvedTrain)

    @property
    def global_batch(self) -> int:
        """Number of images per forward pass, summed over all devices."""
        if self.data.batch_size is not None:
            return self.data.batch_size
        assert self.data.batch_size_per_device is not None
        return self.data.batch_size_per_device * self.parallel.devices

    @property
    def headline_metric(self) -> str:
        """Name of the metric that the console and the report show first: checkpoint.metric without
        its split (`val/`) and without `_ema`.
        """
        return self.checkpoint.metric.removeprefix("val/").removesuffix("_ema")

    @property
    def learning_rate_text(self) -> str:
        """Learning rate as the console shows it."""
        return f"{self.optim.lr:g}"
