"""Identity of a rank, read from environment variables that torchrun, torch's agent or srun sets."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """Rank, node and world size of this process. The defaults describe the only process of a
    run.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # Number of times that the agent has restarted all ranks.
    restart_count: int = 0
    # Number of the node. Node 0 has rank 0, which writes the files of the run.
    node: int = 0
    nodes: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        return self.local_rank == 0

    @property
    def name(self) -> str:
        """Name of this rank for messages. With several nodes it includes the host."""
        return f"rank {self.rank}" + (f" on {host_name()}" if self.nodes > 1 else "")


def host_name() -> str:
    """Return the host name of this node. Under Slurm it is the name that Slurm uses for the
    node.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def first_difference(described: list[tuple[str, dict[str, str]]]) -> str:
    """Compare the values of all nodes or ranks with those of the first. Describe the first
    difference in a message. Return an empty text if all values are equal.

    `described`: (name, dictionary of values) of each node or rank.
    """
    for name, values in described[1:]:
        first_name, first = described[0]
        for key in [*first, *values]:
            here, there = first.get(key, "(none)"), values.get(key, "(none)")
            if here != there:
                return f"{key}={here} on {first_name}, but {key}={there} on {name}"
    return ""


@dataclass(frozen=True)
class NodeAddress:
    """Number of this node, number of nodes, and address of the key-value store on node 0."""

    node: int = 0
    nodes: int = 1
    # IP address of node 0.
    address: str = "127.0.0.1"
    # Port of the key-value store on node 0. 0 means any free port, for a run on one node.
    port: int = 0


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks | None:
    """Read the identity of this rank from environment variables. Return None if neither torchrun
    nor srun started this process.

    Raises ValueError if some of the variables are missing or invalid. The process would otherwise
    train alone, on a part of the data.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    present = [name for name in names[:3] if name in environment]
    if not present:
        _refuse_mpirun(environment)
        return _ranks_of_srun(environment)
    fix = "start the ranks with torchrun, or unset these variables"
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise ValueError(
            f"{present[0]}={environment[present[0]]}: is set, but {', '.join(missing)} is missing; "
            f"{fix}"
        )
    rank, world_size, local_rank, local_world_size = (int(environment[name]) for name in names)
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    node = int(environment.get("GROUP_RANK", rank // local_world_size))
    nodes = int(environment.get("GROUP_WORLD_SIZE", math.ceil(world_size / local_world_size)))
    return Ranks(rank, world_size, local_rank, local_world_size, restarts, node, nodes)


def _refuse_mpirun(environment: Mapping[str, str]) -> None:
    """Raise ValueError if mpirun started this process with others, because each of them would train
    alone.
    """
    # Check PMI_SIZE only together with MPI_LOCALRANKID, because srun sets PMI_SIZE too.
    names = (
        ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if "MPI_LOCALRANKID" in environment
        else ("OMPI_COMM_WORLD_SIZE",)
    )
    for name in names:
        size = environment.get(name, "1")
        if size != "1":
            raise ValueError(
                f"{name}={size}: mpirun is not supported; run python train.py (it starts the "
                "ranks), or torchrun or srun on several nodes"
            )


def _ranks_of_srun(environment: Mapping[str, str]) -> Ranks | None:
    """Read the identity of a rank that `srun --ntasks=N python train.py …` started. Return None if
    srun did not start this process, or if it is the only process of srun.
    """
    if "SLURM_STEP_ID" not in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    names = (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
    )
    wrong = [name for name in names if not environment.get(name, "").isdecimal()]
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if wrong or not counts:
        name = wrong[0] if wrong else "SLURM_STEP_TASKS_PER_NODE"
        raise ValueError(
            f"{name}: this variable of srun is missing or invalid; start with srun --ntasks=N "
            "python train.py …, or submit with cluster=slurm"
        )
    rank, local_rank, node, world_size, nodes = (int(environment[name]) for name in names)
    return Ranks(rank, world_size, local_rank, counts[node], 0, node, nodes)


def starter() -> str:
    """Return `torchrun` or `srun`, the command that started this rank, for messages."""
    return "torchrun" if "RANK" in os.environ else "srun"


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's list of tasks per node: `2(x3),1` becomes [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, nodes in parts for _ in range(int(nodes or 1))]
