"""Launcher on one node of a Slurm or Kubernetes job: `python -m timm_parallel.launch.node <app>
<run folder>`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.app import find_app
from timm_parallel.cluster.kubernetes import address_of_pod
from timm_parallel.cluster.slurm import NODE_LOST, WARNED, address_of_step
from timm_parallel.config.compose import load_config
from timm_parallel.faults import failure
from timm_parallel.faults.failure import publish_failure, published_failures
from timm_parallel.keys import Config, ResolvedConfig
from timm_parallel.launch.job import conclude, prepare, record_end, run_ranks, run_until_it_fits
from timm_parallel.launch.rendezvous import (
    POLL_SECONDS,
    Rendezvous,
    check_nodes,
    collect_inventories,
    publish_inventory,
    ranks_store,
    receive_config,
    refuse_others,
    share_config,
)
from timm_parallel.launch.torchrun import node_end
from timm_parallel.machine.files import is_locked, lock_folder, owner_of, write_text
from timm_parallel.machine.ranks import NodeAddress, host_name
from timm_parallel.machine.signals import Stopped, signal_handlers, stop_handler

if TYPE_CHECKING:
    from torch.distributed import Store

# Node 0 waits for an earlier attempt of the job, and the other nodes wait for node 0. Node 0 gives
# up this many seconds before the other nodes do.
LEAVE_FIRST_SECONDS = 60.0
# Seconds that node 0 waits for the launcher of another node to report a killed rank. That launcher
# reports when all ranks of its node have exited, at about the same time as those of node 0.
REPORT_SECONDS = 4.0


# Install the signal handler before the ranks start, because SIGUSR1 would otherwise end this
# process without a record.
@signal_handlers(stop_handler)
def main(folder: Path, origin: Path) -> int:
    """Run the ranks of this node in a run folder, as part of a Slurm or Kubernetes job. Return the
    exit code of train.py, or NODE_LOST if the job should be queued again.

    `folder`: the run folder. `origin`: the folder with the config.yaml to run, which node 0 copies
    to the run folder.
    """
    try:
        address = find_address()
        if address.node > 0:
            return run_follower_node(origin, address)
        config = load_config(origin)
        folder.mkdir(parents=True, exist_ok=True)
        if not _earlier_start_has_ended(folder, config.parallel.start_timeout):
            return NODE_LOST
        with lock_folder(folder):
            if origin != folder:
                # Copy config.yaml as text, so that references to environment variables stay
                # unresolved.
                write_text(
                    folder / "config.yaml", (origin / "config.yaml").read_text(encoding="utf-8")
                )
            return run_node_zero(config, folder, address)
    except Stopped as stop:
        return 128 + stop.number
    except (ValueError, OSError, RuntimeError) as error:
        lost_another = type(error).__name__ in failure.LOST_CONNECTION
        if isinstance(error, RuntimeError) and not lost_another:
            raise
        print(f"node: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if lost_another else 2


def _earlier_start_has_ended(folder: Path, start_timeout: float) -> bool:
    """Wait while an earlier attempt of this Slurm job holds the lock of the run folder. Return
    False if the lock is still held after start_timeout minus LEAVE_FIRST_SECONDS.
    """
    # Wait only for an earlier attempt of the same job, whose processes outlive a slurmd daemon that
    # died. Give up before the other nodes do, which wait for start_timeout.
    same_job = f" of Slurm job {os.environ.get('SLURM_JOB_ID')}"
    if not _is_restart() or not is_locked(folder) or not owner_of(folder).endswith(same_job):
        return True
    seconds = max(0.0, start_timeout - LEAVE_FIRST_SECONDS)
    in_use = f"node: {folder}: in use by {owner_of(folder)}, an earlier start of this job"
    print(
        f"{in_use}; waiting up to {seconds:.0f} s for that process to exit",
        file=sys.stderr,
        flush=True,
    )
    deadline = time.monotonic() + seconds
    while is_locked(folder):
        if time.monotonic() > deadline:
            print(
                f"{in_use}, still after {seconds:.0f} s; Slurm queues this job again",
                file=sys.stderr,
            )
            return False
        time.sleep(POLL_SECONDS)
    return True


def _is_restart() -> bool:
    """Return True if Slurm has started this job before, so that this is a requeued attempt."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def find_address() -> NodeAddress:
    """Read the number of this node, and the address of the key-value store on node 0, from
    environment variables of Slurm or of the Kubernetes pod.
    """
    if "JOB_COMPLETION_INDEX" in os.environ:
        return address_of_pod(int(os.environ["JOB_COMPLETION_INDEX"]))
    count = int(os.environ["SLURM_STEP_NUM_NODES"])
    return address_of_step(int(os.environ["SLURM_NODEID"]), count) if count > 1 else NodeAddress()


def run_node_zero(config: ResolvedConfig, folder: Path, address: NodeAddress) -> int:
    """Run a job's ranks on node 0: wait for the other nodes, send them the config, run the ranks of
    this node, and complete result.json. Return the exit code.
    """
    checkpoints_before = _checkpoints(folder)
    prepare(config, folder)
    rendezvous = None
    if address.nodes > 1:
        try:
            rendezvous = _meet(address, config.parallel.start_timeout)
            inventories = collect_inventories(
                rendezvous.store, address.nodes, config.parallel.start_timeout, "node"
            )
            check_nodes(config, inventories)
        except (ValueError, RuntimeError) as error:
            record_end(config, folder, "failed", str(error))
            if rendezvous is not None:
                refuse_others(rendezvous.store, address.nodes, str(error))
            raise
        share_config(rendezvous.store, folder)
    try:
        config, ended = run_until_it_fits(config, folder, rendezvous=rendezvous)
    # A stop signal arrived before the first rank started, so no rank has an exit code.
    except Stopped as stop:
        ended = failure.RankExits(signal=stop.number)
    if rendezvous is not None and ended.exit_codes and ended.signal is None:
        own = set(ended.exit_codes.values()) - set(failure.ENDED_BY_AGENT)
        was_killed = any(code < 0 for code in own)
        ended.records = _wait_for_cause(
            ranks_store(rendezvous.store, 0),
            folder,
            config.parallel.devices,
            0.0 if was_killed else REPORT_SECONDS,
        )
    code = conclude(config, folder, ended)
    has_progress = _checkpoints(folder) != checkpoints_before
    if code == WARNED and _is_restart() and not has_progress:
        reason = (
            f"cluster.time={config.cluster.time}: second warning without a newer checkpoint, so "
            "the job is not queued again; raise cluster.time, or lower cluster.signal_seconds"
        )
        record_end(config, folder, "failed", reason)
        print(f"Failed: {reason}", file=sys.stderr)
        return 1
    if (
        code == 1
        and has_progress
        and failure.first_failure(folder, ended)["exception"] == "NodeLost"
    ):
        return NODE_LOST
    return code


def run_follower_node(origin: Path, address: NodeAddress) -> int:
    """Run a job's ranks on a node other than 0, which receives the config from node 0. No shared
    disk is needed. Return the exit code.
    """
    # A node without a shared disk does not have the config yet. It waits for the default
    # start_timeout.
    config = load_config(origin) if (origin / "config.yaml").exists() else Config()
    rendezvous = _meet(address, config.parallel.start_timeout)
    config, folder = receive_config(rendezvous.store, address.node)
    # Delete failure records that an earlier attempt left on the disk of this node.
    ranks_per_node = config.parallel.devices // address.nodes
    for rank in range(address.node * ranks_per_node, (address.node + 1) * ranks_per_node):
        failure.failure_file(folder, rank).unlink(missing_ok=True)
    ended = run_ranks(config, folder, rendezvous)
    if ended.signal is not None:
        # Return 1 in place of WARNED. Only node 0 decides whether Slurm queues the job again, and
        # srun returns the highest exit code of all nodes.
        code = 128 + ended.signal
        return 1 if code == WARNED else code
    if not ended.exit_codes:
        return 0
    # Publish a failure record for each rank that was killed or exited without a record, because
    # such a rank cannot publish one itself.
    for rank, code in ended.exit_codes.items():
        if not failure.failure_file(folder, rank).exists() and code not in failure.ENDED_BY_AGENT:
            record = failure.failure_of_exit_code(folder, rank, code, ended.oom_kills)
            record["reason"] += f" on {host_name()}"
            publish_failure(ranks_store(rendezvous.store, 0), record)
    print(node_end(address.node, folder, ended), file=sys.stderr, flush=True)
    return 1


def _meet(address: NodeAddress, seconds: float) -> Rendezvous:
    """Connect this node to the key-value store that node 0 creates. Publish the hardware of this
    node in the store. `seconds`: time to wait for node 0.
    """
    rendezvous = Rendezvous(address, seconds)
    publish_inventory(rendezvous.store, address.node, address.node, arguments=[])
    return rendezvous


def _wait_for_cause(
    store: Store, folder: Path, world_size: int, seconds: float
) -> list[dict[str, Any]]:
    """Wait up to `seconds` until a rank, or the launcher of a killed one, has published a failure
    other than a lost connection. Return all failure records that were published.
    """
    deadline = time.monotonic() + seconds
    while True:
        records = published_failures(store, world_size)
        is_known = failure.cause_is_known(folder) or not all(each["is_echo"] for each in records)
        if is_known or time.monotonic() > deadline:
            return records
        time.sleep(POLL_SECONDS / 4)


def _checkpoints(folder: Path) -> set[str]:
    """Return the file names of a run's checkpoints. The names contain the step, so a new name shows
    that the run made progress.
    """
    return {path.name for path in (folder / "checkpoints").glob("*.pt")}


if __name__ == "__main__":
    # Read config.yaml from the run folder, unless the command line names a second folder.
    find_app(sys.argv[1])
    sys.exit(main(Path(sys.argv[2]), Path(sys.argv[-1])))
