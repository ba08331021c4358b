"""Model of the time of a training step. The model is fitted to runs of a sweep on a few numbers of
devices, and forecasts the speed on more devices.

A step on n devices, each with b images, all-reduces S bytes of gradients:

    compute   C = c0 + c1 b
    reduce    A = 2 (n - 1) alpha + 2 (n - 1) / n  S / beta  (latency alpha, bandwidth beta)
    step      t = max(C + max(0, A - h C), b / data rate)

c0 is the fixed computing time of a step, and c1 the computing time per image. A is 0 for n = 1. Up
to h C seconds of the all-reduce run at the same time as the backward pass. The loader of a device
delivers at most `data rate` images per second.

Sources: Thakur, Rabenseifner, Gropp 2005 (doi:10.1177/1094342005051521) and Patarasuk, Yuan 2009
(doi:10.1016/j.jpdc.2008.09.002) for the cost of the ring all-reduce, which is optimal in bandwidth;
Li et al. 2020 (arXiv:2006.15704) for the overlap. h is at most 2/3, the share of the backward pass
in forward and backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MOST_HIDDEN = 2 / 3
# Seconds per message that are assumed if too few numbers of devices were measured to fit the
# latency. The value is typical of TCP within a rack.
LATENCY = 20e-6
# Largest relative error of a reliable forecast. The error is that of the speed on a measured number
# of devices, forecast from the other numbers.
UNRELIABLE = 0.15
# The model is said not to describe a sweep if it misses a measured speed by more than this relative
# error.
MISSED = 0.05
# A fitted cost counts as zero if its share of the step time is below this value.
NEGLIGIBLE = 1e-3
# Numbers of devices of a forecast, unless the command gives others.
COUNTS = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class Measured:
    """Mean step time of one run, with its number of devices, images per step and bytes of
    gradients. `ring`: seconds of the all-reduce per step, including the part that runs during the
    backward pass; None if they were not recorded.
    """

    devices: int
    # Number of images of all devices in one optimizer step.
    images: int
    seconds: float
    gradient_bytes: int
    ring: float | None = None
    # Share of the step in which the devices wait for data, 0 to 1.
    waits_for_data: float = 0.0
    # True if other load may have disturbed the figures of the run.
    flagged: bool = False

    @property
    def per_device(self) -> float:
        return self.images / self.devices


@dataclass(frozen=True)
class Link:
    latency: float  # seconds per message
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Model:
    """Fitted model of the step time. `link`: the measured network. `across`: another network
    between the nodes, for which the user asked; None: all messages use `link`.
    """

    # Computing seconds per step that do not depend on the batch, c0 in the formulas.
    fixed: float
    # Computing seconds per image, c1 in the formulas.
    per_image: float
    # Share of the computing time behind which the all-reduce is hidden, h in the formulas.
    hidden: float
    link: Link
    gradient_bytes: int
    # Images per second that the loader of one device delivers, or None if it never limits the step.
    data_rate: float | None = None
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
    """Forecast for one number of devices: images per second with an interval, and efficiency, which
    is the speed per device divided by the speed of one device.
    """

    devices: int
    per_device: float
    speed: float
    # Ends of the interval, or None if the sweep measured only two numbers of devices.
    low: float | None
    high: float | None
    efficiency: float
    # Measured images per second, if the sweep has this number of devices with this batch.
    measured: float | None


@dataclass(frozen=True)
class Answer:
    """Forecasts of a sweep's speed on several numbers of devices, with the errors of the fitted
    model.

    `error`: largest relative error when a measured number of devices is forecast from the others,
    or None if only two were measured. `residual`: largest relative error of the fit on the measured
    speeds. `notes`: further reasons to doubt the forecast.
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
    """Fit the model of the step time to measured runs, and forecast the speed for each number of
    devices in `counts`. `what_if`: bandwidth (bytes/s), latency (s) and devices_per_node of another
    network. Each of them may be None.

    Strong scaling uses the global batch of the run on the most devices. Weak scaling uses the batch
    per device of the run on the fewest devices. `runs` must contain two or more numbers of devices.
    """
    assert len({run.devices for run in runs}) > 1
    fitted = fit(runs)
    error, fits = leave_one_out(runs)
    residual = largest_residual(fitted, runs)
    margin = min(max(error or 0.0, residual), 0.99)
    model = with_link(fitted, **what_if)
    variants = [with_link(variant, **what_if) for variant in (fitted, *fits)]

    def row(devices: int, per_device: float, alone: float) -> Forecast:
        """Forecast the speed on one number of devices. The efficiency compares it with the speed of
        one device with a batch of `alone` images.
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
    """Fit the model of the step time by least squares on logarithms. The measurements are the step
    times and, if recorded, the all-reduce times.

    The unknowns are c1 and beta, then h if all-reduce times were recorded. c0 is added if the
    batches per device differ, and alpha last. Both are added only if there are enough equations.
    Each number of devices gives one equation for the step time, and one for the all-reduce time if
    it was recorded.
    """
    from scipy.optimize import least_squares

    ringed = [run for run in runs if run.ring and run.devices > 1]
    equations = len({run.devices for run in runs}) + len({run.devices for run in ringed})
    size = max(run.gradient_bytes for run in runs)
    fastest = min(runs, key=lambda run: run.seconds / run.per_device)
    start = {"per_image": fastest.seconds / fastest.per_device, "bandwidth": 1e9}
    if ringed:
        # The unknown is h as odds, h / (MOST_HIDDEN - h). Start with half of MOST_HIDDEN.
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

    # Start the fit with several bandwidths in bytes/s. From a single one, it can end in a solution
    # in which the all-reduce is hidden completely.
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
    """Return a copy of a fitted model that forecasts with another network between nodes. A
    bandwidth or latency of None keeps the measured value. `devices_per_node`: 1 by default.
    """
    if bandwidth is None and latency is None:
        return model
    return replace(
        model,
        across=Link(
            model.link.latency if latency is None else latency, bandwidth or model.link.bandwidth
        ),
        devices_per_node=int(devices_per_node or 1),
    )


def leave_one_out(runs: Sequence[Measured]) -> tuple[float | None, list[Model]]:
    """Test the model by forecasting a number of devices that was left out of the fit. Do so for
    each measured number except the smallest, without which computing and communication cannot be
    told apart. Return the largest relative error of these forecasts, and all fits.

    The error is None if only two numbers of devices were measured.
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
    """Return the largest relative error of the fitted speed. For each measured number of devices
    and batch, the fitted speed is compared with the median measured speed.
    """
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
    """Return reasons to doubt a fitted model, as sentences. Examples are a fitted cost that is zero
    or at its limit, and runs that other load disturbed.
    """
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
