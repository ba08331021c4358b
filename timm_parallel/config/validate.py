"""Checks of a config: bounds and choices of single values, names that must exist, and rules about
several keys, such as those of the group `cluster`.

Each rule yields one error message per problem, with key, value and fix. The rules import torch only
if the config names a class of the project. timm_parallel/checked_configs.py has the rules that need
the class of the task.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.app import current, package
from timm_parallel.config.explain import hint, timm_models, timm_optimizers, timm_tags, type_text
from timm_parallel.errors import RefusedError
from timm_parallel.keys import (
    STRATEGIES,
    TRACKERS,
    ClusterConfig,
    Config,
    is_own_class,
    is_timm_dataset,
    leaves,
)
from timm_parallel.machine.imports import find_name
from timm_parallel.machine.text import yaml_text

DNS_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
OF_KUBERNETES = "lower-case letters, digits and dashes, as Kubernetes allows in a name"
# `cluster` key -> regular expression for its text, and its description.
FORMATS = {
    **dict.fromkeys(("partition", "account", "gres", "image"), (r".+", "one line of text")),
    "time": (
        r"(\d+-)?\d+:\d\d(:\d\d)?|\d+-\d+",
        "hh:mm:ss or d-hh:mm:ss; quote it in a YAML file",
    ),
    "memory": (r"\d+[KMGT]?", "a number and K, M, G or T, e.g. 64G"),
    **dict.fromkeys(("namespace", "claim"), (DNS_NAME, OF_KUBERNETES)),
}


def cluster_rules(config: Config) -> Iterator[str]:
    """Yield an error message for each `cluster` key that does not fit the chosen scheduler or the
    `parallel` keys.
    """
    cluster, parallel = config.cluster, config.parallel
    if cluster.nodes > 1 and parallel.has_one_process:
        yield (
            f"parallel={parallel.strategy}: one process cannot span cluster.nodes={cluster.nodes}; "
            "use parallel=auto"
        )
    if cluster.scheduler == "local":
        return
    for key, value, entry in leaves(cluster, "cluster."):
        scheduler = entry.metadata.get("only")
        if scheduler and scheduler != cluster.scheduler and value != entry.default:
            shown = f"{key}={yaml_text(value)}"
            yield f"{shown}: an option of {scheduler}, but cluster={cluster.scheduler}"
    if cluster.scheduler == "kubernetes" and (cluster.image is None or cluster.claim is None):
        yield (
            f"cluster.{'image' if cluster.image is None else 'claim'}: required by "
            "cluster=kubernetes"
        )
    for key, (pattern, expected) in FORMATS.items():
        value = getattr(cluster, key)
        if value is not None and not (value.isprintable() and re.fullmatch(pattern, value)):
            yield f"cluster.{key}={value}: expected {expected}"
    time = cluster.time or ""
    if cluster.scheduler == "slurm" and re.fullmatch(FORMATS["time"][0], time):
        seconds = seconds_of(time)
        if seconds <= cluster.signal_seconds:
            yield (
                f"cluster.signal_seconds={cluster.signal_seconds}: expected less than "
                f"cluster.time={time} ({seconds} s)"
            )
    if cluster.gpus and gpus_of_gres(cluster):
        yield (
            f"cluster.gres={cluster.gres}: cluster.gpus={cluster.gpus} requests GPUs too; set "
            "only one of them"
        )
    if parallel.max_restarts:
        yield (
            f"parallel.max_restarts={parallel.max_restarts}: cluster={cluster.scheduler} "
            "restarts a run that lost a node by itself; use 0"
        )
    gpus = cluster.gpus or gpus_of_gres(cluster)
    if parallel.accelerator in ("cuda", "mps") and not gpus:
        yield (
            f"parallel.accelerator={parallel.accelerator}: the job requests no GPU; set "
            "cluster.gpus (per node)"
        )
    if parallel.devices == "auto":
        return
    devices = int(parallel.devices)
    if devices % cluster.nodes:
        yield (
            f"parallel.devices={devices}: this is the total of all nodes; expected a multiple of "
            f"cluster.nodes={cluster.nodes}"
        )
    if gpus and parallel.accelerator != "cpu" and devices != cluster.nodes * gpus:
        yield (
            f"parallel.devices={devices}: expected {cluster.nodes * gpus}, the GPUs of all nodes; "
            "use parallel.devices=auto"
        )
    threads, cpus = parallel.threads_per_device, cluster.cpus
    if threads != "auto" and cpus is not None and int(threads) * devices // cluster.nodes > cpus:
        yield (
            f"parallel.threads_per_device={threads}: the devices of a node would use more threads "
            f"than cluster.cpus={cpus}; use auto"
        )


def seconds_of(time: str) -> int:
    """Convert a time limit of Slurm (`d-hh:mm:ss`, `hh:mm:ss`, `mm:ss` or `d-hh`) to seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = (parts + [0, 0])[:3]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds


def gpus_of_gres(cluster: ClusterConfig) -> int:
    """Count the GPUs that cluster.gres requests per node, e.g. 4 for `gpu:a100:4,tmp:1`."""
    pattern = r"gpu(?::(?!\d+$)[^:]+)?(?::(\d+))?"
    counts = [re.fullmatch(pattern, part) for part in (cluster.gres or "").split(",")]
    return sum(int(match.group(1) or 1) for match in counts if match)


def fill_in(config: Config) -> None:
    """Replace each `auto` of the `parallel` keys by a value for the GPUs and cores that the
    `cluster` keys request. The hardware of this machine does not count, because the job runs on
    other nodes.
    """
    cluster, parallel = config.cluster, config.parallel
    gpus = cluster.gpus or gpus_of_gres(cluster)
    if parallel.accelerator == "auto":
        parallel.accelerator = "cuda" if gpus else "cpu"
    per_node = gpus if parallel.accelerator == "cuda" else 1
    requested = cluster.nodes * per_node if parallel.devices == "auto" else int(parallel.devices)
    parallel.choose_strategy(several=requested > 1 or cluster.nodes > 1)
    if parallel.devices == "auto":
        parallel.devices = 1 if parallel.traits.has_one_device else cluster.nodes * per_node
    if parallel.threads_per_device == "auto":
        parallel.threads_per_device = max(
            1, (cluster.cpus or 1) * cluster.nodes // int(parallel.devices)
        )


# Allow only known database drivers, because SQLAlchemy imports the driver in the URL as a module.
DATABASE = r"(sqlite|postgresql|mysql)(\+(pysqlite|psycopg2?|pymysql|mysqldb))?://.*"
OF_TORCH = (
    *("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365"),
    *("inaturalist", "imagenet"),
)
# Regular expressions for the texts that timm.data.auto_augment can parse.
AUTO_AUGMENT = (
    r"rand((-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)|(-t\w+))*",
    r"augmix(-(m|w|d|a|b|mstd)-?\d+(\.\d+)?)*",
    r"(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)*",
)
# Arguments of timm.create_model that would load weights from any file or URL.
LOADING = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def refuse(*problems: Iterator[str]) -> None:
    """Raise RefusedError with the first message that the given rules yield. Do nothing if no rule
    yields a message.
    """
    line = next(itertools.chain(*problems), None)
    if line is not None:
        raise RefusedError(line)


def check_values(config: Config) -> None:
    """Raise RefusedError if a config value is invalid by itself, regardless of other keys."""
    refuse(_key_problems(config), _names(config), _trackers(config))


def check_combination(config: Config) -> None:
    """Raise RefusedError if keys of a config cannot work together. The rules are those for
    `cluster`, and the method `problems` of each config group.
    """
    groups = [group for group in vars(config).values() if hasattr(group, "problems")]
    refuse(cluster_rules(config), *(group.problems(config) for group in groups))


def own_class_problems(key: str, name: str) -> Iterator[str]:
    """Yield an error message if the package of the project defines no such class. An error in the
    code of its module is raised unchanged. `key`: the config key that names the class. `name`:
    dotted name of the class.
    """
    found = find_name(name, package())
    if not isinstance(found, type) or found.__module__.partition(".")[0] != package():
        yield (
            f"{key}={name}: no such class; expected {package()}.<module>.<Class> with <module> "
            f"a file under {package()}/"
        )


def option_problems(key: str, options: type[Any], given: dict[str, Any]) -> Iterator[str]:
    """Yield an error message for each option that is unknown, has the wrong type, or is out of
    bounds.

    `key`: the config key that holds the options, e.g. train.task_kwargs. `options`: the dataclass
    that declares them. `given`: the options of the config.
    """
    declared = {entry.name: entry for entry in dataclasses.fields(options)}
    for name, value in given.items():
        shown = f"{key}.{name}={yaml_text(value)}"
        if name not in declared:
            known = f"{key} has {', '.join(declared)}" if declared else f"{key} has no options"
            yield f"{shown}: unknown option{hint(name, declared)}; {known}"
            continue
        try:
            OmegaConf.merge(OmegaConf.structured(options), {name: value})
        except OmegaConfBaseException:
            yield f"{shown}: expected {type_text(declared[name])}"
            continue
        for problem in _out_of_bounds(value, declared[name].metadata):
            yield f"{shown}: {problem}"


def _key_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each config key whose value is out of bounds."""
    for key, value, entry in leaves(config):
        # OmegaConf takes a list as an item of a list of numbers or texts.
        is_flat = str(entry.type).startswith(("list[int]", "list[float]", "list[str]"))
        if is_flat and any(isinstance(item, list | dict) for item in value or ()):
            yield f"{key}={value}: expected {type_text(entry)}"
        yield from (
            f"{key}={value}: {problem}" for problem in _out_of_bounds(value, entry.metadata)
        )


def _out_of_bounds(value: Any, bounds: Any) -> Iterator[str]:
    """Compare a value with the bounds and choices in the metadata of its config key. Yield a
    description of the allowed values, e.g. `expected >= 1`, if the value is not allowed. Each item
    of a list is compared.
    """
    if isinstance(value, list):
        for item in value:
            yield from _out_of_bounds(item, bounds)
        return
    if isinstance(value, float) and not math.isfinite(value):
        yield "expected a finite number"
    least, above, most, choices = (bounds.get(name) for name in ("ge", "gt", "le", "choices"))
    if value is None:
        return
    if choices is not None and value not in choices:
        yield f"allowed: {', '.join(map(str, choices))}"
    elif bounds.get("syntax") == "auto_augment":
        if not any(re.fullmatch(pattern, value) for pattern in AUTO_AUGMENT):
            yield "expected timm's syntax, e.g. rand-m9-mstd0.5-inc1, augmix-m5-w4 or v0"
    elif isinstance(value, str):
        if least is not None and value != "auto":
            yield f"expected auto or an integer >= {least}"
    elif least is not None and value < least:
        yield f"expected >= {least}"
    elif above is not None and value <= above:
        yield f"expected > {above}"
    elif most is not None and value > most:
        yield f"expected <= {most}"


def _names(config: Config) -> Iterator[str]:
    """Yield an error message for each name of a model, optimizer, dataset, task, strategy or
    training loop that neither the project nor the library nor timm has.
    """
    yield from _weights_problems(config.model.kwargs)
    chosen = {
        "model.name": (config.model.name, _model_problems),
        "optim.opt": (config.optim.opt, _optimizer_problems),
        "parallel.strategy": (config.parallel.strategy, _strategy),
    }
    if current().datasets:
        chosen["data.name"] = config.data.name, _dataset_problems
    if current().tasks:
        chosen["train.task"] = config.train.task, _task
    for key, (name, problems) in chosen.items():
        yield from own_class_problems(key, name) if is_own_class(name) else problems(name)
    if (loop := config.train.loop) is not None and not callable(find_name(loop, package())):
        yield (
            f"train.loop={loop}: no such function; expected {package()}.<module>.<function> with "
            f"<module> a file under {package()}/"
        )


def _model_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no model of this name, or no weights with the tag in the
    name.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm_models():
        yield f"model.name={name}: timm has no such model{hint(architecture, timm_models())}"
    tags = [known for known in timm_tags() if known.startswith(f"{architecture}.")] if tag else []
    if tags and name not in tags:
        yield f"model.name={name}: timm has no such weights{hint(name, tags)}"


def _weights_problems(kwargs: Iterable[str]) -> Iterator[str]:
    """Yield an error message for each model argument (model.kwargs) that would load weights from a
    file or URL.
    """
    for key in sorted(set(kwargs).intersection(LOADING)):
        yield f"model.kwargs.{key}: not allowed; to load timm's weights set model.pretrained=true"


def _dataset_problems(name: str) -> Iterator[str]:
    """Yield an error message if a dataset name belongs neither to a dataset of the project nor to
    timm's factory.
    """
    own = current().datasets
    source, _, dataset = name.partition("/")
    if source == "torch" and dataset not in OF_TORCH:
        yield f"data.name={name}: timm has no such dataset{hint(dataset, OF_TORCH)}"
    elif not is_timm_dataset(name) and name not in own:
        yield f"data.name={name}: no such dataset{hint(name, own)}, or torch/…, hfds/…"


def _optimizer_problems(name: str) -> Iterator[str]:
    """Yield an error message if timm has no optimizer of this name, or if the training step cannot
    run the optimizer.
    """
    if name not in timm_optimizers():
        yield f"optim.opt={name}: timm has no such optimizer{hint(name, timm_optimizers())}"
    if name == "adahessian":
        yield (
            "optim.opt=adahessian: requires second derivatives, which the training step does "
            "not compute; use e.g. adamw"
        )


def _task(name: str) -> Iterator[str]:
    known = current().tasks
    if name not in known:
        yield (
            f"train.task={name}: unknown task{hint(name, known)}, or give "
            f"{package()}.tasks.<module>.<Class>"
        )


def _strategy(name: str) -> Iterator[str]:
    known = ("auto", *STRATEGIES)
    if name not in known:
        yield (
            f"parallel.strategy={name}: no such strategy{hint(name, known)}; a class of your own "
            f"is named {package()}.<module>.<Class>"
        )


def _trackers(config: Config) -> Iterator[str]:
    for name, path in config.tracker.classes().items():
        yield from () if name in TRACKERS else own_class_problems(f"tracker.use.{name}", path)
    storage = config.search.storage
    if storage is not None and not re.fullmatch(DATABASE, storage, re.DOTALL):
        yield "search.storage: expected sqlite:///<file>, postgresql://… or mysql://…"
