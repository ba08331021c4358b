"""Who am I among the ranks of a job: read from what torchrun (our own agent is torchrun's) or srun put into the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """One process's place in the job; alone by default."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0  # how often the agent has restarted all ranks
    node: int = 0  # of `nodes`; node 0 has rank 0, and with it the records
    nodes: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        return self.local_rank == 0

    @property
    def name(self) -> str:
        """For messages: the host as well, where there are several."""
        return f"rank {self.rank}" + (f" on {host_name()}" if self.nodes > 1 else "")


def host_name() -> str:
    """What this node is called where people look for it: in Slurm's lists, else by its own system."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@cache
def machine_id() -> str:
    """Equal only for processes that can signal each other by pid: this boot of this kernel, this space of pids.

    Host names are no proof: many machines are called `localhost`, and two containers of one machine count pids apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


@dataclass(frozen=True)
class Place:
    """A node of a run, and where it meets the others."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # node 0's, as the others reach it
    port: int = 0  # 0: a free one, for one node


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks | None:
    """This process's place, or None where nobody started ranks.

    A half-set environment is refused: acting on it would train one process on a share of the data.
    """
    marks = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment]
    if not marks:
        return _ranks_of_srun(environment)
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise ValueError(
            f"{marks[0]}={environment[marks[0]]}: set in the environment, but {', '.join(missing)} not; "
            "start ranks with torchrun, or unset it"
        )
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in numbers:
        if not environment[name].isdecimal():
            raise ValueError(f"{name}={environment[name]}: not a whole number; start ranks with torchrun, or unset it")
    rank, world_size, local_rank, local = (int(environment[name]) for name in numbers)
    for name, place, count in (("", rank, world_size), ("LOCAL_", local_rank, local)):
        if place >= count:
            raise ValueError(f"{name}RANK={place}: not below {name}WORLD_SIZE={count}; start ranks with torchrun")
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    node = int(environment.get("GROUP_RANK", rank // local))
    nodes = int(environment.get("GROUP_WORLD_SIZE", -(-world_size // local)))
    return Ranks(rank, world_size, local_rank, local, restarts, node, nodes)


def _ranks_of_srun(environment: Mapping[str, str]) -> Ranks | None:
    """The place of a task of `srun --ntasks=N python train.py …`; None where the step has one task, or there is none."""
    if "SLURM_STEP_ID" not in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    wrong = [name for name in names if not environment.get(name, "").isdecimal()]
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if wrong or not counts:
        raise ValueError(
            f"{wrong[0] if wrong else 'SLURM_STEP_TASKS_PER_NODE'}: missing, or not what srun sets; start with "
            "srun --ntasks=N python train.py …, or with python train.py cluster=slurm …"
        )
    rank, local_rank, node, world_size, nodes = (int(environment[name]) for name in names)
    return Ranks(rank, world_size, local_rank, counts[node], 0, node, nodes)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> [2, 2, 2, 1]; empty for what is not in that notation."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
