"""Where the ranks of one machine meet: a store that listens on loopback alone. torch's own listens on every interface.

Whoever reaches such a store can pose as a rank, so it should be within reach of this machine only.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

ADDRESS = "127.0.0.1"
BACKEND = "loopback"  # its name among torch's c10d, static, etcd


def register_backend() -> str:
    """Make it known to torch's agent; returns its name."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _create)  # type: ignore[arg-type]  # duck-typed: see Loopback
    return BACKEND


def listen_on_loopback() -> dict[str, str]:
    """The environment in which gloo and NCCL listen there too, unless the environment says otherwise."""
    name = next((name for name in ("lo", "lo0") if name in psutil.net_if_addrs()), None)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if name is None else {variable: os.environ.get(variable, name) for variable in variables}


class Loopback:
    """A torch.distributed.elastic RendezvousHandler of one node, which waits for nobody. No subclass, to import no torch."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        from torch.distributed import TCPStore

        self._run_id = run_id
        listener = socket.create_server((ADDRESS, 0))
        self._port = listener.getsockname()[1]
        self._store: Store = TCPStore(
            ADDRESS, self._port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach()
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """The ranks of this machine are all there is, also when the agent starts them again."""
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        agent = PrefixStore(f"agent/{self._run_id}", self._store)
        return RendezvousInfo(agent, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(parameters.run_id)
