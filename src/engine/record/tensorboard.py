"""TensorBoard, written by rank 0 alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TensorBoard:
    """Curves, images, a confusion matrix, the config as text, and hparams, all in one run."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        """What an earlier attempt wrote after `resume_step` is purged, so that no step is drawn twice."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def images(self, name: str, images: Tensor, mean: Tensor, std: Tensor, step: int) -> None:
        """A grid of up to 32 normalised images [B, C, H, W], shown as they were before normalisation."""
        from torchvision.utils import make_grid

        shown = (images[:32].detach().float().cpu() * std.cpu() + mean.cpu()).clamp(0, 1)
        if shown.shape[1] not in (1, 3):
            shown = shown[:, :1]
        if shown.shape[-1] < 64:  # tiny images are hard to see
            shown = torch.nn.functional.interpolate(shown, scale_factor=4)
        self._writer.add_image(name, make_grid(shown, nrow=8), step)

    def confusion(self, name: str, counts: Tensor, classes: list[str], step: int) -> None:
        """A confusion matrix [true, predicted] of counts, shaded by the share of each true class."""
        from src.engine.record.confusion import draw_confusion

        self._writer.add_image(name, draw_confusion(counts.cpu().numpy(), classes), step, dataformats="HWC")

    def text(self, name: str, text: str) -> None:
        self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()))

    def hparams(self, settings: dict[str, Any], metrics: list[str]) -> None:
        """Settings for the HPARAMS page, beside the last values of the curves named in `metrics`.

        Not `add_hparams`, which opens a run of its own and writes the metrics once more.
        """
        from torch.utils.tensorboard.summary import hparams

        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in settings.items()
        }
        writer = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def close(self) -> None:
        self._writer.close()
