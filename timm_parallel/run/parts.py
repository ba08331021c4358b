"""The training state, and the parts of a run."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from timm_parallel.batch import Batch, stretched
from timm_parallel.data.dataset import ImageDataset, split_fingerprint
from timm_parallel.data.loader import EvalLoader, TrainLoader
from timm_parallel.keys import ResolvedConfig, leaves
from timm_parallel.machine.secrets import hide_in
from timm_parallel.model.checks import check_is_complete
from timm_parallel.model.flops import count_flops
from timm_parallel.model.freeze import frozen_modules
from timm_parallel.parallel.networks import AUTOCAST, Networks, PhaseStep, autocast, build_ema
from timm_parallel.parallel.strategy import Communication, Strategy
from timm_parallel.run.meter import StepHooks
from timm_parallel.run.progress import Progress
from timm_parallel.run.telemetry import Telemetry
from timm_parallel.task import Task

# Name of the average of the model that model.ema asks for.
EMA = "ema"


@dataclass
class Learning:
    """Optimizer, schedule and clipping of a phase, which a project builds."""

    optimizer: Optimizer
    # A learning-rate schedule with a method step_update(step). One that also has the methods
    # state_dict, load_state_dict and observe(numbers) gets the numbers of each evaluation, and is
    # saved in checkpoints.
    schedule: Any
    # Function that clips the gradients of the phase in place; None: do not clip.
    clip: Callable[[], None] | None = None


@dataclass
class Phase:
    """A phase of a training step on one rank: it trains some networks with an own optimizer."""

    name: str
    # Computes the losses of a batch, without the wrapper of the strategy.
    step: PhaseStep
    # The same in the wrapper of the strategy.
    wrapped: nn.Module
    # All parameters that the phase trains, by name.
    parameters: dict[str, nn.Parameter]
    learning: Learning
    scaler: torch.amp.GradScaler | None
    communication: Communication

    @property
    def optimizer(self) -> Optimizer:
        return self.learning.optimizer


@dataclass
class TrainState:
    """Networks, averages, optimizers, schedules and progress of a run.

    These are all objects that a training step changes. A checkpoint stores their state.
    """

    # The networks of the task by name, without any wrapper.
    networks: Networks
    # Averages of networks by name: timm's ModelEmaV3, and the name of the network.
    averages: dict[str, tuple[Any, str]]
    phases: list[Phase]
    # Floating-point operations of a batch over all devices; None if they were not counted.
    flops: int | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def model(self) -> nn.Module:
        """The network that is exported, without any wrapper."""
        return self.networks["model"]

    @property
    def ema(self) -> nn.Module | None:
        """The average of the model that model.ema asks for."""
        return self.averages[EMA][0].module if EMA in self.averages else None

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All networks and averages by name."""
        averages = {name: average.module for name, (average, _) in self.averages.items()}
        return {**dict(self.networks.items()), **averages}

    def evaluated(self, averaged: bool = False) -> dict[str, nn.Module]:
        """Return the networks and averages of the task. With `averaged`, the average of model.ema
        takes the place of the model.
        """
        modules = {name: module for name, module in self.modules.items() if name != EMA}
        return {**modules, "model": self.ema} if averaged and self.ema is not None else modules

    def own_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a network that a checkpoint stores, by name, except for those that
        an earlier network has too. The model is the first one.
        """
        known: set[int] = set()
        order = self._order()
        for other in order[: order.index(name)]:
            known |= {id(tensor) for tensor in _tensors(self.networks[other]).values()}
        # Look up the buffers in each call, because a module may replace its buffers.
        tensors = _tensors(self.networks[name])
        return {key: tensor for key, tensor in tensors.items() if id(tensor) not in known}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of the model, then those that only other networks have.
        The latter's names start with the name of their network.
        """
        seen: set[int] = set()
        for network in self._order():
            prefix = "" if network == "model" else f"{network}."
            for name, parameter in self.networks[network].named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}{name}", parameter

    def _order(self) -> list[str]:
        """Return the names of the networks, with the model first."""
        return ["model", *(name for name in self.networks if name != "model")]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters of all networks, starting with those of the model."""
        return (parameter for _, parameter in self.named_parameters())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module, and the buffers that its state dict has, by name."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}


def build_networks(task: Task[Any], model: nn.Module, device: torch.device) -> Networks:
    """Build the networks of a task around a model, and their averages, which start as copies.

    Raises ValueError if the task names a network that it does not have, or holds what no checkpoint
    would store.
    """
    networks = Networks(task.networks(model))
    _check_task(task, networks)
    for name, (source, _) in task.averages.items():
        networks[name] = copy.deepcopy(networks[source]).requires_grad_(False)
    return networks.to(device)


def build_state(
    config: ResolvedConfig,
    strategy: Strategy,
    task: Task[Any],
    networks: Networks,
    build: Callable[[str, dict[str, nn.Module]], Learning],
    *,
    sample: Batch | None = None,
    compile_network: Callable[[nn.Module], nn.Module] = lambda network: network,
) -> TrainState:
    """Build a step and an optimizer for each phase of a task. All ranks must call this function.

    `networks`: those of `build_networks`, averages included. `build`: function of a project that
    builds the optimizer of a phase, from its name and the networks that it trains, without the
    wrapper of a strategy. `sample`: a training batch of any size, with which the FLOPs of a step
    are counted. `compile_network`: function that wraps each network by torch.compile, or returns it
    unchanged. Raises ValueError if a trainable parameter belongs to no phase or to two.
    """
    _check_metric(task, config.headline_metric)
    task.ranks = strategy.group
    bare = Networks({name: of for name, of in networks.items() if name not in task.averages})
    # Copy averages before the strategy wraps networks, because it replaces parameters or adds hooks
    # to them.
    averages = {}
    for name, (source, decay) in task.averages.items():
        average = build_ema(bare[source], decay, False, foreach=not strategy.traits.shards)
        average.module = networks[name]
        averages[name] = (average, source)
    ema = getattr(config.model, "ema", None)
    if ema is not None and ema.decay is not None:
        average = build_ema(
            bare["model"], ema.decay, ema.warmup, foreach=not strategy.traits.shards
        )
        averages[EMA] = (average, "model")
    flops = None
    if sample is not None:
        flops = count_flops(task, networks, stretched(sample, config.global_batch))
    precision = config.train.precision
    state = TrainState(bare, averages, [], flops)
    strategy.shard(Networks(state.modules), AUTOCAST[precision])
    compiled = {
        name: network if name in task.averages else compile_network(network)
        for name, network in networks.items()
    }
    used = autocast(compiled, strategy.device, precision)
    frozen = frozen_modules(used)
    trained = _parameters_of_phases(state, task.phases)
    for name, parameters in trained.items():
        if len(trained) > 1:
            require_gradients(trained, name, strategy)
        # Each phase has its own step, because a strategy may replace networks in it.
        step = PhaseStep(task, Networks(dict(used.items())), name, frozen)
        wrapped = strategy.wrap(step)
        # Build the optimizer after wrapping, because fsdp replaces parameters.
        learning = build(name, {network: bare[network] for network in task.phases[name]})
        if precision == "fp16" and getattr(learning.optimizer, "needs_closure", False):
            raise ValueError(
                f"train.precision=fp16: {type(learning.optimizer).__name__} computes the loss "
                "several times in a step, which the scale of gradients does not allow; use bf16"
            )
        scaler = torch.amp.GradScaler(strategy.device.type) if precision == "fp16" else None
        state.phases.append(
            Phase(
                name, step, wrapped, parameters, learning, scaler, strategy.communication(wrapped)
            )
        )
    for phase in state.phases:
        check_is_complete(phase.optimizer, phase.parameters)
    return state


def require_gradients(
    trained: dict[str, dict[str, nn.Parameter]], phase: str, strategy: Strategy
) -> None:
    """Let only the parameters of one phase require gradients. `trained`: parameters of each phase.

    fsdp keeps the flags of the first forward pass, so under it all of them stay on, and the
    gradients of other phases are dropped.
    """
    if not strategy.traits.shards:
        for name, parameters in trained.items():
            for parameter in parameters.values():
                parameter.requires_grad_(name == phase)


def _check_task(task: Task[Any], networks: Networks) -> None:
    """Raise ValueError if the task names a network that it does not have, or holds what no
    checkpoint would store.
    """
    name = f"train.task={task.config.train.task}"
    if "model" not in networks:
        raise ValueError(f"{name}: networks() must return the network `model`")
    named = [network for networks_ in task.phases.values() for network in networks_]
    for network in [*named, *(source for source, _ in task.averages.values())]:
        if network not in networks:
            raise ValueError(
                f"{name}: there is no network {network}; networks() returns {', '.join(networks)}"
            )
    for attribute, value in vars(task).items():
        if isinstance(value, Tensor | nn.Module | torch.Generator):
            raise ValueError(
                f"{name}: the attribute {attribute} is a {type(value).__name__}, which no "
                "checkpoint stores; return it in networks(), as a module or a buffer of one"
            )


def _check_metric(task: Task[Any], name: str) -> None:
    """Raise ValueError if the metric with this name, a value of checkpoint.metric, requires more
    outputs than the model has.
    """
    if task.num_outputs < task.metrics[name].min_outputs:
        others = ", ".join(
            f"val/{other}"
            for other, metric in task.metrics.items()
            if metric.min_outputs <= task.num_outputs
        )
        raise ValueError(
            f"checkpoint.metric=val/{name}: not defined for a model with {task.num_outputs} "
            f"outputs; use one of {others}"
        )


def _parameters_of_phases(
    state: TrainState, phases: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters that each phase trains, by name. Raise ValueError if a trainable
    parameter belongs to no phase, or to two.
    """
    networks_of: dict[int, set[str]] = defaultdict(set)
    for phase, names in phases.items():
        for network in names:
            for parameter in state.networks[network].parameters():
                networks_of[id(parameter)].add(phase)
    trained: dict[str, dict[str, nn.Parameter]] = {phase: {} for phase in phases}
    for name, parameter in state.named_parameters():
        of_parameter = sorted(networks_of[id(parameter)])
        if not parameter.requires_grad:
            continue
        if len(of_parameter) > 1:
            raise ValueError(
                f"train.task: {name} is trained in the phases {', '.join(of_parameter)}; put each "
                "network in one phase"
            )
        if not of_parameter:
            raise ValueError(
                f"train.task: no phase trains {name}; add its network to a phase, or freeze it "
                "with requires_grad_(False)"
            )
        trained[of_parameter[0]][name] = parameter
    return trained


@dataclass
class RunParts:
    """The objects of a training run on one rank: those that a project builds, such as dataset and
    task, loaders, training state, and what times the steps.
    """

    config: ResolvedConfig
    strategy: Strategy
    dataset: ImageDataset
    task: Task[Any]
    # A dataclass with the settings that prepare images, such as size, mean and std.
    preprocessing: Any
    # Height and width of the training images in pixels.
    image_size: tuple[int, int]
    train_loader: TrainLoader
    # Dictionary from the name of each split to evaluate to its loader.
    eval_loaders: Mapping[str, EvalLoader]
    state: TrainState
    # Function that maps a batch to one with mixup or cutmix, or None.
    mixing: Any
    # Number of optimizer steps per epoch. Each step has train.accumulate global batches.
    steps_per_epoch: int
    telemetry: Telemetry
    hooks: StepHooks

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the whole run, including those before a resume."""
        return self.progress.last_step(self.config.train, self.steps_per_epoch)

    @cached_property
    def _listing(self) -> str:
        """Return a hash of the names and labels of the training images."""
        return split_fingerprint(self.dataset.train)


def evaluation_networks(
    networks: Networks | Mapping[str, nn.Module], config: ResolvedConfig, strategy: Strategy
) -> Networks:
    """Return the networks and averages of a task as an evaluation calls them: in the precision of
    the config, and in the wrapper of the strategy.
    """
    return strategy.for_evaluation(autocast(networks, strategy.device, config.train.precision))


def data_of_a_step(parts: RunParts) -> dict[str, Any]:
    """Return all settings that determine which images each training step reads, as a dictionary.

    The number of devices is not among them.
    """
    config, loader = parts.config, parts.train_loader
    return {
        "images": loader.sampler.num_images,
        "listing": parts._listing,
        "steps_per_epoch": parts.steps_per_epoch,
        "images_per_step": config.global_batch * config.train.accumulate,
        "seed": config.seed,
        "aug_repeats": loader.sampler.copies,
        "balance": loader.balance,
    }


def plain_config(parts: RunParts) -> dict[str, Any]:
    """Return the config of a run as a dictionary from dotted key to value, with secrets masked."""
    return dict(hide_in({key: value for key, value, _ in leaves(parts.config)}))


def parameter_names(optimizer: Optimizer, state: TrainState) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of their numbers in its state
    dict.
    """
    name_of = {id(parameter): name for name, parameter in state.named_parameters()}
    return [
        name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
