"""Write and read checkpoint files.

A file is written completely or not at all. It is verified when it is read, and loaded with
`weights_only=True`, so it cannot run code. `last.pt` is the newest checkpoint, and `best.pt` has
the best evaluation. `step_N.pt` are the newest few (checkpoint.keep). A `.json` file next to each
has its checksum.

The entry `model` has the weights of the model, with its names in timm. `networks` has the tensors
of other networks, such as the parameters of a loss, `averages` the averaged weights, such as `ema`,
and `phases` the state of each optimizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import traceback
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from timm_parallel.errors import UnknownFormatError
from timm_parallel.machine.files import write_text, write_whole
from timm_parallel.parallel.networks import LOSS
from timm_parallel.record.result import (
    CHECKPOINT_FORMAT,
    check_format,
    read_object,
    read_result,
    read_status,
)

log = logging.getLogger(__name__)


def save(folder: Path, contents: dict[str, Any], step: int, keep: int, is_best: bool) -> None:
    """Write the checkpoint of step N as `step_N.pt`.

    last.pt becomes a link to the new file, and best.pt too if `is_best`. Then all but the newest
    `keep` files `step_N.pt` are deleted.
    """
    newest, last = folder / f"step_{step}.pt", folder / "last.pt"
    whole = {"format": CHECKPOINT_FORMAT, **_on_cpu(contents)}
    try:
        # Do not create parent folders, because the user may have deleted the run folder.
        folder.mkdir(exist_ok=True)
        write_whole(newest, lambda temporary: torch.save(whole, temporary))
        summary = {"format": CHECKPOINT_FORMAT, "sha256": _checksum(newest), **_summary(contents)}
        sidecar = json.dumps(summary, indent=2) + "\n"
        write_text(newest.with_suffix(".json"), sidecar)
        for path in (last, folder / "best.pt") if is_best else (last,):
            write_whole(path, lambda temporary: _link(newest, temporary))
            write_text(path.with_suffix(".json"), sidecar)
    # torch raises RuntimeError if the disk is full.
    except (OSError, RuntimeError) as error:
        # torch also raises RuntimeError in a signal handler if a loader worker has died. That error
        # is not about the file.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_of_worker = frame.f_globals["__name__"].startswith("torch.utils.data")
        # If the run folder was deleted, the free space of its disk cannot be queried.
        if is_of_worker or not folder.parent.is_dir():
            raise
        free = shutil.disk_usage(folder.parent).free
        raise OSError(
            f"{newest}: could not be written ({free / 2**20:.0f} MiB free: {error}); the run ends "
            "here, and earlier checkpoints are untouched: free some space and continue with resume"
        ) from None
    steps = _steps(folder)
    # Checkpoints of later steps may exist after a resume from an older checkpoint. They are deleted
    # too.
    kept = [number for number in steps if number <= step][-keep:]
    # A save that was killed leaves a temporary file, whose name has the number of its process.
    for stale in folder.glob(".*.tmp"):
        stale.unlink()
    for old in [path for number, path in steps.items() if number not in kept]:
        # Delete the .json file first. If the process is killed after that, the next save still
        # finds the checkpoint and deletes it.
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink()


def load(path: Path) -> dict[str, Any]:
    """Verify the checksum of a checkpoint file, and load its contents into CPU memory.

    Raises ValueError if the file does not exist or is damaged, and UnknownFormatError if another
    version of the code wrote it.
    """
    if not path.exists():
        raise ValueError(
            f"{path}: no such checkpoint; give a file from the checkpoints/ folder of a run"
        )
    check_format(path.with_suffix(".json"))
    try:
        _verify(path)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        # Replace the message of torch, because it advises to load the file without weights_only.
        if type(error).__name__ == "UnpicklingError":
            reason = "it holds more than tensors and plain values"
        raise ValueError(
            f"{path}: damaged, or not a checkpoint ({reason}); use another checkpoint"
        ) from None
    if (
        not isinstance(contents, dict)
        or "model" not in contents
        or not isinstance(contents.get("format"), int)
    ):
        raise ValueError(
            f"{path}: not a checkpoint of this project; give a file from the checkpoints/ folder "
            "of a run"
        )
    if contents["format"] == 2:
        contents = from_format_2(contents)
    if contents["format"] != CHECKPOINT_FORMAT:
        raise UnknownFormatError(
            f"{path}: the checkpoint has the format {contents['format']}, expected "
            f"{CHECKPOINT_FORMAT}; use the code that wrote the file"
        )
    _check_finite(path, contents)
    return contents


def from_format_2(contents: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a checkpoint of format 2, which had one optimizer and one average,
    and the tensors of a loss as those of a training step.
    """
    rest = {
        key: value
        for key, value in contents.items()
        if key not in ("ema", "train_step", "optimizer", "scaler")
    }

    def renamed(name: str) -> str:
        return name.removeprefix("train_step.").replace("criterion.", f"{LOSS}.", 1)

    converted = {**rest, "format": CHECKPOINT_FORMAT, "averages": {}, "networks": {}}
    if contents.get("ema") is not None:
        converted["averages"] = {"ema": contents["ema"]}
    if contents.get("train_step"):
        tensors = {
            renamed(name).removeprefix(f"{LOSS}."): tensor
            for name, tensor in contents["train_step"].items()
        }
        converted["networks"] = {LOSS: tensors}
    if "optimizer" in contents:
        saved = contents["optimizer"]
        optimizer = {
            "kind": saved["kind"],
            "state": {renamed(name): state for name, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": [renamed(name) for name in group["params"]]}
                for group in saved["param_groups"]
            ],
        }
        phase = {"optimizer": optimizer, "scaler": contents["scaler"], "schedule": None}
        converted["phases"] = {"train": phase}
    return converted


def _check_finite(path: Path, contents: dict[str, Any]) -> None:
    """Raise ValueError if a weight is NaN or infinite. A run saves no such file."""
    others = {**contents.get("networks", {}), **contents.get("averages", {})}
    for tensors in (contents["model"], *others.values()):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(
                    f"{path}: the weight {name} has values that are not finite (NaN or infinity); "
                    "use another checkpoint"
                )


def _verify(path: Path) -> None:
    """Raise ValueError if the checksum of a checkpoint is not in any .json file of its folder.

    If there are no .json files, the checksums of its zip archive are verified instead.
    """
    # Accept the checksum in the .json file of any checkpoint, because last.pt and last.json cannot
    # be replaced at the same moment. The .json file of step_N.pt, to which last.pt is linked, is
    # written before.
    sidecars = [read_object(sidecar) for sidecar in path.parent.glob("*.json")]
    known = [values["sha256"] for values in sidecars if "sha256" in values]
    if known:
        if _checksum(path) not in known:
            raise ValueError("the checkpoint does not match the checksum in its .json file")
        return
    # Verify the checksums of the archive, because torch.load does not notice a flipped bit in a
    # tensor.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} in the file is wrong")


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Find and load the newest undamaged checkpoint of a run folder.

    Returns its path and its contents, or None if the folder has no checkpoint. Raises ValueError if
    all checkpoints are damaged, or if another version of the code wrote the newest one.
    """
    checkpoints = folder / "checkpoints"
    errors = []
    for path in [
        checkpoints / "last.pt",
        *reversed(_steps(checkpoints).values()),
        checkpoints / "best.pt",
    ]:
        if not path.exists():
            continue
        try:
            return path, load(path)
        # Do not use an older checkpoint, because the run would then replace the newer one.
        except UnknownFormatError:
            raise
        except ValueError as error:
            errors.append(str(error))
            log.warning("%s; trying an older checkpoint", error)
    if errors:
        raise ValueError("; ".join(errors))
    return None


def read_checkpoint(folder: Path, which: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Load a checkpoint of a run, and return its path and its contents.

    `which`: best, last, or the path of a file; None: the one that result.json names, or the newest
    if there is no result.json.
    """
    path = None
    if which in ("best", "last"):
        path = folder / "checkpoints" / f"{which}.pt"
    elif which is not None:
        path = Path(which)
    else:
        # Ignore a missing result.json, because a run that has not ended has none.
        if read_status(folder) and (name := read_result(folder).checkpoint) is not None:
            path = folder / name
    loaded = load_newest(folder) if path is None else (path, load(path))
    if loaded is None:
        raise ValueError(f"run={folder}: this run has no checkpoint; choose another run")
    return loaded


def _on_cpu(contents: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors on a device to CPU memory, and keep tensors that are already there.

    A file with CUDA tensors could not be loaded on a machine without a GPU. Tensors that share
    memory, such as tied weights, are copied once.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        memory = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if memory not in copies:
            copies[memory] = tensor.cpu()
        return copies[memory]

    return cast(dict[str, Any], tree_map_only(Tensor, copy, contents))


def _summary(contents: dict[str, Any]) -> dict[str, Any]:
    progress = contents["progress"]
    return {
        "step": progress["step"],
        "epoch": progress["epoch"],
        "best": progress["best_values"],
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
    """Create a hard link to a file, which saves space, or copy the file if hard links are not
    supported.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _steps(folder: Path) -> dict[int, Path]:
    """Return a dictionary from step N to the file `step_N.pt` of each checkpoint in a folder.

    Steps are in ascending order. Files with other names are ignored.
    """
    numbered = ((path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.pt"))
    return dict(sorted((int(number), path) for number, path in numbered if number.isdecimal()))
