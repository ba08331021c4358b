"""Writes a run's numbers to metrics.jsonl, TensorBoard and the console. Rank 0 has one; other ranks record nothing."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from src.engine.machine.secrets import hide_in
from src.engine.record.console import Console
from src.engine.record.result import MetricsLog

log = logging.getLogger(__name__)
Numbers = dict[str, float | None]


class Recorder:
    """The same numbers under the same names everywhere: train/loss, val/acc, lr … None is left out."""

    def __init__(self, folder: Path, enabled: bool, console: Console, resume_step: int) -> None:
        self._console = console
        self._started = time.time()
        self._metrics: MetricsLog | None = None
        if enabled:
            from src.engine.record.tensorboard import TensorBoard

            self._metrics = MetricsLog(folder / "metrics.jsonl", resume_step)
            self.tensorboard = TensorBoard(folder / "tensorboard", resume_step)

    @property
    def enabled(self) -> bool:
        return self._metrics is not None

    def numbers(self, step: int, epoch: float, values: Numbers) -> None:
        """One line of metrics.jsonl, a point on every curve."""
        if self._metrics is not None:
            present = {name: value for name, value in values.items() if value is not None}
            self._metrics.write(step, epoch=round(epoch, 4), time=round(time.time() - self._started, 3), **present)
            self.tensorboard.scalars(present, step)

    def step(self, step: int, epoch: float, values: Numbers) -> None:
        """The numbers of a training step."""
        self.numbers(step, epoch, values)
        if self.enabled:
            self._console.step(step, values["train/loss"] or 0.0, values["train/images_per_sec"])

    def memory(self, step: int, epoch: float, entries: list[dict[str, Any]]) -> None:
        values = {f"memory/{entry['device'].replace(':', '_')}_MiB": entry["peak_bytes"] / 2**20 for entry in entries}
        busy = {f"utilisation/{e['device'].replace(':', '_')}": e.get("utilisation") for e in entries}
        self.numbers(step, epoch, values | busy)

    def images(self, batch: Tensor, mean: Tensor, std: Tensor) -> None:
        """`mean` and `std` in 0..255, per channel."""
        if self.enabled:
            self.tensorboard.images("train/images", batch, mean / 255, std / 255, 0)

    def epoch(self, epoch: int, epochs: int, loss: float | None, val: Numbers) -> None:
        """One line on the console; `loss`: None if all steps were skipped; `val`: the newest evaluation, if any."""
        if self.enabled:
            shown = {"val/loss": "loss", "val/acc": "acc", "ema": "acc_ema", "best": "acc_best"}
            found = "".join(f"  {word} {val[name]:.4f}" for word, name in shown.items() if val.get(name) is not None)
            log.info("epoch %d/%d  train/loss %s%s", epoch, epochs, "none" if loss is None else f"{loss:.4f}", found)

    def end(self, step: int, config: dict[str, Any], confusions: dict[str, Tensor], classes: list[str]) -> None:
        """Write what is shown once, and close: confusion matrices by split, config, hparams."""
        if self.enabled:
            for split, counts in confusions.items():
                self.tensorboard.confusion(f"{split}/confusion", counts, classes, step)
            self.tensorboard.text("config", json.dumps(hide_in(config), indent=2))
            self.tensorboard.hparams(hide_in(_hparams(config)), ["val/acc", "val/acc_best", "val/loss"])
        self.close()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self.tensorboard.close()


def _hparams(config: dict[str, Any]) -> dict[str, Any]:
    """The settings people compare runs by."""
    data, optim = config["data"], config["optim"]
    return {
        "tags": ", ".join(config["tags"]),
        "model": config["model"]["name"],
        "strategy": config["parallel"]["strategy"],
        "devices": config["parallel"]["devices"],
        "batch_size": data["batch_size"] or data["batch_size_per_device"],
        **{key: optim[key] for key in ("opt", "lr", "weight_decay")},
        "epochs": config["train"]["epochs"],
        "precision": config["train"]["precision"],
        "seed": config["seed"],
    }
