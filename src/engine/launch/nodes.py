"""What the nodes of a run have. Each tells it through the store before anything starts, because node 0, which resolves the
config, sees its own hardware alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from src.engine.machine import hardware
from src.engine.machine.ranks import host_name
from src.schema import ParallelConfig, ResolvedConfig

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass
class Facts:
    """Of one process: where it is, and which cores and CUDA devices it may use."""

    node: int
    host: str
    ranks: int  # of its node
    cores: list[int]
    devices: list[str]


def own_facts(node: int, ranks_of_node: int = 0) -> Facts:
    """`ranks_of_node`: 0 where the config will tell."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(hardware.cores()))
    devices = [device.uuid for device in hardware.visible_cuda_devices()]
    return Facts(node, host_name(), ranks_of_node, cores, devices)


def tell_facts(store: Store, index: int, facts: Facts) -> None:
    """`index` counts the processes that tell: ranks started from outside, or nodes."""
    store.set(f"facts/{index}", json.dumps(asdict(facts)))


def all_facts(store: Store, count: int) -> list[Facts]:
    """Of all `count` processes; waits for them."""
    return [Facts(**json.loads(store.get(f"facts/{rank}"))) for rank in range(count)]


def fit_to_nodes(config: ResolvedConfig, asked: ParallelConfig, facts: list[Facts]) -> None:
    """Where `asked` left the choice open, take what every node has; srun may give each task cores and a device of its own.

    `config` is resolved by what node 0 has. A host that cannot do it is named in the refusal.
    """
    parallel, nodes = config.parallel, _by_node(facts)
    config.cluster.nodes = len(nodes)
    for node in nodes:
        if parallel.accelerator == "cpu" and asked.accelerator == "auto" and any(fact.devices for fact in node):
            raise ValueError(
                f"parallel.accelerator=auto: {node[0].host} has CUDA devices, {nodes[0][0].host} has none; set cpu or cuda"
            )
    check_nodes(config, facts)
    if asked.threads_per_device == "auto":
        parallel.threads_per_device = max(
            1, min(len(_union(fact.cores for fact in node)) // node[0].ranks for node in nodes)
        )


def check_nodes(config: ResolvedConfig, facts: list[Facts]) -> None:
    """Refuse by name the first host that has not the devices its ranks need."""
    parallel = config.parallel
    for node in _by_node(facts) if parallel.accelerator == "cuda" else []:
        have, need = len(_union(fact.devices for fact in node)), node[0].ranks
        need = need or parallel.devices // config.cluster.nodes
        if have < (1 if parallel.backend == "gloo" else need):
            raise ValueError(
                f"parallel.devices={parallel.devices}: {need} ranks on {node[0].host}, which has {have} CUDA device(s) "
                "for them; two NCCL ranks cannot share one"
            )


def _by_node(facts: list[Facts]) -> list[list[Facts]]:
    return [[fact for fact in facts if fact.node == node] for node in sorted({fact.node for fact in facts})]


def _union(lists: Iterable[list[int]] | Iterable[list[str]]) -> set[int | str]:
    return {item for each in lists for item in each}
