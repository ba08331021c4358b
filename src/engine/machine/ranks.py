"""Who am I among the ranks of a job: read from what torchrun (or our own agent, which is torchrun's) put into the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

from src.engine.machine.process import imports_without_collector

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """One process's place in the job; alone by default."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0  # how often the agent has restarted all ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks | None:
    """This process's place, or None where nobody started ranks.

    Errors: ValueError for a half-set environment: acting on it would train one process on a share of the data.
    """
    marks = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment]
    if not marks:
        _refuse_bare_srun(environment)
        return None
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise ValueError(
            f"{marks[0]}={environment[marks[0]]}: set in the environment, but {', '.join(missing)} not; "
            "start ranks with torchrun, or unset it"
        )
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environment[name].isdigit():
            raise ValueError(f"{name}={environment[name]}: not a whole number; start ranks with torchrun, or unset it")
        values[name.lower()] = int(environment[name])
    if values["rank"] >= values["world_size"] or values["local_rank"] >= values["local_world_size"]:
        raise ValueError(
            f"RANK={values['rank']}: not below WORLD_SIZE={values['world_size']}; start ranks with torchrun"
        )
    return Ranks(**values, restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")))


def _refuse_bare_srun(environment: Mapping[str, str]) -> None:
    """`srun -n 2 python train.py` would start the same run twice."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks.isdigit() and int(tasks) > 1:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS={tasks}: srun started {tasks} copies; start one task per node, each running "
            "torchrun --nnodes … --nproc-per-node … train.py parallel=ddp"
        )


COMPOSE_TIMEOUT = timedelta(seconds=300)  # ranks of a cluster may start minutes apart


def open_store(ranks: Ranks) -> Store:
    """The store through which these ranks meet; hosted by the agent, or by rank 0 where there is none.

    The agent's store outlives a restart, and with it the addresses of ranks that have died: each attempt has its own keys.
    """
    with imports_without_collector():
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=COMPOSE_TIMEOUT))
    assert store is not None
    return PrefixStore(f"attempt_{ranks.restart_count}", store)
