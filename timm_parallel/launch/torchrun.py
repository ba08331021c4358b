"""Runs whose ranks torchrun or srun started. Rank 0 composes the config and sends it to the other
ranks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from timm_parallel.faults.failure import ENDED_BY_AGENT, RankExits, first_failure
from timm_parallel.faults.heartbeat import published_failures
from timm_parallel.keys import ParallelConfig, ResolvedConfig, ResolvedParallel
from timm_parallel.launch import rendezvous
from timm_parallel.launch.job import conclude, prepare
from timm_parallel.launch.rank import RankMain, run_rank
from timm_parallel.launch.rendezvous import open_store
from timm_parallel.launch.supervisor import run_agent
from timm_parallel.machine.files import RunFolder
from timm_parallel.machine.process import kill_on_parent_exit, terminate_descendants
from timm_parallel.machine.ranks import Ranks, host_name, ranks_from_environment

if TYPE_CHECKING:
    from torch.distributed import Store

# Key under which the key-value store holds the path of the run folder, for ranks that torchrun
# restarts.
FOLDER = "run_folder"


def negotiate(config: ResolvedConfig, asked: ParallelConfig, ranks: Ranks) -> None:
    """Wait on rank 0 for the hardware descriptions of all ranks. Set the numbers of nodes and
    threads in a resolved config to values that fit all ranks. Raises ValueError if the hardware
    cannot run the config. `asked`: the `parallel` keys as the user gave them.
    """
    _refuse_elastic_nodes()
    store = open_store(ranks)
    _publish_inventory_of(ranks, store)
    inventories = rendezvous.collect_inventories(
        store, ranks.world_size, config.parallel.start_timeout
    )
    rendezvous.fit_to_nodes(config, asked, inventories)


def _publish_inventory_of(ranks: Ranks, store: Store) -> None:
    is_compared = ranks.nodes > 1 and ranks.is_first_of_node
    # Compare the number of nodes too. Agents with different --nnodes would train with the value of
    # node 0 and then wait for each other.
    arguments = [f"--nnodes={ranks.nodes}", *sys.argv[1:]] if is_compared else None
    rendezvous.publish_inventory(store, ranks.rank, ranks.node, ranks.local_world_size, arguments)


def run_rank_zero(run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks) -> int:
    """Write the files of the run folder, send the config to the other ranks, and train as rank 0.
    Return the exit code. `run`: function that trains one rank.
    """
    prepare(config, folder)
    store = open_store(ranks)
    store.underlying_store.set(FOLDER, str(folder.resolve()))
    rendezvous.share_config(store, folder.resolve())
    return _run_and_report(run, config, folder, ranks, store)


def _run_and_report(
    run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store
) -> int:
    """Train as this rank and return the exit code.

    If a run on one node fails, the rank that failed first completes result.json and prints the
    failure. With several nodes, the first rank of node 0 does this, and the first rank of each
    other node prints one line.
    """
    # Keep the console open, because ranks other than 0 redirect stderr to their log file.
    console = os.fdopen(os.dup(2), "w")
    place = RunFolder(folder)

    def failed() -> RankExits:
        # Read the key-value store on node 0 only, because other nodes may have lost the connection
        # to it.
        records = published_failures(store, ranks.world_size) if ranks.node == 0 else []
        return RankExits(folder_problem=place.problem if place.is_gone() else "", records=records)

    def report_end(ended: RankExits) -> int:
        if ranks.node == 0:
            return conclude(config, folder, ended, console)
        if ranks.is_first_of_node:
            print(node_end(ranks.node, folder, ended), file=console, flush=True)
        return 1

    code = run_rank(run, config, folder, ranks, store, lambda: report_end(failed()))
    if code > 128 and ranks.is_first:
        return report_end(replace(failed(), signal=code - 128))
    if 0 < code < 128:
        # Wait for the failure records of ranks that fail at the same time.
        time.sleep(1)
        ended = failed()
        rank = first_failure(folder, ended)["rank"]
        failed_first = ranks.is_first if rank is None else ranks.rank == rank
        if failed_first if ranks.nodes == 1 else ranks.is_first_of_node:
            report_end(ended)
    return code


def node_end(node: int, folder: Path, ended: RankExits) -> str:
    """Build the last console line of a failed run on a node other than 0, with the reason and the
    folder of the node's logs.
    """
    return (
        f"Node {node} ({host_name()}) ends with the run: "
        f"{first_failure(folder, ended)['reason']}; its logs are in "
        f"{host_name()}:{folder / 'logs'}"
    )


def refuse_followers(ranks: Ranks, reason: str) -> None:
    """Send the reason why rank 0 rejected the command line to the other ranks, which wait for a
    config. Does nothing for a single rank.
    """
    if ranks.world_size > 1:
        rendezvous.refuse_others(open_store(ranks), ranks.world_size, reason)


def run_follower(run: RankMain, ranks: Ranks) -> int:
    """Wait for the config from rank 0, then train with it as a rank other than 0. Return the exit
    code. `run`: function that trains one rank.
    """
    store = open_store(ranks)
    _publish_inventory_of(ranks, store)
    received = rendezvous.receive_config(store, ranks.rank)
    if not isinstance(received, str):
        return _run_and_report(run, *received, ranks, store)
    if ranks.node > 0 and ranks.is_first_of_node:
        # Raise the reason on the first rank of each other node, so that the node's console shows
        # it. Rank 0 prints the reason on its own node.
        raise ValueError(received)
    return 2


def remembered_folder(ranks: Ranks | None) -> Path | None:
    """Return the run folder that the ranks used before torchrun restarted them. Return None if
    there was no restart.
    """
    if ranks is None or ranks.restart_count == 0:
        return None
    store = open_store(ranks).underlying_store
    return Path(store.get(FOLDER).decode()) if store.check([FOLDER]) else None


def _refuse_elastic_nodes() -> None:
    """Raise ValueError for a variable number of nodes, as in `torchrun --nnodes 1:2`. torchrun does
    not count the restarts of such a run, so a restarted rank would read keys of an earlier attempt
    from the key-value store.
    """
    command = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):
            command = " ".join(psutil.Process(os.getppid()).cmdline())
    given = re.findall(r" --?nnodes[= ](\S+)", command) or [os.environ.get("PET_NNODES", "1")]
    minimum, _, maximum = given[-1].partition(":")
    if maximum not in ("", minimum):
        raise ValueError(
            f"--nnodes={given[-1]}: a variable number of nodes is not supported; use torchrun "
            f"--nnodes={maximum}"
        )


def run_on_devices(
    parallel: ResolvedParallel,
    script: str,
    arguments: list[str],
    work: Callable[[Ranks, Store | None], None],
) -> int:
    """Run the function `work` in each rank, or in this process if the strategy has no ranks, for a
    script such as evaluate.py. Return the exit code.

    If torchrun or srun started this process, it is one of the ranks. Otherwise this function starts
    the script again, as one rank per device of this machine.

    `script`, `arguments`: path and arguments of the script. `work`: function of the rank's identity
    and of the store through which the ranks find each other (None without ranks).
    """
    ranks = ranks_from_environment(os.environ)
    if parallel.has_ranks and ranks is None:
        return start_as_ranks(parallel, script, arguments)
    if ranks is not None:
        kill_on_parent_exit()
    ranks = ranks or Ranks()
    work(ranks, open_store(ranks) if parallel.has_ranks else None)
    return 0


def start_as_ranks(parallel: ResolvedParallel, script: str, arguments: list[str]) -> int:
    """Run a Python script such as evaluate.py as one rank per device of this machine. Return the
    exit code.
    """
    with terminate_descendants(), tempfile.TemporaryDirectory() as scratch:
        ended = run_agent([sys.executable, script, *arguments], parallel, Path(scratch) / "agent")
    if ended.signal is not None:
        return 128 + ended.signal
    failed = {rank: code for rank, code in ended.exit_codes.items() if code not in ENDED_BY_AGENT}
    # Print a line for each rank that was killed by a signal. Any other rank has printed its
    # exception itself.
    for rank, code in failed.items():
        if code < 0:
            print(
                f"{Path(script).name}: rank {rank} was killed by {signal.Signals(-code).name}",
                file=sys.stderr,
            )
    codes = (failed or ended.exit_codes).values()
    return max((code if code > 0 else 128 - code for code in codes), default=0)
