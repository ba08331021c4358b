"""Tracker for TensorBoard, which writes event files to `tensorboard/` in the run folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.secrets import hide_in
from timm_parallel.trackers.tracker import Tracker


class TensorBoard(Tracker):
    """Tracker for TensorBoard, which shows curves, images, the config as text, and
    hyperparameters.
    """

    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(config, folder, resume_step)
        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=resume_step + 1 if resume_step else None
        )
        self.view = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def end(self, status: str, summary: dict[str, float]) -> None:
        if status == "done":
            # Show the saved file instead of the config in memory, because the file does not contain
            # the values of environment variables.
            saved = self.folder / "config.yaml"
            if saved.exists():
                self._writer.add_text("config", indent(saved.read_text(encoding="utf-8"), " " * 4))
            self._show_hparams()
        self._writer.close()

    def _show_hparams(self) -> None:
        """Write the main settings of the run as TensorBoard hyperparameters.

        SummaryWriter.add_hparams is not used, because it would add a second run to TensorBoard.
        """
        from torch.utils.tensorboard.summary import hparams

        config, metric = self.config, self.config.headline_metric
        settings: dict[str, Any] = {
            "tags": ", ".join(config.tags),
            "model": config.model.name,
            "strategy": config.parallel.strategy,
            "devices": config.parallel.devices,
            "batch_size": config.data.batch_size or config.data.batch_size_per_device,
            **{key: getattr(config.optim, key) for key in ("opt", "lr", "weight_decay")},
            **{key: getattr(config.train, key) for key in ("epochs", "precision")},
            "seed": config.seed,
        }
        shown = dict.fromkeys((f"val/{metric}", f"val/{metric}_best", "val/loss"), 0.0)
        for summary in hparams(hide_in(settings), shown):  # type: ignore[no-untyped-call]
            self._writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
