"""Key-value store through which the ranks of a run find each other, with the handler that gives it
to torch's elastic agent. Nodes exchange descriptions of their hardware and the config through it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from timm_parallel.app import code_hashes
from timm_parallel.cluster.slurm import address_of_step
from timm_parallel.config.compose import load_config
from timm_parallel.errors import RefusedError
from timm_parallel.keys import ParallelConfig, ResolvedConfig
from timm_parallel.machine import hardware
from timm_parallel.machine.files import write_text
from timm_parallel.machine.imports import slow_imports
from timm_parallel.machine.ranks import NodeAddress, Ranks, first_difference, host_name
from timm_parallel.record.environment import version_of

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo


# Address of the key-value store for a run on one machine.
LOOPBACK = "127.0.0.1"
# Name under which the rendezvous handler is registered with torch's agent.
BACKEND = "rendezvous"
# Time for a rank to wait for the key-value store, because ranks of a cluster may start minutes
# apart.
COMPOSE_TIMEOUT = timedelta(seconds=300)
POLL_SECONDS = 1.0


def from_parameters(parameters: Any) -> Any:
    """Return the Rendezvous object that the settings of torch's agent contain. torch's registry
    requires a function that returns the handler.
    """
    return parameters.config["rendezvous"]


class Rendezvous:
    """Rendezvous handler of torch's elastic agent, for nodes whose order is fixed. It has the
    methods of torch's base class without extending it, so that torch is imported later.
    """

    # Replace torch's handlers, which make the first node to arrive node 0 and let a lost node join
    # again. Here rank 0 stays on the node with the run folder, and a run that loses a node ends.
    use_agent_store = True

    def __init__(self, endpoint: NodeAddress, timeout: float) -> None:
        """Create the key-value store if this is node 0, otherwise connect to the store of node 0.
        `endpoint`: this node's number and the address of node 0. `timeout`: seconds to wait for
        node 0.
        """
        self.endpoint = endpoint
        self.store = _host_store(endpoint) if endpoint.node == 0 else _join(endpoint, timeout)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the key-value store, the number of this node and the number of nodes. The values
        stay the same after the agent has restarted the ranks.
        """
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        info = RendezvousStoreInfo(self.endpoint.address, self.store.port)
        return RendezvousInfo(
            PrefixStore("agent", self.store), self.endpoint.node, self.endpoint.nodes, info
        )

    def get_backend(self) -> str:
        return BACKEND

    # Any constant is a valid run id, because no other run uses this key-value store.
    get_run_id = get_backend

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _host_store(endpoint: NodeAddress) -> TCPStore:
    """Create the key-value store of a run on node 0. The store listens only on the address in
    `endpoint`, because any process that connects to the store could act as a rank.
    """
    from torch.distributed import TCPStore

    # Open the socket here, because TCPStore would listen on every network interface.
    try:
        listener = socket.create_server((socket.gethostbyname(endpoint.address), endpoint.port))
    except OSError as error:
        raise ValueError(
            f"{endpoint.address}:{endpoint.port}: node 0 ({host_name()}) cannot listen on this "
            f"address ({error.strerror})"
        ) from None
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        endpoint.address, port, is_master=True, multi_tenant=True, master_listen_fd=descriptor
    )


def _join(endpoint: NodeAddress, timeout: float) -> TCPStore:
    """Connect to the key-value store of node 0 and return the client. Raises ValueError after
    `timeout` seconds. A store that this node has already joined is left over from an earlier run:
    connect again until the new one answers.
    """
    from torch.distributed import TCPStore

    address, port, limit = endpoint.address, endpoint.port, timedelta(seconds=timeout)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=5).close()
            store = TCPStore(address, port, is_master=False, timeout=limit)
            if store.add(f"joined/{endpoint.node}", 1) == 1:
                return store
        # Try again, because the key-value store may not have started yet, or may just be closing.
        except (OSError, RuntimeError):
            pass
        time.sleep(POLL_SECONDS)
    raise ValueError(
        f"{address}:{port}: node {endpoint.node} ({host_name()}) could not reach node 0 at this "
        f"address within parallel.start_timeout={timeout:g} s"
    )


@cache
def open_store(ranks: Ranks) -> PrefixStore:
    """Connect this rank to the key-value store of the run. torch's agent hosts the store. If srun
    started the ranks, there is no agent and rank 0 hosts the store.
    """
    with slow_imports():
        from torch.distributed.rendezvous import rendezvous

    if (address := os.environ.get("MASTER_ADDR")) is not None:
        store = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=COMPOSE_TIMEOUT))[0]
    else:
        # srun started the ranks. Each rank connects by itself and counts as a node here.
        endpoint = address_of_step(ranks.rank, ranks.world_size)
        address = endpoint.address
        store = (
            _host_store(endpoint)
            if ranks.is_first
            else _join(endpoint, COMPOSE_TIMEOUT.total_seconds())
        )
    if ranks.nodes > 1:
        os.environ.update(listen_towards(address))
    return ranks_store(store, ranks.restart_count)


def ranks_store(store: Store, attempt: int) -> PrefixStore:
    """Return a view of the run's key-value store that puts the number of the attempt before each
    key.
    """
    from torch.distributed import PrefixStore

    # Use new keys for each attempt, because after a restart the agent's key-value store still has
    # the addresses of ranks that have exited.
    return PrefixStore(f"attempt_{attempt}", store)


def listen_towards(address: str) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use the network interface that leads to
    `address`. Variables that the user has set keep their values.
    """
    # Find the interface, because gloo by default uses the address of the host name, which is often
    # loopback.
    try:
        # Connecting a UDP socket sends nothing. It only looks up the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            local = probe.getsockname()[0]
    except OSError:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == local for entry in addresses):
            if local == LOOPBACK and (name not in ("lo", "lo0") or not address.startswith("127.")):
                return {}
            variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return {variable: os.environ.get(variable, name) for variable in variables}
    return {}


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


def receive_config(store: Store, index: int) -> tuple[ResolvedConfig, Path]:
    """Wait for the config that rank 0 publishes. Return (config, run folder). The run folder is
    created on this node if it is missing. Raises RefusedError with the reason if the run does not
    start.

    `index`: number of this process.
    """
    store.wait([CONFIG], LONGEST_WAIT)
    shared = json.loads(store.get(CONFIG))
    if "refused" in shared:
        store.set(f"left/{index}", "")
        raise RefusedError(shared["refused"])
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
