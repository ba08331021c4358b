"""Checkpoint files: written completely or not at all, verified when read, loaded with `weights_only=True`.

`last.pt` is the newest, `best.pt` has the best evaluation, `best_step_N.pt` are the best few (checkpoint.top), `step_N.pt` the
newest few, each with a `.json` and a checksum.
The weights have the names of the bare model, so every strategy and plain timm can load them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import zipfile
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from src.engine.machine.files import write_text, write_whole
from src.engine.parallel.strategy import Strategy
from src.engine.record.result import read_result
from src.engine.runtime.interfaces import TrainingState
from src.engine.runtime.optimizer_state import named_state, restore_named_state
from src.engine.runtime.progress import Progress

log = logging.getLogger(__name__)
# Format 1 numbered the optimizer's parameters, and recorded neither data nor config nor segments.
FORMAT = 2


def save(folder: Path, contents: dict[str, Any], step: int, keep: int, is_best: bool, top: int = 1) -> Path:
    """Write `step_N.pt`, link last.pt (and best.pt) to it, and delete all but the newest `keep`. Return last.pt.

    With `top` > 1, link `best_step_N.pt` to it as well if its evaluation is one of the `top` best of this run.
    """
    newest, among_best = folder / f"step_{step}.pt", folder / f"best_step_{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(newest, lambda temporary: torch.save({"format": FORMAT, **contents}, temporary))
        summary = _summary(contents)
        sidecar = json.dumps({"format": FORMAT, "sha256": _checksum(newest), **summary}, indent=2) + "\n"
        write_text(newest.with_suffix(".json"), sidecar)
        best = _best(folder, summary, top) if top > 1 else set()
        # `among_best` first: after a kill, the run continues from last.pt, and only an older one leads to this step again.
        linked = {among_best: step in best, folder / "last.pt": True, folder / "best.pt": is_best}
        for path in [path for path, is_due in linked.items() if is_due]:
            write_whole(path, lambda temporary: _link(newest, temporary))
            write_text(path.with_suffix(".json"), sidecar)
    # torch reports a full disk as RuntimeError.
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        raise OSError(
            f"{newest}: could not be written ({free / 2**20:.0f} MiB free: {error}); the run ends here, and earlier "
            "checkpoints are untouched: free some space and continue with resume"
        ) from None
    steps = _steps(folder)
    # After a resume from an older checkpoint, later checkpoints may still exist. They are removed too.
    kept = [number for number in steps if number <= step][-keep:]
    unneeded = [path for number, path in steps.items() if number not in kept]
    if top > 1:
        unneeded += [path for number, path in _steps(folder, "best_step_").items() if number not in best]
    for old in unneeded:
        # The sidecar first: after a kill in between, the next save finds the checkpoint and removes it.
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink()
    return folder / "last.pt"


def _best(folder: Path, newest: dict[str, Any], top: int) -> set[int]:
    """Return the steps of the `top` best evaluations by checkpoint.metric: of `newest` and the `best_step_N.pt` files.

    Leaves out later steps, which will be trained again, other metrics and damaged files. Of equal ones the first is best.
    """
    scores = {} if newest["score"] is None else {newest["step"]: newest["score"]}
    for step, path in _steps(folder, "best_step_").items():
        with suppress(OSError, ValueError, KeyError, TypeError):
            summary = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if step < newest["step"] and summary["metric"] == newest["metric"]:
                scores[step] = float(summary["score"])
    return set(sorted(scores, key=lambda step: (-scores[step], step))[:top])


def load(path: Path) -> dict[str, Any]:
    """Verify a checkpoint file and load it to the CPU, because a GPU would hold its tensors twice."""
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        _verify(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        # torch's own message advises to load the file without weights_only.
        if type(error).__name__ == "UnpicklingError":
            reason = "it holds more than tensors and plain values"
        raise ValueError(f"{path}: damaged or no checkpoint ({reason})") from None
    if not isinstance(contents, dict) or "model" not in contents or not isinstance(contents.get("format"), int):
        raise ValueError(f"{path}: not a checkpoint of this project")
    if contents["format"] > FORMAT:
        raise ValueError(f"{path}: format {contents['format']} is newer than this code ({FORMAT}); update the code")
    return contents


def _verify(path: Path) -> None:
    """Verify a checkpoint against the checksums in its folder's .json files, or if there are none, torch's own."""
    # Any sidecar of the folder counts, because last.pt and its sidecar cannot be replaced at the same moment. The sidecar of
    # the step_N.pt to which last.pt links is written before.
    known = set()
    for sidecar in path.parent.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            known.add(json.loads(sidecar.read_text(encoding="utf-8"))["sha256"])
    if known:
        if _checksum(path) not in known:
            raise ValueError("its checksum differs from that in its .json file")
        return
    # torch.load does not notice a flipped bit in a tensor; the checksums of the archive do.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return path and contents of the newest undamaged checkpoint in a run folder; None if there is none."""
    checkpoints = folder / "checkpoints"
    errors = []
    for path in [checkpoints / "last.pt", *reversed(_steps(checkpoints).values()), checkpoints / "best.pt"]:
        if not path.exists():
            continue
        try:
            return path, load(path)
        except ValueError as error:
            errors.append(str(error))
            log.warning("%s; trying an older one", error)
    if errors:
        raise ValueError("; ".join(errors))
    return None


def load_from_run(folder: Path, which: str | None) -> tuple[Path, dict[str, Any]]:
    """Return path and contents of a run's checkpoint. `which`: best, last or a file; None: as result.json names."""
    path = None
    if which in ("best", "last"):
        path = folder / "checkpoints" / f"{which}.pt"
    elif which is not None:
        path = Path(which)
    else:
        # A run that has not ended has no result.
        with suppress(ValueError):
            if (name := read_result(folder).checkpoint) is not None:
                path = folder / name
    loaded = load_newest(folder) if path is None else (path, load(path))
    if loaded is None:
        raise ValueError(f"run={folder}: it has no checkpoint")
    return loaded


def snapshot(state: TrainingState, strategy: Strategy) -> dict[str, Any]:
    """Return the training state as whole (unsharded) tensors and plain values, for a checkpoint. Collective.

    If the strategy shards, only rank 0 gets the tensors, in CPU memory; those of other ranks are empty.
    """
    # Schedule and random draws are functions of the step, so they need no state here.
    parts = {
        "model": state.model.state_dict(),
        "optimizer": named_state(state.optimizer, state.model),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
    }
    return {
        **tree_map_only(Tensor, partial(_for_file, strategy=strategy), parts),
        "buffers_by_rank": {name: strategy.buffers.by_rank(module) for name, module in state.modules.items()},
        "progress": dataclasses.asdict(state.progress),
    }


def _for_file(tensor: Tensor, strategy: Strategy) -> Tensor:
    """Return the unsharded form of a tensor for a file. It gathers one tensor at a time, so no device holds the whole model."""
    whole = strategy.whole(tensor)
    if not strategy.shards:
        return whole
    return whole.cpu() if strategy.is_first else torch.empty(0)


def restore(state: TrainingState, strategy: Strategy, contents: dict[str, Any]) -> None:
    """Restore weights, optimizer state and progress from a snapshot. Hyper-parameters keep the values of the config."""
    missing = {"optimizer", "scaler", "ema", "progress"} - contents.keys()
    if missing:
        raise ValueError(f"resume: the checkpoint has only weights, no {', '.join(sorted(missing))}")
    restore_weights(state, strategy, contents)
    for name, module in state.modules.items():
        strategy.buffers.restore_own(module, contents.get("buffers_by_rank", {}).get(name))
    state.progress = Progress.from_saved(contents["progress"])
    restore_named_state(state.optimizer, state.model, contents["optimizer"], strategy)
    if state.scaler is not None and contents["scaler"] is not None:
        state.scaler.load_state_dict(contents["scaler"])


def restore_weights(state: TrainingState, strategy: Strategy, contents: dict[str, Any]) -> None:
    """Restore raw and averaged weights. If the checkpoint has no averaged weights, copy the raw ones."""
    for name, module in state.modules.items():
        which = "model" if contents[name] is None else name
        current, saved = module.state_dict(), contents[which]
        parts = {key: strategy.part(value, current[key]) if key in current else value for key, value in saved.items()}
        fill(module, {which: parts}, which)


def fill(model: nn.Module, contents: dict[str, Any], which: str) -> None:
    """Load the weights `which` (`model`: raw; `ema`: averaged) of a checkpoint into `model`."""
    if contents.get(which) is None:
        raise ValueError(f"weights={which}: the checkpoint has no averaged weights; the run had no model.ema.decay")
    try:
        model.load_state_dict(contents[which])
    except RuntimeError as error:
        raise ValueError(
            f"the checkpoint was written by a different model ({' '.join(str(error).split())[:300]})"
        ) from None


def _summary(contents: dict[str, Any]) -> dict[str, Any]:
    progress = contents["progress"]
    return {
        "step": progress["step"],
        "epoch": progress["epoch"],
        "best": progress["best_values"],
        # By checkpoint.metric, higher is better; null if this state was not evaluated.
        "score": progress.get("score") if progress.get("evaluated_at") == progress["step"] else None,
        "classes": len(contents["classes"]),
        "parameters": sum(tensor.numel() for tensor in contents["model"].values()),
        **contents["made_by"],
        "segments": contents.get("segments", []),
        "torch": str(torch.__version__),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(source: Path, target: Path) -> None:
    """Hard-link `source` as `target`, to save space, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _steps(folder: Path, prefix: str = "step_") -> dict[int, Path]:
    """Map each step N to its file `<prefix>N.pt`, in ascending order. Ignores other names, such as a user's copies."""
    numbered = ((path.stem.removeprefix(prefix), path) for path in folder.glob(f"{prefix}*.pt"))
    return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))
