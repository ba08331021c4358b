"""Write a run's metrics to metrics.jsonl, the trackers and the log, on rank 0 only."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


class Recorder:
    """Writer of metrics and images to metrics.jsonl, the trackers and the log. Skips values that
    are None.
    """

    def __init__(
        self, config: ResolvedConfig, folder: Path, enabled: bool, resume_step: int
    ) -> None:
        """Open metrics.jsonl and the trackers. Drops lines of steps after `resume_step`, because
        they will run again.
        """
        self.enabled, self._headline = enabled, config.headline_metric
        self._started, self._timeout = time.time(), config.parallel.timeout
        if enabled:
            self._metrics = MetricsLog(folder / "metrics.jsonl", resume_step)
            classes = config.tracker.classes()
            self._trackers = [
                Channel(name, path, config, folder, resume_step) for name, path in classes.items()
            ]

    def numbers(self, step: int, epoch: float, values: Numbers) -> None:
        """Write a step's values as a line of metrics.jsonl and to the trackers."""
        if self.enabled:
            present = {name: value for name, value in values.items() if value is not None}
            self._metrics.write(
                step, epoch=round(epoch, 4), time=round(time.time() - self._started, 3), **present
            )
            self._track("numbers", step, epoch, time.time(), finite_numbers(present))

    def memory(self, step: int, epoch: float, entries: list[dict[str, Any]]) -> None:
        values: Numbers = {}
        for entry in entries:
            device = entry["device"].replace(":", "_")
            values[f"memory/{device}_MiB"] = entry["peak_bytes"] / 2**20
            values[f"utilisation/{device}"] = entry.get("utilisation")
        self.numbers(step, epoch, values)

    def images(self, batch: Tensor, mean: Tensor, std: Tensor) -> None:
        """Send up to 32 normalized images [B, C, H, W] to the trackers. `mean` and `std`: per
        channel, in 0..255.
        """
        if self.enabled:
            from torchvision.utils import make_grid

            # Views of a sample become images.
            batch = batch.flatten(0, -4)
            shown = (batch[:32].detach().float().cpu() * std.cpu() / 255 + mean.cpu() / 255).clamp(
                0, 1
            )
            with self._picture("train/images"):
                if shown.shape[1] not in (1, 3):
                    shown = shown[:, :1]
                # Enlarge tiny images.
                if shown.shape[-1] < 64:
                    shown = torch.nn.functional.interpolate(shown, scale_factor=4)
                grid = (make_grid(shown, nrow=8) * 255).clamp(0, 255).to(torch.uint8)
                self._track("image", "train/images", 0, grid.permute(1, 2, 0).numpy())

    def epoch(self, epoch: int, epochs: int, train: Mapping[str, float], val: Numbers) -> None:
        """Log a line with the mean training metrics of an epoch, and the metrics of the newest
        evaluation, if any.
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

    def draw(self, step: int, name: str, draw: Callable[[], Mapping[str, Any]]) -> None:
        """Send the pictures that `draw` returns, uint8 arrays [H, W, 3] by name, as `<name>/…`. An
        error of `draw` is a warning.
        """
        if self.enabled:
            with self._picture(name):
                for picture, pixels in draw().items():
                    self._track("image", f"{name}/{picture}", step, pixels)

    def image(self, step: int, name: str, image: Any) -> None:
        """Send an image: uint8 [H, W, 3], a PIL image, or a matplotlib figure."""
        if self.enabled:
            with self._picture(name):
                self._track("image", name, step, as_pixels(image))

    def end(self, result: Result) -> list[str]:
        """End the run in the trackers. Return commands or URLs to show it."""
        if not self.enabled:
            return []
        self._track("end", result.status, finite_numbers(result.throughput | result.seconds))
        return [mask(channel.tracker.view) for channel in self._trackers if channel.tracker.view]

    def close(self) -> None:
        """Close metrics.jsonl and the trackers. Without a call of `end` before, they record a
        failed or stopped run.
        """
        if self.enabled:
            self._metrics.close()
            self._track(
                "end", "interrupted" if isinstance(sys.exception(), Stopped) else "failed", {}
            )
            # The other ranks wait for this one meanwhile.
            until = time.monotonic() + min(END_SECONDS, self._timeout / 2)
            for channel in self._trackers:
                channel.close(until)

    @contextmanager
    def _picture(self, name: str) -> Iterator[None]:
        """Log a warning if the code below `with` cannot draw a picture: a run needs its numbers,
        but no picture.
        """
        try:
            yield
        except Exception as error:
            reason = mask(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            log.warning(
                "%s could not be drawn (%s); the run continues without this picture", name, reason
            )

    def _track(self, method: str, *arguments: Any) -> None:
        for channel in self._trackers:
            channel.put(method, *arguments)


def as_pixels(image: Any) -> NDArray[np.uint8]:
    """Return an array, a PIL image or a matplotlib figure as uint8 [H, W, 3]."""
    if hasattr(image, "savefig"):
        file = io.BytesIO()
        image.savefig(file, format="png")
        image = Image.open(file)
    if isinstance(image, Image.Image):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"expected uint8 [H, W, 3], got {pixels.dtype} {list(pixels.shape)}")
    return pixels


def finite_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers in `values`, the only ones that trackers can draw."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
