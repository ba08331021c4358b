"""Write the metrics of a run to metrics.jsonl, the trackers and the log. Only rank 0 writes."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.secrets import mask
from timm_parallel.machine.signals import Stopped
from timm_parallel.record.result import MetricsLog, Result
from timm_parallel.trackers.tracker import END_SECONDS, Channel

log = logging.getLogger(__name__)
Numbers = dict[str, float | None]
# Number of training images that the trackers show.
SHOWN = 32


class Recorder:
    """Writer of metrics and images to metrics.jsonl, the trackers and the log. Values that are None
    are left out.
    """

    def __init__(
        self, config: ResolvedConfig, folder: Path, enabled: bool, resume_step: int
    ) -> None:
        """Open metrics.jsonl and the trackers.

        Lines of steps after `resume_step` are removed, because the resumed run trains these steps
        again. `enabled`: False on all ranks but rank 0, where nothing is written.
        """
        self.enabled, self._headline = enabled, config.headline_metric
        self._started, self._timeout = time.monotonic(), config.parallel.timeout
        if enabled:
            self._metrics = MetricsLog(folder / "metrics.jsonl", resume_step)
            self._trackers = [
                Channel(name, path, config, folder, resume_step)
                for name, path in config.tracker.classes().items()
            ]

    def numbers(self, step: int, epoch: float, values: Numbers) -> None:
        """Write the values of a step as one line of metrics.jsonl, and send them to the
        trackers.
        """
        if self.enabled:
            present = {name: value for name, value in values.items() if value is not None}
            self._metrics.write(
                step,
                epoch=round(epoch, 4),
                time=round(time.monotonic() - self._started, 3),
                **present,
            )
            self._track("numbers", step, epoch, time.time(), finite_numbers(present))

    def memory(self, step: int, epoch: float, entries: list[dict[str, Any]]) -> None:
        values: Numbers = {}
        for entry in entries:
            device = entry["device"].replace(":", "_")
            values[f"memory/{device}_MiB"] = entry["peak_bytes"] / 2**20
            values[f"utilisation/{device}"] = entry.get("utilisation")
        self.numbers(step, epoch, values)

    def epoch(self, epoch: int, epochs: int, train: Mapping[str, float], val: Numbers) -> None:
        """Log one line per epoch, with mean training metrics and the metrics of the newest
        evaluation.

        `train`: means over the epoch. `val`: metrics of the evaluation; empty if there was none.
        """
        if not self.enabled:
            return
        name = self._headline
        of_val = {
            "val/loss": "loss",
            f"val/{name}": name,
            "ema": f"{name}_ema",
            "best": f"{name}_best",
        }
        shown = {f"train/{key}": value for key, value in train.items()}
        shown |= {
            label: value for label, key in of_val.items() if (value := val.get(key)) is not None
        }
        log.info(
            "epoch %d/%d%s",
            epoch,
            epochs,
            "".join(f"  {label} {value:.4f}" for label, value in shown.items()),
        )

    def pictures(self, step: int, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
        """Send the pictures that a function makes to the trackers, as `<name>/<key>`, or `<name>`
        for an empty key. If the function fails, a warning is logged and the run continues.

        `make`: returns a dictionary from key to picture: a uint8 array [H, W, 3], a PIL image, or a
        matplotlib figure.
        """
        if not self.enabled:
            return
        try:
            for key, picture in make().items():
                self._track("image", f"{name}/{key}" if key else name, step, as_pixels(picture))
        except Exception as error:
            reason = mask(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            log.warning(
                "%s could not be drawn (%s); the run continues without this picture", name, reason
            )

    def end(self, result: Result) -> list[str]:
        """End the run in the trackers. Returns the commands or URLs that show the run."""
        if not self.enabled:
            return []
        self._track("end", result.status, finite_numbers(result.throughput | result.seconds))
        return [mask(channel.tracker.view) for channel in self._trackers if channel.tracker.view]

    def close(self) -> None:
        """Close metrics.jsonl and the trackers.

        If `end` was not called before, the trackers record the run as failed or interrupted.
        """
        if self.enabled:
            self._metrics.close()
            self._track(
                "end", "interrupted" if isinstance(sys.exception(), Stopped) else "failed", {}
            )
            # Limit the time for closing the trackers, because the other ranks wait for this rank
            # meanwhile.
            until = time.monotonic() + min(END_SECONDS, self._timeout / 2)
            for channel in self._trackers:
                channel.close(until)

    def _track(self, method: str, *arguments: Any) -> None:
        for channel in self._trackers:
            channel.put(method, *arguments)


def grid_of(batch: Tensor, mean: Tensor, std: Tensor) -> NDArray[np.uint8]:
    """Draw up to SHOWN normalized images [B, C, H, W] in rows. `mean`, `std`: per channel, for
    pixel values from 0 to 255.
    """
    from torchvision.utils import make_grid

    # If the batch has several views per image, show each view as an image.
    batch = batch.flatten(0, -4)[:SHOWN].detach().float().cpu()
    shown = (batch * std.cpu() / 255 + mean.cpu() / 255).clamp(0, 1)
    if shown.shape[1] not in (1, 3):
        shown = shown[:, :1]
    # Enlarge images of less than 64 pixels, so that they are visible.
    if shown.shape[-1] < 64:
        shown = torch.nn.functional.interpolate(shown, scale_factor=4)
    grid = (make_grid(shown, nrow=8) * 255).clamp(0, 255).to(torch.uint8)
    return grid.permute(1, 2, 0).numpy()


def as_pixels(image: Any) -> NDArray[np.uint8]:
    """Convert an array, a PIL image or a matplotlib figure to a uint8 array [H, W, 3]."""
    if hasattr(image, "savefig"):
        file = io.BytesIO()
        image.savefig(file, format="png")
        image = Image.open(file)
    if isinstance(image, Image.Image):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"image: expected uint8 [H, W, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels


def finite_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return only the finite numbers in `values`, because trackers cannot draw other values."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
