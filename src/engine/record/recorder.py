"""Hands a run's numbers to everyone who wants them: metrics.jsonl, TensorBoard, console. Rank 0's; other ranks record nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from src.engine.machine.secrets import hide_in
from src.engine.record.console import Console
from src.engine.record.result import MetricsLog, Result
from src.schema import Config

if TYPE_CHECKING:
    from src.training.loop import StepReport
    from src.training.metrics import Evaluation

log = logging.getLogger(__name__)


class Recorder:
    """The same numbers under the same names everywhere: train/loss, val/acc, lr …"""

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

    def step(self, report: StepReport, images_per_sec: float | None, devices: int, data_wait: float | None) -> None:
        if self._metrics is None:
            return
        values = {
            "train/loss": report.loss,
            "lr": report.lr,
            "train/grad_norm": report.grad_norm,
            "train/images_per_sec": images_per_sec,
            "train/images_per_sec_per_device": images_per_sec / devices if images_per_sec else None,
            "train/data_wait": data_wait,
        }
        self._write(report.step, report.epoch, values)
        self._console.step(report.step, report.loss, images_per_sec)

    def evaluation(
        self, step: int, epoch: float, split: str, raw: Evaluation, ema: Evaluation | None, best: float | None
    ) -> None:
        """`ema` is of the averaged weights; `best` the best accuracy so far."""
        if self._metrics is None:
            return
        values = {f"{split}/loss": raw.loss, f"{split}/acc": raw.acc, f"{split}/acc5": raw.acc5}
        if ema is not None:
            values |= {f"{split}/loss_ema": ema.loss, f"{split}/acc_ema": ema.acc}
        self._write(step, epoch, values | {f"{split}/acc_best": best})

    def memory(self, step: int, epoch: float, entries: list[dict[str, Any]]) -> None:
        if self._metrics is None:
            return
        values = {f"memory/{entry['device'].replace(':', '_')}_MiB": entry["peak_bytes"] / 2**20 for entry in entries}
        busy = {f"utilisation/{e['device'].replace(':', '_')}": e.get("utilisation") for e in entries}
        self._write(step, epoch, values | busy)

    def images(self, batch: Tensor, mean: Tensor, std: Tensor) -> None:
        """`mean` and `std` in 0..255, per channel."""
        if self.enabled:
            self.tensorboard.images("train/images", batch, mean / 255, std / 255, 0)

    def epoch(self, epoch: int, epochs: int, loss: float, evaluations: dict[str, Evaluation], best: float) -> None:
        """One line on the console."""
        if self.enabled:
            val, ema = evaluations.get("val"), evaluations.get("val_ema")
            found = f"  val/loss {val.loss:.4f}  val/acc {val.acc:.4f}" if val else ""
            found += f"  ema {ema.acc:.4f}" if ema else ""
            found += f"  best {best:.4f}" if val else ""
            log.info("epoch %d/%d  train/loss %.4f%s", epoch, epochs, loss, found)

    def end(self, config: Config, result: Result, evaluations: dict[str, Evaluation], classes: list[str]) -> None:
        """What is shown once: confusion matrix, config, hparams."""
        if self.enabled:
            for split, found in evaluations.items():
                self.tensorboard.confusion(f"{split}/confusion", found.confusion, classes, result.steps)
            self.tensorboard.text("config", json.dumps(hide_in(dataclasses.asdict(config)), indent=2))
            self.tensorboard.hparams(hide_in(_hparams(config)), ["val/acc", "val/acc_best", "val/loss"])
        self.close()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self.tensorboard.close()

    def _write(self, step: int, epoch: float, values: dict[str, Any]) -> None:
        assert self._metrics is not None
        present = {name: value for name, value in values.items() if value is not None}
        self._metrics.write(step, epoch=round(epoch, 4), time=round(time.time() - self._started, 3), **present)
        self.tensorboard.scalars(present, step)


def _hparams(config: Config) -> dict[str, Any]:
    """The settings people compare runs by."""
    return {
        "model": config.model.name,
        "strategy": config.parallel.strategy,
        "devices": config.parallel.devices,
        "batch_size": config.data.batch_size or config.data.batch_size_per_device,
        "opt": config.optim.opt,
        "lr": config.optim.lr,
        "weight_decay": config.optim.weight_decay,
        "epochs": config.train.epochs,
        "precision": config.train.precision,
        "seed": config.seed,
    }
