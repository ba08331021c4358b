"""Model of the step time, fitted to the device counts of a sweep, to forecast the speed on more
devices.

A step on n devices, each with b images, that all-reduce S bytes of gradients:

    compute   C = c0 + c1 b
    reduce    A = 2 (n - 1) alpha + 2 (n - 1) / n  S / beta  (latency alpha, bandwidth beta)
    step      t = max(C + max(0, A - h C), b / data rate)

A is 0 for n = 1. The backward pass hides h C of it.

The ring all-reduce's cost: Thakur, Rabenseifner, Gropp 2005 (doi:10.1177/1094342005051521) and
Patarasuk, Yuan 2009 (doi:10.1016/j.jpdc.2008.09.002), bandwidth-optimal. The overlap: Li et al.
2020, arXiv:2006.15704; h is at most 2/3, the backward pass's share of forward and backward. A
loader that cannot keep up bounds a device at its data rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_HIDDEN = 2 / 3
LATENCY = 20e-6  # seconds, if too few counts were measured to fit it: typical of TCP within a rack
# Relative error, for a device count left out of the fit, above which the forecast is unreliable.
UNRELIABLE = 0.15
MISSED = (
    0.05  # relative error on a measured count above which the model does not describe the sweep
)
NEGLIGIBLE = 1e-3  # share of a step, or of h, below which a fitted cost is at its bound
COUNTS = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class Measured:
    """Mean step time and sizes of one run. `ring`: seconds of the ring all-reduce, hidden or
    exposed, if recorded.
    """

    devices: int
    images: int  # global batch
    seconds: float
    gradient_bytes: int
    ring: float | None = None
    waits_for_data: float = 0.0  # share of the step
    flagged: bool = False  # the figures may be disturbed

    @property
    def per_device(self) -> float:
        return self.images / self.devices


@dataclass(frozen=True)
class Link:
    latency: float  # seconds per message
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Model:
    """Fitted step-time model. `across`: a different link between nodes, as in a what-if forecast;
    `link` is then within a node.
    """

    fixed: float  # c0, seconds
    per_image: float  # c1, seconds
    hidden: float  # h
    link: Link
    gradient_bytes: int
    data_rate: float | None = (
        None  # images per second and device; None: the loader never bounds the step
    )
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
        return devices * per_device / self.seconds(devices, per_device)


@dataclass(frozen=True)
class Forecast:
    """Forecast for one device count: images per second with an interval, and efficiency relative to
    one device.
    """

    devices: int
    per_device: float
    speed: float
    low: float | None  # None: unknown with two counts
    high: float | None
    efficiency: float
    measured: float | None  # images per second, if the sweep has this count and batch


@dataclass(frozen=True)
class Answer:
    """Forecasts for several device counts, with the errors of the fitted model.

    `error`: largest relative error of a count that was forecast from the others; None with two
    counts. `residual`: largest relative error on a measured count. `notes`: further doubts.
    """

    model: Model
    error: float | None
    residual: float
    verdict: str
    strong: list[Forecast]
    weak: list[Forecast]
    notes: list[str]


def forecast(
    runs: Sequence[Measured], counts: Sequence[int] = COUNTS, **what_if: float | None
) -> Answer:
    """Fit the model and apply it to `counts`. `what_if`: bandwidth (bytes/s), latency (s),
    devices_per_node, or None.

    Strong: all counts use the largest count's global batch. Weak: all use the smallest count's
    batch per device. `runs` must have two or more device counts.
    """
    assert len({run.devices for run in runs}) > 1
    fitted = fit(runs)
    error, fits = leave_one_out(runs)
    residual = largest_residual(fitted, runs)
    margin = min(max(error or 0.0, residual), 0.99)
    model = with_link(fitted, **what_if)
    variants = [with_link(variant, **what_if) for variant in (fitted, *fits)]

    def row(devices: int, per_device: float, alone: float) -> Forecast:
        """Forecast one device count. Efficiency is relative to one device with a batch of `alone`
        images.
        """
        speed = model.speed(devices, per_device)
        low = high = None
        if error is not None:
            speeds = [variant.speed(devices, per_device) for variant in variants]
            low, high = min(speeds) / (1 + margin), max(speeds) / (1 - margin)
        same = [
            r.images / r.seconds
            for r in runs
            if r.devices == devices and math.isclose(r.per_device, per_device)
        ]
        measured = float(np.median(same)) if same and model.across is None else None
        return Forecast(
            devices,
            per_device,
            speed,
            low,
            high,
            speed / (devices * model.speed(1, alone)),
            measured,
        )

    images = max(runs, key=lambda run: run.devices).images
    per_device = min(runs, key=lambda run: run.devices).per_device
    shown = sorted({1, *counts})
    return Answer(
        model=model,
        error=error,
        residual=residual,
        verdict=_verdict(error, residual, any(value is not None for value in what_if.values())),
        strong=[row(n, images / n, images) for n in shown if n <= images],
        weak=[row(n, per_device, per_device) for n in shown],
        notes=notes_on(fitted, runs),
    )


def fit(runs: Sequence[Measured]) -> Model:
    """Fit the model to the logarithms of step and all-reduce times by least squares, with no more
    unknowns than counts.

    The unknowns, in this order: c1, beta, h if all-reduce time was recorded, c0 if batches per
    device differ, alpha.
    """
    from scipy.optimize import least_squares

    ringed = [run for run in runs if run.ring and run.devices > 1]
    equations = len({run.devices for run in runs}) + len({run.devices for run in ringed})
    size = max(run.gradient_bytes for run in runs)
    fastest = min(runs, key=lambda run: run.seconds / run.per_device)
    start = {"per_image": fastest.seconds / fastest.per_device, "bandwidth": 1e9}
    if ringed:
        # As odds: half of MOST_HIDDEN.
        start["hidden"] = 1.0
    if equations > 2 and len({run.per_device for run in runs}) > 1:
        start["fixed"] = fastest.seconds / 5
    if equations > len(start) and len({run.devices for run in runs if run.devices > 1}) > 1:
        start["latency"] = LATENCY

    def unpack(values: np.ndarray) -> Model:
        unknowns = dict(zip(start, map(math.exp, values), strict=True))
        hidden = MOST_HIDDEN / (1 + 1 / unknowns["hidden"]) if ringed else 0.0
        link = Link(unknowns.get("latency", LATENCY), unknowns["bandwidth"])
        return Model(unknowns.get("fixed", 0.0), unknowns["per_image"], hidden, link, size)

    def residuals(values: np.ndarray) -> list[float]:
        model = unpack(values)
        steps = [math.log(model.seconds(run.devices, run.per_device) / run.seconds) for run in runs]
        return steps + [math.log(model.ring(run.devices) / run.ring) for run in ringed if run.ring]

    # Initial bandwidths in bytes/s. From a single one, the fit can end with a completely hidden
    # all-reduce.
    starts = [start | {"bandwidth": bandwidth} for bandwidth in (1e8, 1e9, 1e10, 1e11)]
    solutions = [least_squares(residuals, np.log(list(values.values()))) for values in starts]
    best = min(solutions, key=lambda solution: solution.cost)
    slow = [run.per_device / run.seconds for run in runs if run.waits_for_data > 0.05]
    return replace(unpack(best.x), data_rate=max(slow, default=None))


def with_link(
    model: Model,
    bandwidth: float | None = None,
    latency: float | None = None,
    devices_per_node: float | None = None,
) -> Model:
    """Return `model` with a different link between nodes of `devices_per_node` devices, by default
    1.
    """
    if bandwidth is None and latency is None:
        return model
    across = Link(
        model.link.latency if latency is None else latency, bandwidth or model.link.bandwidth
    )
    return replace(model, across=across, devices_per_node=int(devices_per_node or 1))


def leave_one_out(runs: Sequence[Measured]) -> tuple[float | None, list[Model]]:
    """Refit without each device count in turn. Return the largest relative error for the count left
    out, and the fits.

    The smallest count is never left out: it separates compute from hidden communication. The error
    is None with two counts.
    """
    _, *larger = sorted({run.devices for run in runs})
    if len(larger) < 2:
        return None, []
    errors, fits = [], []
    for count in larger:
        model = fit([run for run in runs if run.devices != count])
        ratios = [
            run.seconds / model.seconds(count, run.per_device)
            for run in runs
            if run.devices == count
        ]
        errors.append(abs(float(np.median(ratios)) - 1))
        fits.append(model)
    return max(errors), fits


def largest_residual(model: Model, runs: Sequence[Measured]) -> float:
    """Return the largest relative error of the model's speed for a measured count and batch."""
    speeds: dict[tuple[int, float], list[float]] = {}
    for run in runs:
        speeds.setdefault((run.devices, run.per_device), []).append(run.images / run.seconds)
    return max(
        abs(model.speed(*point) / float(np.median(of_point)) - 1)
        for point, of_point in speeds.items()
    )


def _verdict(error: float | None, residual: float, is_what_if: bool) -> str:
    if error is None:
        parts = ["unchecked: two counts cannot test a model; measure a third"]
    elif error > UNRELIABLE:
        parts = [f"do not rely on it: a count left out was missed by {error:.0%}"]
    else:
        parts = [f"a count left out was missed by {error:.0%} at most"]
    if residual > MISSED:
        parts.insert(
            0,
            f"the model does not describe this sweep: it misses a measured count by {residual:.0%}",
        )
    else:
        parts.append(f"measured counts are met within {residual:.0%}")
    if is_what_if:
        parts.append("the other link was not measured")
    return "; ".join(parts)


def notes_on(model: Model, runs: Sequence[Measured]) -> list[str]:
    """Return notes on fitted costs that are at a bound, and on the number of flagged runs."""
    devices, images = max(run.devices for run in runs), max(run.per_device for run in runs)
    step = model.seconds(devices, images)
    at_bound = {
        "c1 = 0: a step takes the same time for any batch": model.per_image * images
        < NEGLIGIBLE * step,
        "c0 = 0: a step has no fixed cost": 0 < model.fixed < NEGLIGIBLE * step,
        "β without limit: the all-reduce takes almost no time": model.ring(devices)
        < NEGLIGIBLE * step,
        "h = 0: computing hides nothing of the all-reduce": 0 < model.hidden < NEGLIGIBLE,
        "h = 2/3: the whole backward pass hides the all-reduce": model.hidden
        > (1 - NEGLIGIBLE) * MOST_HIDDEN,
    }
    notes = [f"at its bound: {cost}" for cost, is_at_bound in at_bound.items() if is_at_bound]
    if flagged := sum(run.flagged for run in runs):
        notes.append(
            f"{flagged} of {len(runs)} runs are flagged as disturbed; the sweep's report.html has "
            "the reasons"
        )
    return notes
