"""What the nodes of a run say to each other through the store before anything starts: what each has, because node 0, which
resolves the config, sees its own hardware alone; and then the config. Ranks started from outside speak for themselves."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.config.compose import read_frozen
from src.engine.machine import hardware
from src.engine.machine.files import write_text
from src.engine.machine.ranks import host_name
from src.schema import ParallelConfig, ResolvedConfig

if TYPE_CHECKING:
    from torch.distributed import Store

CONFIG = "config"  # its key in the store; empty: the first has refused it
ANSWER_SECONDS = 10.0  # for the others to have heard that


@dataclass
class Facts:
    """Of one process: where it is, and which cores and CUDA devices it may use."""

    node: int
    host: str
    ranks: int  # of its node
    cores: list[int]
    devices: list[str]


def tell_facts(store: Store, index: int, node: int, ranks_of_node: int = 0) -> None:
    """`index` counts those who tell: ranks started from outside, or nodes, which have no `ranks_of_node` yet."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(hardware.cores()))
    devices = [device.uuid for device in hardware.visible_cuda_devices()]
    store.set(f"facts/{index}", json.dumps(asdict(Facts(node, host_name(), ranks_of_node, cores, devices))))


def all_facts(store: Store, count: int) -> list[Facts]:
    """Of all `count` who tell; waits for them."""
    return [Facts(**json.loads(store.get(f"facts/{index}"))) for index in range(count)]


def share_config(store: Store, folder: Path) -> None:
    """The first hands the others its frozen config, and the name of its run folder."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    store.set(CONFIG, json.dumps({"folder": str(folder), "config": text}))


def refuse_others(store: Store, count: int) -> None:
    """The first has refused and said why; the others only leave. The store must outlive their question."""
    store.set(CONFIG, "")
    with suppress(RuntimeError):  # one is late: it finds nobody, and leaves
        store.wait([f"left/{index}" for index in range(1, count)], timedelta(seconds=ANSWER_SECONDS))


def take_config(store: Store, index: int) -> tuple[ResolvedConfig, Path] | None:
    """(the shared config, the run folder), for any but the first; None where it was refused. Waits for it.

    Where the disk is not the first one's, the logs of this node go to a folder of the same name.
    """
    message = store.get(CONFIG)
    if not message:
        store.set(f"left/{index}", "")
        return None
    shared = json.loads(message)
    folder, text = Path(shared["folder"]), shared["config"]
    path = folder / "config.yaml"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made on {host_name()}, for its logs ({error.strerror})") from None
    return read_frozen(folder), folder


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
        each = [len({core for fact in node for core in fact.cores}) // node[0].ranks for node in nodes]
        parallel.threads_per_device = max(1, min(each))


def check_nodes(config: ResolvedConfig, facts: list[Facts]) -> None:
    """Refuse by name the first host that has not the devices its ranks need."""
    parallel = config.parallel
    for node in _by_node(facts) if parallel.accelerator == "cuda" else []:
        have = len({device for fact in node for device in fact.devices})
        need = node[0].ranks or parallel.devices // config.cluster.nodes
        if have < (1 if parallel.backend == "gloo" else need):
            raise ValueError(
                f"parallel.devices={parallel.devices}: {need} ranks on {node[0].host}, which has {have} CUDA device(s) "
                "for them; two NCCL ranks cannot share one"
            )


def _by_node(facts: list[Facts]) -> list[list[Facts]]:
    return [[fact for fact in facts if fact.node == node] for node in sorted({fact.node for fact in facts})]
