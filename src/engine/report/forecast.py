"""What more devices would bring: a model of a training step, fitted to the device counts of a sweep. Pure numbers.

A step on n devices, each with b images, that all-reduce S bytes of gradients:

    compute   C = c0 + c1 b
    ring      A = 2 (n - 1) alpha + 2 (n - 1) / n  S / beta      latency alpha, bandwidth beta; 0 for n = 1
    step      t = max(C + max(0, A - h C), b / data rate)        h C of the ring is hidden behind the backward pass

The ring's cost: Thakur, Rabenseifner, Gropp 2005 (doi:10.1177/1094342005051521) and Patarasuk, Yuan 2009
(doi:10.1016/j.jpdc.2008.09.002), bandwidth-optimal. The overlap: Li et al. 2020, arXiv:2006.15704; h is at most 2/3, the
backward pass's share of forward and backward. A loader that cannot keep up bounds a device at its data rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

MOST_HIDDEN = 2 / 3
LATENCY = 20e-6  # seconds, where too few counts were measured to tell: of the order of TCP within a rack
UNRELIABLE = 0.15  # relative error of a left-out count above which nobody should rely on a forecast
COUNTS = tuple(2**power for power in range(1, 11))
RESAMPLES = 40
_devices = attrgetter("devices")


@dataclass(frozen=True)
class Measured:
    """One run. Seconds and images are of a step; `ring` is the all-reduce's whole time, hidden or not, where recorded."""

    devices: int
    images: int  # global batch
    seconds: float
    gradient_bytes: int
    ring: float | None = None
    waits_for_data: float = 0.0  # share of the step

    @property
    def per_device(self) -> float:
        return self.images / self.devices


@dataclass(frozen=True)
class Link:
    """What joins devices: seconds per message, bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Model:
    """The fitted step. `across`: what joins nodes, for what-if questions; then `link` joins the devices of one node."""

    fixed: float  # c0, seconds
    per_image: float  # c1, seconds
    hidden: float  # h
    link: Link
    gradient_bytes: int
    data_rate: float | None = None  # images per second and device; None: the loader was never too slow
    across: Link | None = None
    devices_per_node: int = 1

    def ring(self, devices: int) -> float:
        link = self.link if self.across is None or devices <= self.devices_per_node else self.across
        share = 2 * (devices - 1) / devices
        return 2 * (devices - 1) * link.latency + share * self.gradient_bytes / link.bandwidth

    def seconds(self, devices: int, per_device: float) -> float:
        compute = self.fixed + self.per_image * per_device
        step = compute + max(0.0, self.ring(devices) - self.hidden * compute)
        return step if self.data_rate is None else max(step, per_device / self.data_rate)

    def speed(self, devices: int, per_device: float) -> float:
        """Images per second of all devices."""
        return devices * per_device / self.seconds(devices, per_device)


@dataclass(frozen=True)
class Forecast:
    """For one device count: images per second with an interval, and efficiency over one device."""

    devices: int
    per_device: float
    speed: float
    low: float | None  # None: no repeats and no third count, so nothing tells
    high: float | None
    efficiency: float
    measured: float | None  # images per second, where this count and batch are in the sweep


@dataclass(frozen=True)
class Answer:
    """`error`: largest relative error of a count forecast from the others; None where there are too few to leave one out."""

    model: Model
    error: float | None
    verdict: str
    strong: list[Forecast]
    weak: list[Forecast]


def forecast(runs: Sequence[Measured], counts: Sequence[int] = COUNTS, **what_if: float | None) -> Answer:
    """`what_if`: bandwidth (bytes/s), latency (s), devices_per_node; None for as measured.

    Strong: the largest count's global batch on all counts; weak: the smallest count's batch per device.
    Errors: ValueError for runs of fewer than two device counts.
    """
    by_count = [list(repeats) for _, repeats in groupby(sorted(runs, key=_devices), key=_devices)]
    if len(by_count) < 2:
        only = runs[0].devices if runs else 0
        raise ValueError(
            f"parallel.devices={only}: the only count measured, and a forecast needs two or more; sweep over parallel.devices"
        )
    fitted = fit(runs)
    error, fits = leave_one_out(runs)
    model, *spread = (asked(one, **what_if) for one in (fitted, *fits, *_resampled(by_count, fitted)))

    def row(devices: int, per_device: float, alone: float) -> Forecast:
        """`alone`: images that one device has by itself, on which efficiency rests.

        The interval: the middle 90 % of the other fits, widened by the error of the counts left out.
        """
        speed = model.speed(devices, per_device)
        low = high = None
        if spread:
            edges = np.quantile([one.speed(devices, per_device) for one in spread], (0.05, 0.95))
            low = min(float(edges[0]), speed) * (1 - min(error or 0.0, 0.99))
            high = max(float(edges[1]), speed) * (1 + (error or 0.0))
        same = [r.images / r.seconds for r in runs if r.devices == devices and math.isclose(r.per_device, per_device)]
        measured = float(np.median(same)) if same and model.across is None else None
        return Forecast(devices, per_device, speed, low, high, speed / (devices * model.speed(1, alone)), measured)

    images, per_device, shown = by_count[-1][0].images, by_count[0][0].per_device, sorted({1, *counts})
    return Answer(
        model=model,
        error=error,
        verdict=_verdict(error, any(value is not None for value in what_if.values())),
        strong=[row(n, images / n, images) for n in shown if n <= images],
        weak=[row(n, per_device, per_device) for n in shown],
    )


def fit(runs: Sequence[Measured], near: Model | None = None) -> Model:
    """Least squares on the logarithms of step and ring times; as many unknowns as there are counts to tell them.

    `near`: the fit of nearly the same runs, to start from. The unknowns, in this order: c1, beta, h where the
    ring's time was recorded, c0 where batches per device differ, alpha.
    """
    from scipy.optimize import least_squares

    ringed = [run for run in runs if run.ring and run.devices > 1]
    told = len(set(map(_devices, runs))) + len(set(map(_devices, ringed)))
    size = max(run.gradient_bytes for run in runs)
    fastest = min(runs, key=lambda run: run.seconds / run.per_device)
    start = {"per_image": fastest.seconds / fastest.per_device, "bandwidth": 1e9}
    if ringed:
        start["hidden"] = 1.0  # odds: half of MOST_HIDDEN
    if told > 2 and len({run.per_device for run in runs}) > 1:
        start["fixed"] = fastest.seconds / 5
    if told > len(start) and len({run.devices for run in runs if run.devices > 1}) > 1:
        start["latency"] = LATENCY

    def unpack(values: np.ndarray) -> Model:
        found = dict(zip(start, map(math.exp, values), strict=True))
        hidden = MOST_HIDDEN / (1 + 1 / found["hidden"]) if ringed else 0.0
        link = Link(found.get("latency", LATENCY), found["bandwidth"])
        return Model(found.get("fixed", 0.0), found["per_image"], hidden, link, size)

    def residuals(values: np.ndarray) -> list[float]:
        model = unpack(values)
        off = [math.log(model.seconds(run.devices, run.per_device) / run.seconds) for run in runs]
        return off + [math.log(model.ring(run.devices) / run.ring) for run in ringed if run.ring]

    # Bytes/s; one start can end where the ring is hidden whole.
    bandwidths = (1e8, 1e9, 1e10, 1e11) if near is None else (near.link.bandwidth,)
    starts = [np.log(list((start | {"bandwidth": bandwidth}).values())) for bandwidth in bandwidths]
    best = min((least_squares(residuals, values) for values in starts), key=lambda found: found.cost)
    slow = [run.per_device / run.seconds for run in runs if run.waits_for_data > 0.05]
    return replace(unpack(best.x), data_rate=max(slow, default=None))


def asked(
    model: Model, bandwidth: float | None = None, latency: float | None = None, devices_per_node: float | None = None
) -> Model:
    """`model` with another link: between nodes of `devices_per_node`, by default of one device each."""
    if bandwidth is None and latency is None:
        return model
    across = Link(model.link.latency if latency is None else latency, bandwidth or model.link.bandwidth)
    return replace(model, across=across, devices_per_node=int(devices_per_node or 1))


def leave_one_out(runs: Sequence[Measured]) -> tuple[float | None, list[Model]]:
    """(largest relative error of the speed of a count that was left out of the fit, these fits); None with two counts.

    The smallest stays: forecasts go upwards from it, and without it compute and hiding cannot be told apart.
    """
    _, *larger = sorted(set(map(_devices, runs)))
    errors, fits = [], []
    for count in larger if len(larger) > 1 else ():
        fits.append(fit([run for run in runs if run.devices != count]))
        off = [run.seconds / fits[-1].seconds(count, run.per_device) for run in runs if run.devices == count]
        errors.append(abs(float(np.median(off)) - 1))
    return max(errors, default=None), fits


def _resampled(by_count: Sequence[Sequence[Measured]], near: Model) -> Iterable[Model]:
    """Fits to resampled repeats: how much hangs on the data. None where nothing was repeated."""
    draw = np.random.default_rng(0)
    for _ in range(RESAMPLES if any(len(repeats) > 1 for repeats in by_count) else 0):
        sample = [repeats[i] for repeats in by_count for i in draw.integers(len(repeats), size=len(repeats))]
        yield fit(sample, near)


def _verdict(error: float | None, is_what_if: bool) -> str:
    if error is None:
        said = "unchecked: two counts fit any model, so measure a third"
    elif error > UNRELIABLE:
        said = f"do not rely on it: a count left out was missed by {error:.0%}"
    else:
        said = f"a count left out was missed by {error:.0%} at most"
    return said + ("; the link asked for was not measured" if is_what_if else "")
