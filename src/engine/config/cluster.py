"""Keys of `cluster`: what goes together, and what `auto` means on nodes that this machine does not know. No torch here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from src.schema import ClusterConfig, Config

OF = {  # keys that only one scheduler reads
    "slurm": ("submit", "wait", "partition", "account", "gres", "signal_seconds", "setup", "extra"),
    "kubernetes": ("image", "namespace", "claim"),
}
CODE = ("setup", "extra")  # run by a shell
TIME = r"(\d+-)?\d+:\d\d(:\d\d)?|\d+-\d+"
DNS_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"  # what Kubernetes allows as a name


def cluster_rules(config: Config) -> Iterator[str]:
    """A line for each key that does not fit the scheduler."""
    cluster, parallel = config.cluster, config.parallel
    if cluster.nodes > 1 and parallel.strategy in ("single", "dp"):
        yield f"parallel={parallel.strategy}: one process, which cannot span the nodes ({cluster.nodes}); use parallel=ddp"
    if cluster.scheduler == "local":
        return
    plain = ClusterConfig()
    for owner, keys in OF.items():
        for key in keys:
            if owner != cluster.scheduler and getattr(cluster, key) != getattr(plain, key):
                yield f"cluster.{key}={getattr(cluster, key)}: an option of {owner}, but cluster={cluster.scheduler}"
    for key in ("image", "claim"):
        if cluster.scheduler == "kubernetes" and getattr(cluster, key) is None:
            yield f"cluster.{key}: must be given with cluster=kubernetes"
    yield from _texts(cluster)
    yield from _sizes(config)
    if parallel.max_restarts:
        yield f"parallel.max_restarts={parallel.max_restarts}: cluster={cluster.scheduler} restarts a failed run itself; use 0"


def _texts(cluster: ClusterConfig) -> Iterator[str]:
    for key in ("memory", "time", "partition", "account", "gres", "image", "namespace", "claim"):
        value = getattr(cluster, key)
        if value is not None and (not value or not value.isprintable()):
            yield f"cluster.{key}={value!r}: must be one line of text"
    if cluster.time is not None and not re.fullmatch(TIME, cluster.time):
        yield f"cluster.time={cluster.time}: give hh:mm:ss or d-hh:mm:ss, in a file within quotes"
    if cluster.memory is not None and not re.fullmatch(r"\d+[KMGT]?", cluster.memory):
        yield f"cluster.memory={cluster.memory}: give a number and K, M, G or T, e.g. 64G"
    for key in ("namespace", "claim"):
        value = getattr(cluster, key)
        if value is not None and not re.fullmatch(DNS_NAME, value):
            yield f"cluster.{key}={value}: Kubernetes has names of lower-case letters, digits and dashes"
    for line in cluster.extra:
        if not line.startswith("#SBATCH ") or not line.isprintable():
            yield f"cluster.extra={line!r}: give lines that begin with #SBATCH; commands belong in cluster.setup"
    if cluster.gpus and gpus_of_gres(cluster):
        yield f"cluster.gres={cluster.gres}: asks for GPUs as cluster.gpus={cluster.gpus} does; set one of them"


def _sizes(config: Config) -> Iterator[str]:
    cluster, parallel = config.cluster, config.parallel
    gpus = cluster.gpus or gpus_of_gres(cluster)
    if parallel.accelerator in ("cuda", "mps") and not gpus:
        yield f"parallel.accelerator={parallel.accelerator}: the nodes have no GPU; set cluster.gpus (per node)"
    if parallel.devices == "auto":
        return
    devices = int(parallel.devices)
    if devices % cluster.nodes:
        yield f"parallel.devices={devices}: of all nodes together, and does not divide by cluster.nodes={cluster.nodes}"
    if gpus and parallel.accelerator != "cpu" and devices != cluster.nodes * gpus:
        yield f"parallel.devices={devices}: nodes with {gpus} GPU(s) each have {cluster.nodes * gpus}; leave it at auto"
    threads, cpus = parallel.threads_per_device, cluster.cpus
    if threads != "auto" and cpus is not None and int(threads) * devices // cluster.nodes > cpus:
        yield f"parallel.threads_per_device={threads}: the devices of a node need more than cluster.cpus={cpus}"


def gpus_of_gres(cluster: ClusterConfig) -> int:
    """`gpu:a100:4,tmp:1` -> 4."""
    pattern = r"gpu(?::(?!\d+$)[^:]+)?(?::(\d+))?"
    counts = [re.fullmatch(pattern, part) for part in (cluster.gres or "").split(",")]
    return sum(int(match.group(1) or 1) for match in counts if match)


def fill_in(config: Config) -> None:
    """Replace `auto` by what the job's own nodes have, whatever the machine that submits it has."""
    cluster, parallel = config.cluster, config.parallel
    gpus = cluster.gpus or gpus_of_gres(cluster)
    if parallel.accelerator == "auto":
        parallel.accelerator = "cuda" if gpus else "cpu"
    per_node = gpus if parallel.accelerator == "cuda" else 1
    if parallel.strategy == "auto":
        asked = cluster.nodes * per_node if parallel.devices == "auto" else int(parallel.devices)
        parallel.strategy = "ddp" if asked > 1 or cluster.nodes > 1 else "single"
    if parallel.devices == "auto":
        parallel.devices = 1 if parallel.strategy == "single" else cluster.nodes * per_node
    if parallel.threads_per_device == "auto":
        parallel.threads_per_device = max(1, (cluster.cpus or 1) * cluster.nodes // int(parallel.devices))


def with_code(cluster: ClusterConfig, command: ClusterConfig) -> ClusterConfig:
    """A frozen config's `cluster` with the shell code of this command: no frozen config holds any."""
    return dataclasses.replace(cluster, **{key: getattr(command, key) for key in CODE})


def check_code(config: Config, overrides: list[str], local: Path) -> None:
    """Refuse `cluster.setup` and `cluster.extra` unless this command or `local` (conf/local/default.yaml) gives them.

    A shell runs them, so no other file may.
    """
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    here: Any = OmegaConf.load(local) if local.is_file() else OmegaConf.create()
    for key in CODE:
        value, own = getattr(config.cluster, key), OmegaConf.select(here, f"cluster.{key}")
        if value and f"cluster.{key}" not in given and value != own:
            raise ValueError(
                f"cluster.{key}: only the command line and conf/local/default.yaml may give what a shell runs"
            )
