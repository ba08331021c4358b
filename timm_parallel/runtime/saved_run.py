"""Read the records of a run from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from timm_parallel.parallel.networks import Networks
from timm_parallel.record.environment import read_environment
from timm_parallel.record.result import Result, read_metrics, read_result
from timm_parallel.state.checkpoint import read_checkpoint
from timm_parallel.state.restoring import load_networks


@dataclass(frozen=True)
class SavedRun:
    """The records of a run, such as its results, metrics and checkpoints. Each file of the run
    folder is read when the property for it is used for the first time.
    """

    folder: Path

    @cached_property
    def result(self) -> Result:
        """The contents of result.json. Raises ValueError if the run has not ended."""
        return read_result(self.folder)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl as dictionaries, with the key `step` and numbers such as
        `train/loss`.
        """
        return list(read_metrics(self.folder / "metrics.jsonl"))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The contents of environment.json; an empty dictionary if the file does not exist."""
        return read_environment(self.folder)

    def checkpoint(self, which: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Read a checkpoint of the run, and return its path and contents.

        `which`: best, last, or the path of a file; None: the one that result.json names. Raises
        ValueError if the checkpoint does not exist or is damaged.
        """
        return read_checkpoint(self.folder, which)

    @staticmethod
    def fill(networks: Networks, contents: dict[str, Any], which: str) -> None:
        """Load the weights of a checkpoint into the networks of a task and their averages.

        `contents`: the contents of the checkpoint. `which`: `model` for the trained weights of the
        model, `ema` for the averaged ones. Raises ValueError if they do not fit.
        """
        load_networks(networks, contents, which)
