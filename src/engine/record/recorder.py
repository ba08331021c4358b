"""Write a run's metrics to metrics.jsonl, TensorBoard and the console, on rank 0 only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
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


class Recorder:
    """Writes each metric under one name, such as train/loss, to all outputs. Skips None."""

    def __init__(self, folder: Path, enabled: bool, console: Console, headline: str, resume_step: int) -> None:
        """`headline`: the metric shown first. Drops lines that an earlier attempt wrote after `resume_step`."""
        self.enabled, self._console, self._headline, self._started = enabled, console, headline, time.time()
        self._folder = folder
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._metrics = MetricsLog(folder / "metrics.jsonl", resume_step)
            purge_step = resume_step + 1 if resume_step else None
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def numbers(self, step: int, epoch: float, values: Numbers) -> None:
        """Write a step's values as a line of metrics.jsonl and to the TensorBoard curves."""
        if self.enabled:
            present = {name: value for name, value in values.items() if value is not None}
            self._metrics.write(step, epoch=round(epoch, 4), time=round(time.time() - self._started, 3), **present)
            for name, value in present.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)

    def step(self, step: int, epoch: float, values: Numbers) -> None:
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
        """Show up to 32 normalized images [B, C, H, W] in TensorBoard. `mean` and `std`: per channel, in 0..255."""
        if self.enabled:
            from torchvision.utils import make_grid

            shown = (batch[:32].detach().float().cpu() * std.cpu() / 255 + mean.cpu() / 255).clamp(0, 1)
            if shown.shape[1] not in (1, 3):
                shown = shown[:, :1]
            # Enlarge tiny images.
            if shown.shape[-1] < 64:
                shown = torch.nn.functional.interpolate(shown, scale_factor=4)
            self._tensorboard.add_image("train/images", make_grid(shown, nrow=8), 0)

    def epoch(self, epoch: int, epochs: int, train: Mapping[str, float], val: Numbers) -> None:
        """Log a line with the epoch's training means, and the newest evaluation, if any."""
        if not self.enabled:
            return
        name = self._headline
        of_val = {"val/loss": "loss", f"val/{name}": name, "ema": f"{name}_ema", "best": f"{name}_best"}
        shown = {f"train/{key}": value for key, value in train.items()}
        shown |= {label: value for label, key in of_val.items() if (value := val.get(key)) is not None}
        log.info("epoch %d/%d%s", epoch, epochs, "".join(f"  {label} {value:.4f}" for label, value in shown.items()))

    def end(self, step: int, config: dict[str, Any], confusions: dict[str, Tensor], classes: list[str]) -> None:
        """Write confusion matrices [true, predicted] by split, config and hparams, and close."""
        if self.enabled:
            for split, counts in confusions.items():
                image = draw_confusion(counts.cpu().numpy(), classes)
                self._tensorboard.add_image(f"{split}/confusion", image, step, dataformats="HWC")
            # Unlike `config`, the file keeps references to the environment unresolved.
            saved = self._folder / "config.yaml"
            if saved.exists():
                self._tensorboard.add_text("config", indent(saved.read_text(encoding="utf-8"), " " * 4))
            self._show_settings(hide_in(_settings(config)))
        self.close()

    def _show_settings(self, settings: dict[str, Any]) -> None:
        """Write hparams without `add_hparams`, which creates a second run and writes the metrics again."""
        from torch.utils.tensorboard.summary import hparams

        shown = (f"val/{self._headline}", f"val/{self._headline}_best", "val/loss")
        writer = self._tensorboard._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(settings, dict.fromkeys(shown, 0.0)):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def close(self) -> None:
        if self.enabled:
            self._metrics.close()
            self._tensorboard.close()


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings to show as hparams, by which users compare runs."""
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
