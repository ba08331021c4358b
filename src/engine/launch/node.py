"""One node of a job on several: `python -m src.engine.launch.node <run folder>`, which the job's file starts on each.

Node 0 has the records: it holds the folder, hands the config to the others through the store, and writes how it ended.
The others need no shared disk; their logs stay in a folder of the same name.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.config.compose import read_frozen
from src.engine.launch.failure import LOST_CONNECTION, cause_is_known, failure_file, failure_of_exit_code, first_failure
from src.engine.launch.heartbeat import fetch_failures, publish_failure
from src.engine.launch.job import conclude, prepare, record_end
from src.engine.launch.kubernetes import place_of_pod
from src.engine.launch.nodes import all_facts, check_nodes, refuse_others, share_config, take_config, tell_facts
from src.engine.launch.rendezvous import Rendezvous
from src.engine.launch.slurm import NODE_LOST, place_of_step
from src.engine.launch.supervisor import ENDED_BY_AGENT, Ended, run_ranks
from src.engine.launch.torchrun import where_logs_are
from src.engine.machine.lock import own
from src.engine.machine.process import imports_without_collector
from src.engine.machine.ranks import Place, host_name
from src.schema import Config, ResolvedConfig

if TYPE_CHECKING:
    from torch.distributed import Store

ANSWER_SECONDS = 6.0  # seconds for the other nodes to say how they have ended


def main(folder: Path, origin: Path) -> int:
    """Run this node's ranks of the config in `origin`. Returns the exit code: as train.py's, or NODE_LOST."""
    try:
        place = find_place()
        if place.node > 0:
            return follow(origin, place)
        if not (origin / "config.yaml").exists():
            raise ValueError(f"{origin}: node 0 ({host_name()}) sees no config.yaml there; is it on its disks?")
        folder.mkdir(parents=True, exist_ok=True)
        with own(folder):
            return lead(read_frozen(origin), folder, place)
    except (ValueError, OSError, RuntimeError) as error:
        has_lost_another = type(error).__name__ in LOST_CONNECTION
        if isinstance(error, RuntimeError) and not has_lost_another:
            raise
        print(f"node: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if has_lost_another else 2


def find_place() -> Place:
    """This node among those of the job, by what the scheduler put into the environment."""
    if "JOB_COMPLETION_INDEX" in os.environ:
        return place_of_pod(int(os.environ["JOB_COMPLETION_INDEX"]))
    if "SLURM_STEP_NODELIST" not in os.environ:
        raise ValueError("SLURM_STEP_NODELIST: not set; this command is for a job's file, under srun or Kubernetes")
    count = int(os.environ["SLURM_STEP_NUM_NODES"])
    return place_of_step(int(os.environ["SLURM_NODEID"]), count) if count > 1 else Place()


def lead(config: ResolvedConfig, folder: Path, place: Place) -> int:
    """Node 0: wait for the others, give them the config, run, and record how it ended."""
    before = _checkpoints(folder)
    prepare(config, folder)
    rendezvous = None
    if place.nodes > 1:
        try:
            rendezvous = _meet(place, config.parallel.start_timeout)
            check_nodes(config, all_facts(rendezvous.store, place.nodes))
        except (ValueError, RuntimeError) as error:
            record_end(config, folder, "failed", str(error))
            if rendezvous is not None:
                refuse_others(rendezvous.store, place.nodes)
            raise
        share_config(rendezvous.store, folder)
    ended = run_ranks(config, folder, rendezvous)
    if rendezvous is not None and ended.exit_codes and ended.signal is None:
        _wait_for_cause(_of_ranks(rendezvous.store), folder, config.parallel.devices)
    code = conclude(config, folder, ended)
    lost = code == 1 and first_failure(folder, ended)["exception"] == "NodeLost"
    return NODE_LOST if lost and _checkpoints(folder) != before else code


def follow(origin: Path, place: Place) -> int:
    """Another node: run what node 0 says, and tell it of ranks that could not speak for themselves."""
    seen = (origin / "config.yaml").exists()  # not where disks are not shared
    rendezvous = _meet(place, (read_frozen(origin) if seen else Config()).parallel.start_timeout)
    taken = take_config(rendezvous.store, place.node)
    if taken is None:
        return 2
    config, folder = taken
    local = config.parallel.devices // place.nodes  # the nodes have equally many
    for rank in range(place.node * local, (place.node + 1) * local):
        failure_file(folder, rank).unlink(missing_ok=True)  # of an earlier attempt, on this node's own disk
    ended = run_ranks(config, folder, rendezvous)
    if ended.signal is not None:
        return 128 + ended.signal
    if ended.exit_codes:
        _tell_of_exit_codes(_of_ranks(rendezvous.store), folder, ended)
        print(where_logs_are(place.node, folder), file=sys.stderr, flush=True)
    return int(bool(ended.exit_codes))


def _meet(place: Place, seconds: float) -> Rendezvous:
    with imports_without_collector():
        import torch.distributed  # noqa: F401  # which a rendezvous needs
    rendezvous = Rendezvous(place, seconds)
    tell_facts(rendezvous.store, place.node, place.node)
    return rendezvous


def _of_ranks(store: Store) -> Store:
    """The keys of the ranks themselves, who never start again within a job (launch/rendezvous.py: open_store)."""
    from torch.distributed import PrefixStore

    return PrefixStore("attempt_0", store)


def _tell_of_exit_codes(store: Store, folder: Path, ended: Ended) -> None:
    """Tell node 0 of ranks that were killed, and of those that left without a record."""
    for rank, code in ended.exit_codes.items():
        if not failure_file(folder, rank).exists() and code not in ENDED_BY_AGENT:
            record = failure_of_exit_code(folder, rank, code, ended.oom_kills)
            publish_failure(store, {**record, "reason": f"{record['reason']} on {host_name()}"})


def _wait_for_cause(store: Store, folder: Path, world_size: int) -> None:
    """Wait until it is known why this node's ranks have lost the others, or until nobody will tell any more."""
    until = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < until:
        fetch_failures(store, folder, world_size)
        if cause_is_known(folder):
            return
        time.sleep(ANSWER_SECONDS / 20)


def _checkpoints(folder: Path) -> set[tuple[str, float]]:
    return {(path.name, path.stat().st_mtime) for path in (folder / "checkpoints").glob("*.pt")}


if __name__ == "__main__":
    # The config's folder is the run folder, unless a second is given.
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[-1])))
