"""Failure records. Each rank that fails writes one. The launcher finds the rank that failed first,
and prints its record.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.config.resolve import halve_batches
from timm_parallel.errors import (
    ConnectError,
    NotFiniteError,
    RefusedError,
    UnreadableImageError,
    UnsentBatchError,
)
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.files import GONE, write_json
from timm_parallel.machine.ranks import Ranks, host_name
from timm_parallel.machine.secrets import hide_in
from timm_parallel.machine.text import for_terminal

if TYPE_CHECKING:
    from torch.distributed import Store

# Environment variable with a file descriptor, to which the only rank of a run writes its failure
# record for the launcher.
REPORT = "RUN_FAILURE_DESCRIPTOR"
# Exit codes of ranks that torch's agent ended because another rank had failed.
ENDED_BY_AGENT = (-signal.SIGTERM, 128 + signal.SIGTERM)
# Text in torch's message about an operation without deterministic algorithm.
NOT_DETERMINISTIC = " does not have a deterministic implementation"
# Value of `exception` in the failure record of a lost node, in place of an exception's name.
NODE_LOST = "NodeLost"
# Seconds for the key-value store to accept a failure record.
PUBLISH = 2.0
LOST_CONNECTION = ("DistBackendError", "DistNetworkError", "DistStoreError")
# gloo raises a plain RuntimeError. Its messages contain the path of a source file of gloo, or the
# name of the operation.
GLOO = re.compile(r"third_party[/\\]gloo|Gloo connect")
# Texts in out-of-memory messages of torch, the C++ library, the kernel, cuBLAS and cuDNN.
# NO_HOST_MEMORY is for memory of the machine, NO_DEVICE_MEMORY for memory of a device.
NO_HOST_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "cannot allocate memory",
    "host_allocation_failed",
)
NO_DEVICE_MEMORY = ("out of memory", "alloc_failed", "device_allocation_failed")
# Texts in torch's messages that contain the number of the full device: of the allocator, and of a
# replica of DataParallel.
FULL_DEVICE = re.compile(r"GPU (\d+) has a total capacity|in replica \d+ on device (\d+)")


@dataclass
class RankExits:
    """Record of how the ranks of this node ended. `exit_codes` is a dictionary from rank to exit
    code, without ranks that exited with 0. A negative code is the number of the signal that killed
    the rank.
    """

    # Signal that stopped this launcher or all of its ranks; None if there was none.
    signal: int | None = None
    exit_codes: dict[int, int] = field(default_factory=dict)
    # Number of ranks, which have all ended. 0 if other nodes have ranks too.
    world_size: int = 0
    # Number of processes on this machine that the kernel killed for lack of memory during the run.
    oom_kills: int = 0
    # Message if the run folder was deleted or moved, otherwise empty.
    folder_problem: str = ""
    # Failure records that were sent through memory, because a full disk takes no files.
    records: list[dict[str, Any]] = field(default_factory=list)


def record_of(rank: int | None, folder: Path, reason: str, **changes: Any) -> dict[str, Any]:
    """Build the failure record of a rank on this host. `reason`: the text for the user. `changes`:
    values of further fields, in place of their defaults.
    """
    return {
        "rank": rank,
        "host": host_name(),
        "attempt": 0,
        "time": time.time(),
        "status": "failed",
        "reason": reason,
        "exception": "",
        "traceback": None,
        # False if the console shows only the reason. The log file has the traceback in any case.
        "shows_traceback": True,
        "log": None if rank is None else str(log_file(folder, rank)),
        "is_echo": False,
        "exit_code": 1,
        **changes,
    }


def failure_record(
    error: Exception, config: ResolvedConfig, ranks: Ranks, folder: Path
) -> dict[str, Any]:
    """Build the failure record of this rank for an exception. Must be called in an `except` block,
    because the record contains the current traceback.
    """
    kind = type(error).__name__
    # An error of a loader worker has its class in its message already.
    text = _one_line(error).removeprefix(f"{type(error).__module__}.{kind}: ")
    is_of_user = isinstance(error, RefusedError | UnreadableImageError | UnsentBatchError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if is_of_user else f" ({Path(last.filename).name}:{last.lineno})"
    record = record_of(
        ranks.rank,
        folder,
        f"{ranks.name}: {kind}: {text}{place}",
        attempt=ranks.restart_count,
        exception=kind,
        traceback=traceback.format_exc(),
        shows_traceback=not is_of_user,
    )
    if isinstance(error, RefusedError):
        record |= {"status": "refused", "reason": text, "exit_code": 2}
    elif isinstance(error, NotFiniteError):
        record |= {"status": "not_finite", "reason": text}
    elif (device := _full_device(error, text, config.parallel.accelerator)) is not None:
        record |= {
            "status": "out_of_memory",
            "reason": _out_of_memory(text, device, config, ranks),
            "shows_traceback": False,
        }
    elif NOT_DETERMINISTIC in text:
        record["reason"] += "; set train.deterministic=false, or use another model"
    elif "DataLoader worker" in text:
        record["reason"] += (
            "; the kernel may have killed a loader worker for lack of memory; lower data.workers"
        )
    elif isinstance(error, ConnectError):
        # Mark the record as a consequence (is_echo), because the cause may be another rank that was
        # killed.
        record |= {
            "is_echo": True,
            "reason": f"{ranks.name} could not connect to the other ranks: {text}",
        }
    elif kind in LOST_CONNECTION or (kind == "RuntimeError" and GLOO.search(text)):
        record |= {
            "is_echo": True,
            "reason": f"{ranks.name} lost its connection to another rank, which has exited: "
            f"{kind}: {text}",
        }
    return record


def write_failure(folder: Path, record: dict[str, Any]) -> None:
    """Write a failure record as a file into the logs of a run. A full disk is ignored, because the
    launcher also receives the record through memory or the key-value store.
    """
    path = failure_file(folder, record["rank"])
    with suppress(OSError):
        # Create only the folder of the logs. Its parents may be missing because the run folder was
        # deleted.
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)


@cache
def report_descriptor() -> int | None:
    """Return the file descriptor to which this rank writes its failure record, from the environment
    variable REPORT; None if the variable is not set. The variable is removed, so that programs that
    this rank starts do not inherit it.
    """
    given = os.environ.pop(REPORT, None)
    return None if given is None else int(given)


def report_failure(record: dict[str, Any]) -> None:
    """Send a failure record to the launcher of a run with one rank. If a run has several ranks,
    they publish the record in their key-value store instead.
    """
    descriptor = report_descriptor()
    if descriptor is not None:
        os.write(descriptor, json.dumps(hide_in(record)).encode() + b"\n")


def reported_failures(descriptor: int) -> list[dict[str, Any]]:
    """Read the failure records that a rank has sent through a file descriptor. The rank must have
    exited.
    """
    lines = os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines()
    return [json.loads(line) for line in lines]


def failure_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"failure_rank_{rank}.json"


def failure_files(folder: Path) -> list[Path]:
    return sorted((folder / "logs").glob("failure_rank_*.json"))


def first_failure(folder: Path, ended: RankExits) -> dict[str, Any]:
    """Return the failure record of the rank that failed first in the latest attempt. If that rank
    wrote no record, build one from its exit code.

    `ended`: how the ranks of this node ended.
    """
    if ended.folder_problem:
        return record_of(None, folder, ended.folder_problem, exception=GONE)
    records = [*_records(folder), *ended.records]
    attempt = max((record["attempt"] for record in records), default=0)
    records = [record for record in records if record["attempt"] == attempt]
    # Sort by the number that the key-value store gave each record, because the clocks of two hosts
    # differ. Lost connections come last, because they follow from another failure.
    records.sort(
        key=lambda record: (record["is_echo"], record.get("order", math.inf), record["time"])
    )
    # First choose the earliest exception that is not a lost connection.
    if records and not records[0]["is_echo"]:
        return records[0]
    codes = dict.fromkeys(range(ended.world_size), 0) | ended.exit_codes
    recorded = {record["rank"] for record in records}
    # Without such an exception, choose a rank that a signal killed (negative code), or a rank that
    # exited without a record, even with code 0. The other ranks then recorded only lost
    # connections.
    for rank, code in sorted(codes.items(), key=lambda item: item[1]):
        if rank not in recorded and code not in ENDED_BY_AGENT:
            return failure_of_exit_code(folder, rank, code, ended.oom_kills)
    # If there is no other failure, choose the earliest lost connection.
    return records[0] if records else record_of(None, folder, "the ranks ended without a result")


def cause_is_known(folder: Path) -> bool:
    """Return True if a rank has written a failure record other than a lost connection, which is
    only the consequence of another failure.
    """
    return any(not record["is_echo"] for record in _records(folder))


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in failure_files(folder)]


def failure_of_exit_code(folder: Path, rank: int, code: int, oom_kills: int) -> dict[str, Any]:
    """Build the failure record of a rank that exited with a code and wrote no record. `oom_kills`:
    number of processes that the kernel killed for lack of memory during the run.
    """
    if code == -signal.SIGKILL and oom_kills:
        reason = (
            f"rank {rank} was killed by the kernel, which ran out of memory; use a smaller "
            "batch or fewer workers"
        )
        return record_of(rank, folder, reason, status="out_of_memory")
    end = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"exited early with exit code {code}"
    )
    return record_of(rank, folder, f"rank {rank} {end}")


def log_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank_{rank}.log"


def failure_text(failure: dict[str, Any]) -> str:
    """Format a failure record for the console: traceback, reason and path of the log file."""
    lines = [f"Failed: {failure['reason']}"]
    if failure["traceback"] and failure["shows_traceback"]:
        lines.insert(0, failure["traceback"].rstrip())
    if failure["log"]:
        lines.append(f"Log: {failure['log']}")
    return for_terminal("\n".join(lines))


def _one_line(error: Exception) -> str:
    """Return the message of an exception in one line of at most 500 characters. For an error in a
    loader worker, return the last line of its traceback.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Caught ") and "Original Traceback" in str(error):
        lines = lines[-1:]
    return " ".join(lines)[:500]


def _full_device(error: Exception, text: str, accelerator: str) -> str | None:
    """Return the device that is out of memory, e.g. `cuda:1`. Return None if the error is not about
    memory. `text`: message of the error. `accelerator`: kind of device of the run.
    """
    kind, text = type(error).__name__, text.lower()
    if kind == "MemoryError" or any(phrase in text for phrase in NO_HOST_MEMORY):
        return "cpu"
    if kind != "OutOfMemoryError" and not any(phrase in text for phrase in NO_DEVICE_MEMORY):
        return None
    if accelerator != "cuda":
        return accelerator
    if (named := FULL_DEVICE.search(str(error))) is not None:
        return f"cuda:{named[1] or named[2]}"
    import torch

    # torch's current device is that of this rank, because the strategy has set it.
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else accelerator


def _out_of_memory(text: str, device: str, config: ResolvedConfig, ranks: Ranks) -> str:
    smaller = ""
    if (half := halve_batches(config)) is not None:
        name = "batch_size" if half.data.batch_size else "batch_size_per_device"
        smaller = (
            f"data.{name}={getattr(half.data, name)} train.accumulate={half.train.accumulate} "
            "(the same training), "
        )
    low = "train.precision=bf16, " if config.train.precision in ("fp32", "tf32") else ""
    return (
        f"{ranks.name}: out of memory on {device} with "
        f"{config.global_batch // config.parallel.devices} images per device: {text[:300]}; try "
        f"{smaller}{low}model.grad_checkpointing=true, or more devices"
    )


def publish_failure(store: Store, record: dict[str, Any]) -> None:
    """Publish a failure record to all nodes through the key-value store. The store numbers the
    records in the order of their arrival, because the clocks of two hosts may differ.
    """

    def publish() -> None:
        with suppress(RuntimeError):
            client, key = store.clone(), f"failure/{record['rank']}"
            # Keep a record that the rank itself has published, because the launcher knows only the
            # exit code.
            if not client.check([key]):
                record["order"] = client.add("failures", 1)
                client.set(key, json.dumps(hide_in(record)))
                client.set("failed", "")
                # Tell the other ranks that a node is lost, because only the first rank of each node
                # watches the other nodes.
                if record.get("exception") == NODE_LOST:
                    client.set("lost", "")

    _try_for_a_while(publish)


def _try_for_a_while(call: Callable[[], object]) -> None:
    """Run a call to a key-value store in a thread, because it may not return behind a broken
    network connection. Return when it has ended, or after PUBLISH seconds.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=PUBLISH)


def fetch_failures(store: Store, folder: Path, world_size: int) -> None:
    """Copy the failure records of all ranks from the key-value store to the run folder of this
    node. This is needed because nodes may have no shared disk.
    """
    for rank, record in _published(store, world_size):
        if not failure_file(folder, rank).exists():
            write_failure(folder, record)


def published_failures(store: Store, world_size: int) -> list[dict[str, Any]]:
    """Read the failure records that ranks of all nodes have published in the key-value store. The
    list is empty if the store does not respond.
    """
    records: list[dict[str, Any]] = []

    def read() -> None:
        with suppress(RuntimeError):
            records.extend(record for _, record in _published(store.clone(), world_size))

    _try_for_a_while(read)
    return records


def _published(store: Store, world_size: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(world_size):
        if store.check([f"failure/{rank}"]):
            yield rank, json.loads(store.get(f"failure/{rank}"))
