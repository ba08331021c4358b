"""Ledger of the verdicts on each base, `verdicts.json` in the output folder: the more verdicts a
base has had, the smaller is the level of the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm_parallel.machine.files import read_json, write_json
from timm_parallel.machine.lock import lock_folder
from timm_parallel.record.jobs import now

LEDGER = "verdicts.json"
FORMAT = 1
PATIENCE_SECONDS = 10.0  # for another verdict that starts at the same time


def next_number(outputs: Path, commit: str, sweep: Path, is_new: bool) -> int:
    """Enter the verdict of a sweep folder and return its number. `is_new`: begin again at 1."""
    outputs.mkdir(parents=True, exist_ok=True)
    path = outputs / LEDGER
    with lock_folder(outputs, PATIENCE_SECONDS):
        ledger: dict[str, Any] = {"format": FORMAT, "bases": {}}
        if path.is_file():
            ledger = read_json(path, FORMAT, "")
        entries = ledger["bases"].setdefault(commit, [])
        number = entries[-1]["number"] + 1 if entries and not is_new else 1
        entries.append({"number": number, "sweep": str(sweep.resolve()), "started": now()})
        write_json(path, ledger)
    return number
