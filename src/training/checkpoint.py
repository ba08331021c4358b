"""Checkpoints: written whole or not at all, checked when read, loaded with `weights_only=True`.

`last.pt` is the newest, `best.pt` has the best evaluation so far, `step_N.pt` are the newest few. Weights are those of
the bare model, so that any strategy and plain timm can load them. Beside each stands a `.json` for people, with the
checksum of the file: a checkpoint is good when a sidecar in its folder has its checksum. (Any of them, because two files
cannot be replaced in one go: `last.pt` is a link to a `step_N.pt`, whose sidecar is there before the link moves.)
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from src.data.augment import Preprocessing
from src.engine.machine.files import write_text, write_whole
from src.engine.record.result import read_result
from src.parallel.single import Single
from src.training.state import Progress, TrainState

log = logging.getLogger(__name__)
FORMAT = 1


def save(folder: Path, contents: dict[str, Any], step: int, keep: int, is_best: bool) -> Path:
    """Write `step_N.pt`, and make it `last.pt` (and `best.pt`). Returns the path of last.pt.

    Raises OSError when the disk is full; earlier checkpoints stay as they were.
    """
    newest = folder / f"step_{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(newest, lambda temporary: torch.save({"format": FORMAT, **contents}, temporary))
        sidecar = json.dumps({"format": FORMAT, "sha256": _checksum(newest), **_summary(contents)}, indent=2) + "\n"
        write_text(_sidecar(newest), sidecar)
        for path in [folder / "last.pt"] + ([folder / "best.pt"] if is_best else []):
            write_whole(path, lambda temporary: _link(newest, temporary))
            write_text(_sidecar(path), sidecar)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        raise OSError(
            f"{newest}: could not be written ({free / 2**20:.0f} MiB free: {error}); the run ends here, and earlier "
            "checkpoints are untouched: make room and go on with resume"
        ) from None
    steps = _steps(folder)
    kept = [number for number in steps if number <= step][-keep:]  # later ones: of what a resumed run has left behind
    for old in [path for number, path in steps.items() if number not in kept]:
        _sidecar(old).unlink(missing_ok=True)  # first: killed in between, the next save finds the rest
        old.unlink()
    return folder / "last.pt"


def load(path: Path) -> dict[str, Any]:
    """The contents, in the host's memory: a GPU would hold them twice."""
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        _verify(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if type(error).__name__ == "UnpicklingError":  # torch's own words advise to load it all the same
            reason = "it holds more than tensors and plain values"
        raise ValueError(f"{path}: damaged or no checkpoint ({reason})") from None
    if not isinstance(contents, dict) or "model" not in contents or not isinstance(contents.get("format"), int):
        raise ValueError(f"{path}: not a checkpoint of this project")
    if contents["format"] > FORMAT:
        raise ValueError(
            f"{path}: format {contents['format']} is newer than this code reads ({FORMAT}); update the code"
        )
    return contents


def _verify(path: Path) -> None:
    """Compare with the sidecars; a checkpoint that was copied elsewhere without them has torch's own checksums."""
    known = set()
    for sidecar in path.parent.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged sidecar vouches for nothing
            known.add(json.loads(sidecar.read_text(encoding="utf-8"))["sha256"])
    if known:
        if _checksum(path) not in known:
            raise ValueError("its checksum is not the one noted beside it")
        return
    with zipfile.ZipFile(path) as archive:  # torch.load does not notice a flipped byte in a tensor; the CRCs do
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint of a run folder and its contents; None where it has none.

    Damaged ones are logged and passed over. Raises ValueError where all are damaged.
    """
    checkpoints = folder / "checkpoints"
    complaints = []
    for path in [checkpoints / "last.pt", *reversed(_steps(checkpoints).values()), checkpoints / "best.pt"]:
        if not path.exists():
            continue
        try:
            return path, load(path)
        except ValueError as error:
            complaints.append(str(error))
            log.warning("%s; trying an older one", error)
    if complaints:
        raise ValueError("; ".join(complaints))
    return None


def load_from_run(folder: Path, which: str | None) -> tuple[Path, dict[str, Any]]:
    """A run's checkpoint and its contents: best, last, a file, or for None the one that its result names."""
    path = None
    if which in ("best", "last"):
        path = folder / "checkpoints" / f"{which}.pt"
    elif which is not None:
        path = Path(which)
    else:
        with suppress(ValueError):  # the run has not ended
            if (named := read_result(folder).checkpoint) is not None:
                path = folder / named
    found = load_newest(folder) if path is None else (path, load(path))
    if found is None:
        raise ValueError(f"run={folder}: it has no checkpoint")
    return found


def snapshot(
    state: TrainState, strategy: Single, classes: list[str], preprocessing: Preprocessing, made_by: dict[str, Any]
) -> dict[str, Any]:
    """Everything a run needs to go on, and its model to be used: whole tensors and plain values. For all ranks to call.

    Schedule and random draws are functions of the step.
    """
    parts = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
    }
    return {
        **tree_map_only(Tensor, strategy.whole, parts),
        "buffers_by_rank": {name: strategy.buffers_by_rank(module) for name, module in state.modules.items()},
        "progress": dataclasses.asdict(state.progress),
        "classes": list(classes),
        "preprocessing": dataclasses.asdict(preprocessing),
        "made_by": made_by,
    }


def restore(state: TrainState, strategy: Single, contents: dict[str, Any]) -> None:
    """Put a snapshot back."""
    missing = {"optimizer", "scaler", "ema", "progress"} - contents.keys()
    if missing:
        raise ValueError(f"resume: the checkpoint has only weights, no {', '.join(sorted(missing))}")
    restore_weights(state, strategy, contents)
    for name, module in state.modules.items():
        strategy.restore_own_buffers(module, contents.get("buffers_by_rank", {}).get(name))
    state.progress = Progress(**contents["progress"])
    _restore_optimizer(state.optimizer, strategy, contents)
    if state.schedule is not None:
        state.schedule.step_update(state.progress.step)
    if state.scaler is not None and contents["scaler"] is not None:
        state.scaler.load_state_dict(contents["scaler"])


def _restore_optimizer(optimizer: torch.optim.Optimizer, strategy: Single, contents: dict[str, Any]) -> None:
    """Refuses another optimizer's state: torch takes it where as many parameters have one, and fails in the first step."""
    try:
        optimizer.load_state_dict(contents["optimizer"])
        for group in optimizer.param_groups:
            if missing := optimizer.defaults.keys() - group.keys():
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
    except (ValueError, KeyError) as error:
        kind = type(optimizer).__name__
        raise ValueError(f"resume: the checkpoint is of another optimizer than {kind} ({error})") from None
    for parameter, own in optimizer.state.items():
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:  # a step count is whole on every rank
                own[name] = strategy.part(value, parameter)


def restore_weights(state: TrainState, strategy: Single, contents: dict[str, Any]) -> None:
    """The model's, and the averaged ones, which begin at the model's where the checkpoint has none."""
    for name, module in state.modules.items():
        which = "model" if contents[name] is None else name
        own, saved = module.state_dict(), contents[which]
        parts = {key: strategy.part(value, own[key]) if key in own else value for key, value in saved.items()}
        fill(module, {which: parts}, which)


def fill(model: nn.Module, contents: dict[str, Any], which: str) -> None:
    """Load weights, `model` or `ema`, into a model."""
    if contents.get(which) is None:
        raise ValueError(f"weights={which}: the checkpoint has no averaged weights; the run had no model.ema.decay")
    try:
        model.load_state_dict(contents[which])
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model ({' '.join(str(error).split())[:300]})") from None


def _summary(contents: dict[str, Any]) -> dict[str, Any]:
    """What a person wants to know of a checkpoint without loading it."""
    progress = contents["progress"]
    return {
        "step": progress["step"],
        "epoch": progress["epoch"],
        "best_acc": progress["best_acc"],
        "classes": len(contents["classes"]),
        "parameters": sum(tensor.numel() for tensor in contents["model"].values()),
        **contents["made_by"],
        "torch": str(torch.__version__),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _link(source: Path, target: Path) -> None:
    """A hard link costs no space and no time; where the file system has none, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _steps(folder: Path) -> dict[int, Path]:
    """N -> `step_N.pt`, in their order. Other names, as of a copy that somebody keeps there, are not ours."""
    named = ((path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.pt"))
    return dict(sorted((int(number), path) for number, path in named if number.isdecimal()))
