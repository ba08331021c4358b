"""Checks of the `cluster` config keys, and values for `auto` on cluster nodes, whose hardware this
machine cannot see. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from timm_parallel.errors import ONE_PROCESS, Problem
from timm_parallel.keys import ClusterConfig, Config

# Scheduler -> the `cluster` keys that only this scheduler reads.
KEYS_OF = {
    "slurm": ("submit", "wait", "partition", "account", "gres", "signal_seconds"),
    "kubernetes": ("image", "namespace", "claim"),
}
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
        yield Problem(
            f"parallel={parallel.strategy}: one process cannot span cluster.nodes={cluster.nodes}; "
            "use parallel=auto",
            ONE_PROCESS,
        )
    if cluster.scheduler == "local":
        return
    for scheduler, keys in KEYS_OF.items():
        for key in keys:
            value = getattr(cluster, key)
            if scheduler != cluster.scheduler and value != getattr(ClusterConfig, key):
                yield (
                    f"cluster.{key}={value}: an option of {scheduler}, but "
                    f"cluster={cluster.scheduler}"
                )
    if cluster.scheduler == "kubernetes" and (cluster.image is None or cluster.claim is None):
        yield (
            f"cluster.{'image' if cluster.image is None else 'claim'}: required by "
            "cluster=kubernetes"
        )
    yield from _texts(cluster)
    yield from _sizes(config)
    if parallel.max_restarts:
        yield (
            f"parallel.max_restarts={parallel.max_restarts}: cluster={cluster.scheduler} "
            "restarts a run that lost a node by itself; use 0"
        )


def _texts(cluster: ClusterConfig) -> Iterator[str]:
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


def seconds_of(time: str) -> int:
    """Convert a time limit of Slurm (`d-hh:mm:ss`, `hh:mm:ss`, `mm:ss` or `d-hh`) to seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = (parts + [0, 0])[:3]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds


def _sizes(config: Config) -> Iterator[str]:
    cluster, parallel = config.cluster, config.parallel
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
        parallel.devices = 1 if parallel.has_one_device else cluster.nodes * per_node
    if parallel.threads_per_device == "auto":
        parallel.threads_per_device = max(
            1, (cluster.cpus or 1) * cluster.nodes // int(parallel.devices)
        )
