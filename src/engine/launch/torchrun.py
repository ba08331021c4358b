"""Ranks that somebody else started (torchrun): rank 0 composes, the others receive its config and run folder.

Every rank composing for itself is what breaks folders and sweeps elsewhere: as many folders, and configs, as ranks.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.config.compose import read_frozen
from src.engine.launch.supervisor import Ended
from src.engine.machine.files import write_text
from src.engine.machine.ranks import Ranks, open_store
from src.schema import Config

if TYPE_CHECKING:
    from torch.distributed import Store

    from src.engine.launch.rank import Run

KEY = "run_folder"


def lead(run: Run, config: Config, folder: Path, ranks: Ranks) -> int:
    """Rank 0: prepare the run folder, tell the others, and run. Returns the exit code."""
    from src.engine.launch.job import prepare

    prepare(config, folder)
    _remember(folder, config)
    store = open_store(ranks)
    store.set(KEY, json.dumps({"folder": str(folder.resolve()), "config": (folder / "config.yaml").read_text()}))
    return _run_and_say(run, config, folder, ranks, store)


def _run_and_say(run: Run, config: Config, folder: Path, ranks: Ranks, store: Store) -> int:
    """Run this rank; where it ends badly, do what launch/job.py does under python: the rank that failed first tells."""
    from src.engine.launch.failure import first_failure
    from src.engine.launch.job import conclude
    from src.engine.launch.rank import run_rank

    console = os.fdopen(os.dup(2), "w")  # ranks other than 0 send their own output to their log
    code = run_rank(run, config, folder, ranks, store, lambda: conclude(config, folder, Ended(), console))
    if code > 128 and ranks.is_first:
        return conclude(config, folder, Ended(signal=code - 128), console)
    if 0 < code < 128:
        time.sleep(1)  # for the records of ranks that fail at the same time
        if first_failure(folder, Ended()).get("rank") == ranks.rank:
            return conclude(config, folder, Ended(), console)
    return code


def refuse_followers(reason: str, ranks: Ranks) -> None:
    """Rank 0 has refused the command line: tell the others, which wait for a folder."""
    if ranks.world_size > 1:
        store = open_store(ranks)
        store.set(KEY, json.dumps({"refused": reason}))
        store.set(f"{KEY}/told/0", "")
        store.wait([f"{KEY}/told/{rank}" for rank in range(ranks.world_size)], timedelta(seconds=10))


def follow(run: Run, ranks: Ranks) -> int:
    """A rank other than 0: wait for rank 0's config and run. Returns the exit code."""
    store = open_store(ranks)
    message = json.loads(store.get(KEY))
    if "refused" in message:
        store.set(f"{KEY}/told/{ranks.rank}", "")
        return 2
    folder = Path(message["folder"])
    if not (folder / "config.yaml").exists():  # another machine without a shared file system: its logs stay there
        write_text(folder / "config.yaml", message["config"])
    return _run_and_say(run, read_frozen(folder), folder, ranks, store)


def remembered_folder(ranks: Ranks | None, config: Config) -> Path | None:
    """The run folder of this job's earlier attempt, after the agent has restarted the ranks."""
    path = _note(config)
    if ranks is None or ranks.restart_count == 0 or not path.exists():
        return None
    return Path(path.read_text(encoding="utf-8"))


def _remember(folder: Path, config: Config) -> None:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        write_text(_note(config), str(folder.resolve()))


def _note(config: Config) -> Path:
    """Keyed by the agent: its run id is `none` unless given, so the agent's process stands beside it."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    agent = f"{socket.gethostname()}-{os.getppid()}" if run_id == "none" else run_id
    return Path(config.paths.output_dir) / ".restarts" / f"{agent}.txt"
