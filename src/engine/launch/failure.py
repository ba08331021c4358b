"""The record that a failing rank leaves, which of several records came first, and what people are told of it."""

from __future__ import annotations

import json
import math
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from src.engine.launch.supervisor import ENDED_BY_AGENT, Ended
from src.engine.machine.files import write_json
from src.engine.machine.platform import KILL
from src.engine.machine.ranks import Ranks, host_name
from src.schema import ResolvedConfig

PLAIN = {"refused", "out_of_memory", "UnreadableImageError"}  # their reason says it all: the traceback stays in the log
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's words
LOST_CONNECTION = ("DistBackendError", "DistNetworkError", "DistStoreError")
GLOO = re.compile(r"third_party[/\\]gloo|Gloo connect")  # in its RuntimeErrors: a file of its code, or what it did
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "bad_alloc", "cannot allocate memory")


def record_of(rank: int | None, folder: Path, reason: str, **more: Any) -> dict[str, Any]:
    """The record of a failure, of a rank on this host; `more`: what is not as usual."""
    return {
        "rank": rank,
        "host": host_name(),
        "attempt": 0,
        "time": time.time(),
        "status": "failed",
        "reason": reason,
        "exception": "",
        "traceback": None,
        "log": None if rank is None else str(log_file(folder, rank)),
        "is_echo": False,
        "exit_code": 2 if more.get("status") == "refused" else 1,
        **more,
    }


def failure_record(error: Exception, config: ResolvedConfig, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The record of an exception; call it while the exception is being handled."""
    kind, text = type(error).__name__, _text(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    who, is_echo = ranks.name, False
    status, reason = "failed", f"{who}: {kind}: {text} ({place})"
    if kind == "RefusedError":
        status, reason = "refused", text
    elif kind == "NotFiniteError":
        status, reason = "not_finite", text
    elif kind in ("OutOfMemoryError", "MemoryError") or any(phrase in text.lower() for phrase in NO_MEMORY):
        status, reason = "out_of_memory", _out_of_memory(text, config, ranks)
    elif NOT_DETERMINISTIC in text:
        named = text.partition(NOT_DETERMINISTIC)[0].split()[-1]
        reason = (
            f"{who}: train.deterministic=true: {named} has no deterministic algorithm in torch ({place}); train without "
            "train.deterministic, or a model that does without it"
        )
    elif "DataLoader worker" in text:
        reason += "; a loader worker was killed, perhaps for want of memory: fewer data.workers need less"
    elif kind in LOST_CONNECTION or (kind == "RuntimeError" and GLOO.search(text)):
        is_echo = True
        reason = f"{who} lost its connection to another rank, which has left: {kind}: {text}"
    more = {"attempt": ranks.restart_count, "status": status, "exception": kind, "is_echo": is_echo}
    return record_of(ranks.rank, folder, reason, traceback=traceback.format_exc(), **more)


def write_failure(folder: Path, record: dict[str, Any]) -> None:
    write_json(failure_file(folder, record["rank"]), record)


def failure_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"failure_rank_{rank}.json"


def failure_files(folder: Path) -> list[Path]:
    return sorted((folder / "logs").glob("failure_rank_*.json"))


def first_failure(folder: Path, ended: Ended) -> dict[str, Any]:
    """The failure that caused the others, not its echo on the ranks that waited for it.

    In this order: the earliest recorded exception that is not a lost connection; a rank that a signal killed (it leaves
    no record, and its peers record a lost connection); one that left without a record, even with exit code 0; the
    earliest lost connection. Only the latest attempt counts, after restarts.
    """
    records = _records(folder)
    attempt = max((record["attempt"] for record in records), default=0)
    records = [record for record in records if record["attempt"] == attempt]
    # By arrival at the store where it was told: the clocks of two hosts differ.
    records.sort(key=lambda record: (record["is_echo"], record.get("order", math.inf), record["time"]))
    if records and not records[0]["is_echo"]:
        return records[0]
    codes = dict.fromkeys(range(ended.world_size), 0) | ended.exit_codes
    told = {record["rank"] for record in records}
    for rank, code in sorted(codes.items(), key=lambda item: item[1]):  # killed ones, with negative codes, first
        if rank not in told and code not in ENDED_BY_AGENT:
            return failure_of_exit_code(folder, rank, code, ended.oom_kills)
    return records[0] if records else record_of(None, folder, "the ranks ended without leaving a result")


def cause_is_known(folder: Path) -> bool:
    """True if a rank has recorded more than that it lost its connection to the others."""
    return any(not record["is_echo"] for record in _records(folder))


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in failure_files(folder)]


def failure_of_exit_code(folder: Path, rank: int, code: int, oom_kills: int) -> dict[str, Any]:
    """The failure of a rank that has left no record: what its exit code tells."""
    if code == -KILL and oom_kills:
        how = "was killed by the kernel, which ran out of memory; use a smaller batch or fewer workers"
        return record_of(rank, folder, f"rank {rank} {how}", status="out_of_memory")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left early with exit code {code}"
    return record_of(rank, folder, f"rank {rank} {how}")


def log_file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank_{rank}.log"


def failure_text(failure: dict[str, Any]) -> str:
    """What people are told: who failed first, why, where the log is."""
    lines = [f"Failed: {failure['reason']}"]
    if failure["traceback"] and PLAIN.isdisjoint((failure["status"], failure["exception"])):
        lines.insert(0, failure["traceback"].rstrip())
    if failure["log"]:
        lines.append(f"Log: {failure['log']}")
    return "\n".join(lines)


def _text(error: Exception) -> str:
    """The message in one line; of an exception in a loader worker, whose message is a traceback, that traceback's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Caught ") and "Original Traceback" in str(error):
        lines = lines[-1:]
    return " ".join(lines)[:500]


def _out_of_memory(text: str, config: ResolvedConfig, ranks: Ranks) -> str:
    batch, devices, train = config.global_batch, config.parallel.devices, config.train
    where = config.parallel.accelerator + (f":{ranks.local_rank}" if config.parallel.accelerator == "cuda" else "")
    smaller = f"data.batch_size={max(devices, batch // 2)} train.accumulate={train.accumulate * 2} (the same training)"
    bf16 = "" if train.precision == "bf16" or config.parallel.accelerator == "cpu" else "train.precision=bf16, "
    return (
        f"{ranks.name}: out of memory on {where} with {batch // devices} images per device ({batch} in all, "
        f"{train.precision}, accumulate={train.accumulate}): {text[:300]}; "
        f"try {smaller}, {bf16}model.grad_checkpointing=true, or more devices"
    )
