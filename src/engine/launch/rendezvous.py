"""Where the ranks of a run meet: a store at one address alone, that of node 0. torch's own listens on every interface.

Whoever reaches such a store can pose as a rank. One machine's listens on loopback; that of several nodes on the address
by which the scheduler knows node 0.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import psutil

from src.engine.launch.slurm import place_of_step
from src.engine.machine.platform import WINDOWS
from src.engine.machine.process import imports_without_collector
from src.engine.machine.ranks import Place, Ranks, host_name

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo

LOOPBACK = "127.0.0.1"
BACKEND = "rendezvous"  # its name among torch's c10d, static, etcd
COMPOSE_TIMEOUT = timedelta(seconds=300)  # ranks of a cluster may start minutes apart
POLL_SECONDS = 1.0


@cache
def register_backend() -> str:
    """Make `Rendezvous` known to torch's agent; returns its name."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, lambda parameters: parameters.config["rendezvous"])
    return BACKEND


class Rendezvous:
    """What torch's agent asks of a RendezvousHandler, for nodes whose order is fixed. No subclass, to import no torch.

    torch's own lets whoever comes first be node 0, and a node that comes again; here rank 0 stays where the records are,
    and a run that has lost a node ends, to be started again.
    """

    use_agent_store = True

    def __init__(self, place: Place, timeout: float) -> None:
        """Host the store (node 0), or find it. `timeout`: seconds for all nodes to come."""
        self.place = place
        self.store = _host_store(place) if place.node == 0 else _join(place, timeout)
        if place.node == 0:
            _wait_for_nodes(self.store, place, timeout)

    def next_rendezvous(self) -> RendezvousInfo:
        """The same nodes again where the agent restarts the ranks."""
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        agent = PrefixStore("agent", self.store)
        at = RendezvousStoreInfo(self.place.address, self.store.port)
        return RendezvousInfo(agent, self.place.node, self.place.nodes, at)

    def get_backend(self) -> str:
        return BACKEND

    get_run_id = get_backend  # the store knows this run alone

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _host_store(place: Place) -> TCPStore:
    """It listens on this node's address alone."""
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((socket.gethostbyname(place.address), place.port))
    except OSError as error:
        at = f"{place.address}:{place.port}"
        raise ValueError(f"{at}: node 0 ({host_name()}) cannot listen there ({error.strerror})") from None
    port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        place.address, port, is_master=True, multi_tenant=True, master_listen_fd=descriptor, use_libuv=not WINDOWS
    )


def _join(place: Place, timeout: float) -> TCPStore:
    """Node 0's store. One that this node has joined before is of a run that has lost it and is ending: not that one."""
    from torch.distributed import TCPStore

    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            seconds = timedelta(seconds=timeout)
            store = TCPStore(place.address, place.port, is_master=False, timeout=seconds, use_libuv=not WINDOWS)
            if store.add(f"joined/{place.node}", 1) == 1:
                return store
        except (OSError, RuntimeError):  # not yet there, or just leaving
            pass
        time.sleep(POLL_SECONDS)
    raise ValueError(
        f"{place.address}:{place.port}: node {place.node} ({host_name()}) found no node 0 there within "
        f"parallel.start_timeout={timeout:g} s"
    )


def _wait_for_nodes(store: Store, place: Place, timeout: float) -> None:
    until = time.monotonic() + timeout
    while missing := [str(node) for node in range(1, place.nodes) if not store.check([f"joined/{node}"])]:
        if time.monotonic() > until:
            raise ValueError(
                f"node {', '.join(missing)} of {place.nodes}: not there within parallel.start_timeout={timeout:g} s; "
                f"node 0 waits at {place.address}:{place.port}"
            )
        time.sleep(POLL_SECONDS / 5)


@cache
def open_store(ranks: Ranks) -> PrefixStore:
    """The store through which these ranks meet; hosted by the agent, or by rank 0 where there is none.

    The agent's store outlives a restart, and with it the addresses of ranks that have died: each attempt has its own keys.
    Ranks of several nodes are made to listen towards it.
    """
    with imports_without_collector():
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

    store: Store | None
    if (address := os.environ.get("MASTER_ADDR")) is not None:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=COMPOSE_TIMEOUT))
        assert store is not None
    else:
        place = place_of_step(ranks.node, ranks.nodes)
        address = place.address
        each = Place(ranks.rank, ranks.world_size, address, place.port)  # a rank here is what a node is elsewhere
        store = _host_store(each) if ranks.is_first else _join(each, COMPOSE_TIMEOUT.total_seconds())
    if ranks.nodes > 1:
        os.environ.update(listen_towards(address))
    return PrefixStore(f"attempt_{ranks.restart_count}", store)


def listen_towards(address: str) -> dict[str, str]:
    """The environment in which gloo and NCCL listen on the interface that leads to `address`, unless it says otherwise.

    gloo's own choice is the address of the host's name, which is often loopback; so this host's name says nothing here.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: asks for the route
            probe.connect((address, 9))
            own = probe.getsockname()[0]
    except OSError:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == own for entry in addresses):
            if own == LOOPBACK and (name not in ("lo", "lo0") or not address.startswith("127.")):
                return {}
            variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return {variable: os.environ.get(variable, name) for variable in variables}
    return {}
