"""What runs were set to and ran on: the words by which the report tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from src.engine.report.measured import RunRecord


def hardware(run: RunRecord) -> str:
    """What must be equal for two runs to be compared: devices, processor, driver, and the versions of torch and CUDA."""
    has = run.environment.get
    processor = f"{has('cpu.model') or 'unknown processor'}, {has('cpu.cores') or '?'} cores"
    torch = f"torch {has('libraries.torch') or '—'}"
    if run.accelerator != "cuda":
        return f"{'Apple GPU' if run.accelerator == 'mps' else 'CPU'}: {processor}; {torch}"
    # Names only, no count: a run may have been shown only some of the machine's devices.
    names = sorted({str(device.get("name") or "") for device in has("devices") or ()})
    versions = [f"{name} {has(name.lower())}" for name in ("CUDA", "driver") if has(name.lower())]
    return "; ".join([" + ".join(names) or "unknown GPU", processor, torch, *versions])


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Config keys with more than one value over the `runs` with a config, with these values; a missing key is null."""
    return {key: found for key, found in values(run.config for run in runs).items() if len(found) > 1}


def shared(runs: Iterable[RunRecord]) -> dict[str, Any]:
    """Config keys that have one value in all `runs` with a config."""
    return {key: found[0] for key, found in values(run.config for run in runs).items() if len(found) == 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each key's different values in flat trees, None where one lacks it; empty trees say nothing."""
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys}


def words(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={spelled(run.config.get(key))}" for key in keys)


def spelled(value: Any) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "''"


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"data": {"root": 1}}` -> `{"data.root": 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values
