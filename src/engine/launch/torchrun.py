"""Ranks that somebody else started (torchrun, srun): rank 0 composes, the others receive its config and run folder.

Every rank composing for itself is what breaks folders and sweeps elsewhere: as many folders, and configs, as ranks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from src.engine.launch.failure import first_failure
from src.engine.launch.job import conclude, prepare
from src.engine.launch.nodes import all_facts, fit_to_nodes, refuse_others, share_config, take_config, tell_facts
from src.engine.launch.rank import RankMain, run_rank
from src.engine.launch.rendezvous import open_store
from src.engine.launch.supervisor import ENDED_BY_AGENT, Ended, run_agent
from src.engine.machine.process import no_survivors
from src.engine.machine.ranks import Ranks, host_name
from src.schema import ParallelConfig, ResolvedConfig, ResolvedParallel

if TYPE_CHECKING:
    from torch.distributed import Store

FOLDER = "run_folder"  # its key in the store, for the ranks of the next attempt


def agree(config: ResolvedConfig, asked: ParallelConfig, ranks: Ranks) -> None:
    """Rank 0, before there is a folder: fit a resolved config to all nodes."""
    _refuse_elastic_nodes()
    _advise_on_signals()
    store = open_store(ranks)
    tell_facts(store, ranks.rank, ranks.node, ranks.local_world_size)
    fit_to_nodes(config, asked, all_facts(store, ranks.world_size))


def lead(run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks) -> int:
    """Rank 0: prepare the run folder, tell the others, and run. Returns the exit code."""
    prepare(config, folder)
    store = open_store(ranks)
    store.underlying_store.set(FOLDER, str(folder.resolve()))
    share_config(store, folder.resolve())
    return _run_and_say(run, config, folder, ranks, store)


def _run_and_say(run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store) -> int:
    """Run this rank; where it ends badly, do what launch/job.py does under python: the rank that failed first tells."""
    console = os.fdopen(os.dup(2), "w")  # ranks other than 0 send their own output to their log

    def report_end(ended: Ended) -> int:
        if ranks.node == 0:
            return conclude(config, folder, ended, console)
        if ranks.is_first_of_node:
            print(where_logs_are(ranks.node, folder), file=console, flush=True)
        return 1

    code = run_rank(run, config, folder, ranks, store, lambda: report_end(Ended()))
    if code > 128 and ranks.is_first:
        return report_end(Ended(signal=code - 128))
    if 0 < code < 128:
        time.sleep(1)  # for the records of ranks that fail at the same time
        own = first_failure(folder, Ended())["rank"] == ranks.rank
        if own if ranks.nodes == 1 else ranks.is_first_of_node:
            report_end(Ended())
    return code


def where_logs_are(node: int, folder: Path) -> str:
    """What a node other than the first says when the run has failed; the first has the records."""
    return f"Node {node} ({host_name()}) ends with the run; its logs are in {host_name()}:{folder / 'logs'}"


def refuse_followers(ranks: Ranks) -> None:
    """Rank 0 has refused the command line: tell the others, which wait for a folder."""
    if ranks.world_size > 1:
        refuse_others(open_store(ranks), ranks.world_size)


def follow(run: RankMain, ranks: Ranks) -> int:
    """A rank other than 0: wait for rank 0's config and run. Returns the exit code."""
    store = open_store(ranks)
    tell_facts(store, ranks.rank, ranks.node, ranks.local_world_size)
    taken = take_config(store, ranks.rank)
    return 2 if taken is None else _run_and_say(run, *taken, ranks, store)


def remembered_folder(ranks: Ranks | None) -> Path | None:
    """The run folder of this job's earlier attempt, after the agent has restarted the ranks: its store outlives them."""
    if ranks is None or ranks.restart_count == 0:
        return None
    store = open_store(ranks).underlying_store
    return Path(store.get(FOLDER).decode()) if store.check([FOLDER]) else None


def _refuse_elastic_nodes() -> None:
    """`torchrun --nnodes 1:2` starts the ranks again when a node comes or goes, and counts no restart: two attempts
    would meet under the same keys."""
    command = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):
            command = " ".join(psutil.Process(os.getppid()).cmdline())
    given = re.findall(r" --?nnodes[= ](\S+)", command) or [os.environ.get("PET_NNODES", "1")]
    nnodes = given[-1]
    least, _, most = nnodes.partition(":")
    if most and most != least:
        raise ValueError(f"--nnodes={nnodes}: a run has one number of nodes; give torchrun --nnodes={most}")


def _advise_on_signals() -> None:
    """Slurm warns with USR1; torchrun dies of it at once unless told to hand it on."""
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    if handled is not None and "SIGUSR1" not in handled and "SLURM_JOB_ID" in os.environ:
        print(
            "torchrun ends without a checkpoint when Slurm warns it with USR1; give it "
            f"--signals-to-handle {handled},SIGUSR1, or use python train.py cluster=slurm",
            file=sys.stderr,
        )


def start_as_ranks(parallel: ResolvedParallel, script: str, arguments: list[str]) -> int:
    """For commands beside train.py: run `script` once per device of this machine, as ranks. Returns the exit code."""
    with no_survivors(), tempfile.TemporaryDirectory() as scratch:
        ended = run_agent([sys.executable, script, *arguments], parallel, Path(scratch) / "agent")
    if ended.signal is not None:
        return 128 + ended.signal
    own = {rank: code for rank, code in ended.exit_codes.items() if code not in ENDED_BY_AGENT}
    for rank, code in own.items():
        if code < 0:  # what else has gone wrong, the rank has said
            print(f"{Path(script).name}: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    codes = (own or ended.exit_codes).values()
    return max((code if code > 0 else 128 - code for code in codes), default=0)
