"""What the nodes of a run have, told through the store before anything starts: node 0 decides nothing for the others unseen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from src.engine.machine import hardware
from src.engine.machine.ranks import Ranks, host_name
from src.schema import Config, ParallelConfig

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


def own_facts(ranks: Ranks) -> Facts:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(hardware.cores()))
    devices = [device.uuid for device in hardware.visible_cuda_devices()]
    return Facts(ranks.node, host_name(), ranks.local_world_size, cores, devices)


def tell_facts(store: Store, ranks: Ranks) -> None:
    store.set(f"facts/{ranks.rank}", json.dumps(asdict(own_facts(ranks))))


def all_facts(store: Store, count: int) -> list[Facts]:
    """Of all `count` processes; waits for them."""
    return [Facts(**json.loads(store.get(f"facts/{rank}"))) for rank in range(count)]


def fit_to_nodes(config: Config, asked: ParallelConfig, facts: list[Facts]) -> None:
    """Where `asked` left the choice open, take what every node has; srun may give each task cores and a device of its own.

    `config` is resolved, by what node 0 has. Errors: ValueError naming the host that cannot do it.
    """
    parallel = config.parallel
    nodes = [[fact for fact in facts if fact.node == node] for node in sorted({fact.node for fact in facts})]
    config.cluster.nodes = len(nodes)
    for node in nodes:
        have, need = len(_union(fact.devices for fact in node)), node[0].ranks
        if parallel.accelerator == "cuda" and have < need and parallel.backend != "gloo":
            raise ValueError(
                f"parallel.devices={parallel.devices}: {need} ranks on {node[0].host}, which has {have} CUDA device(s) "
                "for them; two NCCL ranks cannot share one"
            )
        if parallel.accelerator == "cuda" and have == 0:
            raise ValueError(f"parallel.accelerator=cuda: no CUDA device is visible on {node[0].host}")
        if parallel.accelerator == "cpu" and have and asked.accelerator == "auto":
            raise ValueError(
                f"parallel.accelerator=auto: {node[0].host} has CUDA devices, {nodes[0][0].host} has none; set cpu or cuda"
            )
    if asked.threads_per_device == "auto":
        parallel.threads_per_device = max(
            1, min(len(_union(fact.cores for fact in node)) // node[0].ranks for node in nodes)
        )


def _union(lists: Iterable[list[int]] | Iterable[list[str]]) -> set[int | str]:
    return {item for each in lists for item in each}
