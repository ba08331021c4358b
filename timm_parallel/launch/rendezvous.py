"""Key-value store through which the ranks of a run find each other, and the handler that gives this
store to torch's elastic agent.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

from timm_parallel.cluster.slurm import address_of_step
from timm_parallel.machine.imports import imports_without_gc
from timm_parallel.machine.ranks import NodeAddress, Ranks, host_name

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
    with imports_without_gc():
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
