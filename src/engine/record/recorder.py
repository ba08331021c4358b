"""Writes a run's numbers to metrics.jsonl, TensorBoard and the console. Rank 0 has one; other ranks record nothing."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from src.engine.machine.secrets import hide_in
from src.engine.record.confusion import draw_confusion
from src.engine.record.console import Console
from src.engine.record.result import MetricsLog

log = logging.getLogger(__name__)
Numbers = dict[str, float | None]
SHOWN_METRICS = ("val/acc", "val/acc_best", "val/loss")  # beside the settings, on TensorBoard's HPARAMS page


class Recorder:
    """The same numbers under the same names everywhere: train/loss, val/acc, lr … None is left out."""

    def __init__(self, folder: Path, enabled: bool, console: Console, resume_step: int) -> None:
        """What an earlier attempt wrote after `resume_step` is dropped, so that no step is there twice."""
        self.enabled, self._console, self._started = enabled, console, time.time()
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._metrics = MetricsLog(folder / "metrics.jsonl", resume_step)
            purge_step = resume_step + 1 if resume_step else None
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def numbers(self, step: int, epoch: float, values: Numbers) -> None:
        """One line of metrics.jsonl, a point on every curve."""
        if self.enabled:
            present = {name: value for name, value in values.items() if value is not None}
            self._metrics.write(step, epoch=round(epoch, 4), time=round(time.time() - self._started, 3), **present)
            for name, value in present.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)

    def step(self, step: int, epoch: float, values: Numbers) -> None:
        """The numbers of a training step."""
        self.numbers(step, epoch, values)
        if self.enabled:
            self._console.step(step, values["train/loss"] or 0.0, values["train/images_per_sec"])

    def memory(self, step: int, epoch: float, entries: list[dict[str, Any]]) -> None:
        values: Numbers = {}
        for entry in entries:
            device = entry["device"].replace(":", "_")
            values[f"memory/{device}_MiB"] = entry["peak_bytes"] / 2**20
            values[f"utilisation/{device}"] = entry.get("utilisation")
        self.numbers(step, epoch, values)

    def images(self, batch: Tensor, mean: Tensor, std: Tensor) -> None:
        """A grid of up to 32 normalised images [B, C, H, W] as they were before; `mean` and `std` in 0..255, per channel."""
        if self.enabled:
            from torchvision.utils import make_grid

            shown = (batch[:32].detach().float().cpu() * std.cpu() / 255 + mean.cpu() / 255).clamp(0, 1)
            if shown.shape[1] not in (1, 3):
                shown = shown[:, :1]
            if shown.shape[-1] < 64:  # tiny images are hard to see
                shown = torch.nn.functional.interpolate(shown, scale_factor=4)
            self._tensorboard.add_image("train/images", make_grid(shown, nrow=8), 0)

    def epoch(self, epoch: int, epochs: int, loss: float | None, val: Numbers) -> None:
        """One line on the console; `loss`: None if all steps were skipped; `val`: the newest evaluation, if any."""
        if self.enabled:
            shown = {"val/loss": "loss", "val/acc": "acc", "ema": "acc_ema", "best": "acc_best"}
            found = "".join(f"  {word} {val[name]:.4f}" for word, name in shown.items() if val.get(name) is not None)
            log.info("epoch %d/%d  train/loss %s%s", epoch, epochs, "none" if loss is None else f"{loss:.4f}", found)

    def end(self, step: int, config: dict[str, Any], confusions: dict[str, Tensor], classes: list[str]) -> None:
        """Write what is shown once, and close: confusion matrices [true, predicted] by split, config, hparams."""
        if self.enabled:
            for split, counts in confusions.items():
                image = draw_confusion(counts.cpu().numpy(), classes)
                self._tensorboard.add_image(f"{split}/confusion", image, step, dataformats="HWC")
            self._tensorboard.add_text("config", indent(json.dumps(hide_in(config), indent=2), " " * 4))
            self._show_settings(hide_in(_settings(config)))
        self.close()

    def _show_settings(self, settings: dict[str, Any]) -> None:
        """Not by `add_hparams`, which opens a run of its own and writes the metrics once more."""
        from torch.utils.tensorboard.summary import hparams

        writer = self._tensorboard._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(settings, dict.fromkeys(SHOWN_METRICS, 0.0)):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def close(self) -> None:
        if self.enabled:
            self._metrics.close()
            self._tensorboard.close()


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Those people compare runs by."""
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
