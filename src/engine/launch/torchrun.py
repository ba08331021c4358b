"""Ranks that somebody else started (torchrun, srun): rank 0 composes, the others receive its config and run folder.

Every rank composing for itself is what breaks folders and sweeps elsewhere: as many folders, and configs, as ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from src.engine.config.compose import read_frozen
from src.engine.launch.failure import first_failure
from src.engine.launch.job import conclude, prepare
from src.engine.launch.nodes import all_facts, fit_to_nodes, own_facts, tell_facts
from src.engine.launch.rank import RankMain, run_rank
from src.engine.launch.rendezvous import listen_towards, open_store
from src.engine.launch.supervisor import Ended, run_agent
from src.engine.machine.files import write_text
from src.engine.machine.process import no_survivors
from src.engine.machine.ranks import Ranks, host_name, machine_id
from src.schema import ParallelConfig, ResolvedConfig, ResolvedParallel

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "run_folder"


def agree(config: ResolvedConfig, asked: ParallelConfig, ranks: Ranks) -> None:
    """Rank 0, before there is a folder: fit a resolved config to all nodes."""
    _refuse_elastic_nodes()
    _advise_on_signals()
    store = open_store(ranks)
    tell_facts(store, ranks.rank, own_facts(ranks.node, ranks.local_world_size))
    fit_to_nodes(config, asked, all_facts(store, ranks.world_size))


def lead(run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks) -> int:
    """Rank 0: prepare the run folder, tell the others, and run. Returns the exit code."""
    prepare(config, folder)
    _remember(folder, config)
    store = open_store(ranks)
    store.set(KEY, json.dumps({"folder": str(folder.resolve()), "config": (folder / "config.yaml").read_text()}))
    return _run_and_say(run, config, folder, ranks, store)


def _run_and_say(run: RankMain, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store) -> int:
    """Run this rank; where it ends badly, do what launch/job.py does under python: the rank that failed first tells."""
    console = os.fdopen(os.dup(2), "w")  # ranks other than 0 send their own output to their log
    if ranks.nodes > 1:
        os.environ.update(listen_towards(os.environ.get("MASTER_ADDR", "")))

    def report_end(ended: Ended) -> int:
        if ranks.node == 0:
            return conclude(config, folder, ended, console)
        if ranks.is_first_of_node:
            print(where_logs_are(ranks, folder), file=console, flush=True)
        return 1

    code = run_rank(run, config, folder, ranks, store, lambda: report_end(Ended()))
    if code > 128 and ranks.is_first:
        return report_end(Ended(signal=code - 128))
    if 0 < code < 128:
        time.sleep(1)  # for the records of ranks that fail at the same time
        own = first_failure(folder, Ended()).get("rank") == ranks.rank
        if own if ranks.nodes == 1 else ranks.is_first_of_node:
            report_end(Ended())
    return code


def where_logs_are(ranks: Ranks, folder: Path) -> str:
    """What a node other than the first says when the run has failed; the first has the records."""
    return f"Node {ranks.node} ({host_name()}) ends with the run; its logs are in {host_name()}:{folder / 'logs'}"


def refuse_followers(reason: str, ranks: Ranks) -> None:
    """Rank 0 has refused the command line: tell the others, which wait for a folder."""
    if ranks.world_size > 1:
        store = open_store(ranks)
        store.set(KEY, json.dumps({"refused": reason}))
        store.set(f"{KEY}/told/0", "")
        with suppress(RuntimeError):  # one is late: it finds no rank 0, and leaves
            store.wait([f"{KEY}/told/{rank}" for rank in range(ranks.world_size)], timedelta(seconds=10))


def follow(run: RankMain, ranks: Ranks) -> int:
    """A rank other than 0: wait for rank 0's config and run. Returns the exit code."""
    store = open_store(ranks)
    tell_facts(store, ranks.rank, own_facts(ranks.node, ranks.local_world_size))
    message = json.loads(store.get(KEY))
    if "refused" in message:
        store.set(f"{KEY}/told/{ranks.rank}", "")
        return 2
    folder = Path(message["folder"])
    keep_config(folder, message["config"])
    return _run_and_say(run, read_frozen(folder), folder, ranks, store)


def keep_config(folder: Path, text: str) -> None:
    """Node 0's config.yaml, where its disk is not shared: this node's logs go to a folder of the same name."""
    path = folder / "config.yaml"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made on {host_name()}, for its logs ({error.strerror})") from None


def remembered_folder(ranks: Ranks | None, config: ResolvedConfig) -> Path | None:
    """The run folder of this job's earlier attempt, after the agent has restarted the ranks."""
    path = _note(config)
    if ranks is None or ranks.restart_count == 0 or not path.exists():
        return None
    return Path(path.read_text(encoding="utf-8"))


def _remember(folder: Path, config: ResolvedConfig) -> None:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        write_text(_note(config), str(folder.resolve()))


def _note(config: ResolvedConfig) -> Path:
    """Named after the agent's run id, or after its process: the id is `none` unless it was given."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    agent = f"{machine_id().split()[0]}-{os.getppid()}" if run_id == "none" else run_id
    return Path(config.paths.output_dir) / ".restarts" / f"{agent}.txt"


def _refuse_elastic_nodes() -> None:
    """`torchrun --nnodes 1:2` starts the ranks again when a node comes or goes, and counts no restart: two attempts
    would meet under the same keys."""
    nnodes = os.environ.get("PET_NNODES", "1")
    for argument, following in itertools.pairwise([*_torchrun_arguments(), ""]):
        option, _, value = argument.partition("=")
        if option in ("--nnodes", "-nnodes"):
            nnodes = value or following
    least, _, most = nnodes.partition(":")
    if most and most != least:
        raise ValueError(f"--nnodes={nnodes}: a run has one number of nodes; give torchrun --nnodes={most}")


def _torchrun_arguments() -> list[str]:
    """Those before train.py; empty where they are not known."""
    try:
        arguments = psutil.Process(os.getppid()).cmdline() if "TORCHELASTIC_RUN_ID" in os.environ else []
    except psutil.Error:
        return []
    return list(itertools.takewhile(lambda argument: not argument.endswith("train.py"), arguments))


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
    by_the_agent = (-signal.SIGTERM, 128 + signal.SIGTERM)  # which ends the others of a rank that has failed
    own = {rank: code for rank, code in ended.exit_codes.items() if code not in by_the_agent}
    for rank, code in own.items():
        if code < 0:  # what else has gone wrong, the rank has said
            print(f"{Path(script).name}: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    codes = (own or ended.exit_codes).values()
    return max((code if code > 0 else 128 - code for code in codes), default=0)
