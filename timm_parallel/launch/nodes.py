"""Exchange of hardware descriptions and of the config between the nodes of a run, or between ranks
that torchrun or srun started.
"""

from __future__ import annotations

import json
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from timm_parallel.app import code_hashes
from timm_parallel.config.compose import load_config
from timm_parallel.keys import ParallelConfig, ResolvedConfig
from timm_parallel.machine import hardware
from timm_parallel.machine.files import write_text
from timm_parallel.machine.ranks import first_difference, host_name
from timm_parallel.record.environment import version_of

if TYPE_CHECKING:
    from torch.distributed import Store

INVENTORY_POLL_SECONDS = 0.2
# Key under which the key-value store holds the config of the run.
CONFIG = "config"
# Seconds for the other processes to read why the run cannot start, before the key-value store
# closes.
REFUSAL_SECONDS = 10.0
# The other nodes wait for node 0 almost without limit. Node 0 gives up after
# parallel.start_timeout, a value that the other nodes do not know yet.
LONGEST_WAIT = timedelta(days=1)
# Libraries whose versions must be equal on all nodes, because they affect the results of a training
# step.
LIBRARIES = ("torch", "torchvision", "timm", "numpy")


@dataclass
class NodeInventory:
    """Hardware that one process of a run can use: host name, node number, CPU cores and CUDA
    devices. Each process publishes this description for rank 0.
    """

    node: int
    host: str
    # Number of ranks on the node of this process; 0 if unknown.
    ranks: int
    cores: list[int]
    devices: list[str]
    # Versions, arguments and code hashes to compare between nodes. Only the first process of a node
    # has them.
    software: dict[str, str] = field(default_factory=dict)


def publish_inventory(
    store: Store, index: int, node: int, ranks: int = 0, arguments: list[str] | None = None
) -> None:
    """Publish the CPU cores and CUDA devices of this process in the key-value store.

    `index`: number of this process. `node`: its node number. `ranks`: ranks on that node, 0 if
    unknown. `arguments`: arguments of the command line. If given, also publish versions and code
    hashes, which must be equal on all nodes.
    """
    devices = [device.uuid for device in hardware.visible_cuda_devices()]
    software = {} if arguments is None else _software(arguments)
    inventory = NodeInventory(node, host_name(), ranks, hardware.core_numbers(), devices, software)
    store.set(f"facts/{index}", json.dumps(asdict(inventory)))


def _software(arguments: list[str]) -> dict[str, str]:
    """Collect everything that must be equal on all nodes, as a dictionary: arguments of the command
    line, versions of libraries, and a hash of each code file.
    """
    software = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    software["Python"] = ".".join(platform.python_version_tuple()[:2])
    software |= {name: version_of(name) or "missing" for name in LIBRARIES}
    return software | code_hashes()


def collect_inventories(
    store: Store, count: int, seconds: float, who: str = "rank"
) -> list[NodeInventory]:
    """Wait until `count` processes have published their hardware, and return the inventories.
    Raises ValueError if one is missing after `seconds`, or if software differs between nodes.

    `who`: `rank` or `node`, the word for a process in the message.
    """
    deadline = time.monotonic() + seconds
    # Poll the key-value store, because its method wait would block signal handlers.
    while missing := [str(index) for index in range(count) if not store.check([f"facts/{index}"])]:
        if time.monotonic() > deadline:
            named = (
                f"{who}{'s' if len(missing) > 1 else ''} {', '.join(missing)} (of 0 to {count - 1})"
            )
            raise ValueError(
                f"{named}: did not connect within parallel.start_timeout={seconds:g} s; check "
                "the logs of its node, or raise parallel.start_timeout"
            )
        time.sleep(INVENTORY_POLL_SECONDS)
    inventories = [
        NodeInventory(**json.loads(store.get(f"facts/{index}"))) for index in range(count)
    ]
    # Compare the software of the nodes. DDP would otherwise average gradients of different code
    # without any sign, because the parameters stay equal on all ranks.
    compared = [
        (f"node {each.node} ({each.host})", each.software) for each in inventories if each.software
    ]
    if difference := first_difference(compared):
        raise ValueError(
            f"the nodes differ: {difference}; give all nodes the same command line, libraries and "
            "code"
        )
    return inventories


def share_config(store: Store, folder: Path) -> None:
    """Publish the saved config and the path of the run folder in the key-value store. Rank 0 calls
    this function.
    """
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    store.set(CONFIG, json.dumps({"folder": str(folder), "config": text}))


def refuse_others(store: Store, count: int, reason: str) -> None:
    """Publish the reason why the run cannot start. Keep the key-value store open until all other
    processes have read the reason, at most REFUSAL_SECONDS.
    """
    store.set(CONFIG, json.dumps({"refused": reason}))
    # Ignore a timeout. A process that is late finds no key-value store and exits.
    with suppress(RuntimeError):
        store.wait(
            [f"left/{index}" for index in range(1, count)], timedelta(seconds=REFUSAL_SECONDS)
        )


def receive_config(store: Store, index: int) -> tuple[ResolvedConfig, Path] | str:
    """Wait for the config that rank 0 publishes. Return (config, run folder), or the reason why the
    run does not start. The run folder is created on this node if it is missing.

    `index`: number of this process.
    """
    store.wait([CONFIG], LONGEST_WAIT)
    shared = json.loads(store.get(CONFIG))
    if "refused" in shared:
        store.set(f"left/{index}", "")
        return str(shared["refused"])
    folder, text = Path(shared["folder"]), shared["config"]
    path = folder / "config.yaml"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    except OSError as error:
        raise ValueError(
            f"{folder}: node {host_name()} cannot create this run folder ({error.strerror}); "
            "choose a folder that each node can write"
        ) from None
    return load_config(folder), folder


def fit_to_nodes(
    config: ResolvedConfig, asked: ParallelConfig, inventories: list[NodeInventory]
) -> None:
    """Set the numbers of nodes and threads in a resolved config to values that fit all nodes.
    Raises ValueError if the nodes cannot run the config.

    `asked`: the `parallel` keys as the user gave them, e.g. with `auto`. `inventories`: hardware of
    each process.
    """
    parallel, nodes = config.parallel, _by_node(inventories)
    config.cluster.nodes = len(nodes)
    for node in nodes:
        if (
            parallel.accelerator == "cpu"
            and asked.accelerator == "auto"
            and any(task.devices for task in node)
        ):
            raise ValueError(
                f"parallel.accelerator=auto: {node[0].host} has CUDA devices, {nodes[0][0].host} "
                "has none; set parallel.accelerator=cpu or cuda"
            )
    check_nodes(config, inventories)
    if asked.threads_per_device == "auto":
        # Count the different cores of all processes of a node, because srun may give each process
        # other cores.
        threads = [
            len({core for task in node for core in task.cores}) // node[0].ranks for node in nodes
        ]
        parallel.threads_per_device = max(1, min(threads))


def check_nodes(config: ResolvedConfig, inventories: list[NodeInventory]) -> None:
    """Raise ValueError if a node has fewer CUDA devices than its ranks need."""
    parallel = config.parallel
    for node in _by_node(inventories) if parallel.accelerator == "cuda" else []:
        present = len({device for task in node for device in task.devices})
        needed = node[0].ranks or parallel.devices // config.cluster.nodes
        if present < (1 if parallel.backend == "gloo" else needed):
            raise ValueError(
                f"parallel.devices={parallel.devices}: {needed} ranks on {node[0].host}, which has "
                f"{present} CUDA device(s); start one rank per device, because NCCL ranks cannot "
                "share a device"
            )


def _by_node(inventories: list[NodeInventory]) -> list[list[NodeInventory]]:
    numbers = sorted({inventory.node for inventory in inventories})
    return [
        [inventory for inventory in inventories if inventory.node == number] for number in numbers
    ]
