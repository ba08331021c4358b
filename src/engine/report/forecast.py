"""What more devices would bring: the model of step_model.py, fitted to the device counts of a sweep. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from src.engine.report.step_model import Link, Measured, Model

MOST_HIDDEN = 2 / 3
LATENCY = 20e-6  # seconds, where too few counts were measured to tell: of the order of TCP within a rack
UNRELIABLE = 0.15  # relative error of a left-out count above which nobody should rely on a forecast
COUNTS = tuple(2**power for power in range(1, 11))
RESAMPLES = 40


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
    by_count = _by_count(runs)
    if len(by_count) < 2:
        only = next(iter(by_count), 0)
        raise ValueError(
            f"parallel.devices={only}: the only count measured, and a forecast needs two or more; sweep over parallel.devices"
        )
    error = leave_one_out(runs)
    fitted = fit(runs)
    model = asked(fitted, **what_if)
    spread = [asked(one, **what_if) for one in _refits(runs, fitted)]
    images = max(by_count.items())[1][0].images
    per_device = min(by_count.items())[1][0].per_device
    strong = [n for n in sorted({1, *counts}) if n <= images]
    return Answer(
        model=model,
        error=error,
        verdict=_verdict(error, any(value is not None for value in what_if.values())),
        strong=[_forecast(n, images / n, images, model, spread, error, runs) for n in strong],
        weak=[_forecast(n, per_device, per_device, model, spread, error, runs) for n in sorted({1, *counts})],
    )


def fit(runs: Sequence[Measured], near: Model | None = None) -> Model:
    """Least squares on the logarithms of step and ring times; as many unknowns as there are counts to tell them.

    `near`: the fit of nearly the same runs, to start from. The unknowns, in this order: c1, beta, h where the
    ring's time was recorded, c0 where batches per device differ, alpha.
    """
    from scipy.optimize import least_squares

    batches = len({run.per_device for run in runs})
    ringed = [run for run in runs if run.ring and run.devices > 1]
    told = len(_by_count(runs)) + len({run.devices for run in ringed})
    fixed_free, hidden_free = batches > 1 and told > 2, bool(ringed)
    latency_free = told - 2 - fixed_free - hidden_free > 0 and len({run.devices for run in runs if run.devices > 1}) > 1
    size = max(run.gradient_bytes for run in runs)
    fastest = min(runs, key=lambda run: run.seconds / run.per_device)

    def unpack(values: np.ndarray) -> Model:
        fixed, per_image, hidden, latency, bandwidth = values
        return Model(
            fixed=math.exp(fixed) if fixed_free else 0.0,
            per_image=math.exp(per_image),
            hidden=MOST_HIDDEN / (1 + math.exp(-hidden)) if hidden_free else 0.0,
            link=Link(math.exp(latency) if latency_free else LATENCY, math.exp(bandwidth)),
            gradient_bytes=size,
        )

    def residuals(values: np.ndarray) -> list[float]:
        model = unpack(values)
        off = [math.log(model.seconds(run.devices, run.per_device) / run.seconds) for run in runs]
        off += [math.log(model.ring(run.devices) / run.ring) for run in ringed if run.ring]
        free = (fixed_free, True, hidden_free, latency_free, True)
        drawn = zip(values, start, free, strict=True)
        return [*off, *(0.0 if is_free else 1e-6 * (value - from_) for value, from_, is_free in drawn)]

    guess = math.log(fastest.seconds / fastest.per_device)
    best = None
    # Bytes/s; one start can end where the ring is hidden whole.
    for bandwidth in (1e8, 1e9, 1e10, 1e11) if near is None else (near.link.bandwidth,):
        start = np.array([math.log(fastest.seconds / 5), guess, 0.0, math.log(LATENCY), math.log(bandwidth)])
        found = least_squares(residuals, start)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return replace(unpack(best.x), data_rate=_data_rate(runs))


def asked(
    model: Model, bandwidth: float | None = None, latency: float | None = None, devices_per_node: float | None = None
) -> Model:
    """`model` with another link: between nodes of `devices_per_node`, by default of one device each."""
    if bandwidth is None and latency is None:
        return model
    across = Link(model.link.latency if latency is None else latency, bandwidth or model.link.bandwidth)
    return replace(model, across=across, devices_per_node=int(devices_per_node or 1))


def leave_one_out(runs: Sequence[Measured]) -> float | None:
    """Largest relative error of the speed of a count that was left out of the fit; None with two counts.

    The smallest stays: forecasts go upwards from it, and without it compute and hiding cannot be told apart.
    """
    counts = sorted(_by_count(runs))
    if len(counts) < 3:
        return None
    errors = []
    for count in counts[1:]:
        left = [run for run in runs if run.devices == count]
        model = fit([run for run in runs if run.devices != count])
        truth = float(np.median([run.seconds for run in left]))
        errors.append(abs(truth / model.seconds(count, left[0].per_device) - 1))
    return max(errors)


def _refits(runs: Sequence[Measured], model: Model) -> list[Model]:
    """Fits without each count but the smallest (of three or more), and on resampled repeats: how much hangs on the data."""
    by_count = _by_count(runs)
    larger = list(by_count)[1:] if len(by_count) > 2 else []
    fits = [fit([run for run in runs if run.devices != count]) for count in larger]
    draw = np.random.default_rng(0)
    if all(len(members) == 1 for members in by_count.values()):
        return fits
    for _ in range(RESAMPLES):
        sample = [members[i] for members in by_count.values() for i in draw.integers(len(members), size=len(members))]
        fits.append(fit(sample, near=model))
    return fits


def _forecast(
    devices: int,
    per_device: float,
    alone: float,
    model: Model,
    spread: list[Model],
    error: float | None,
    runs: Iterable[Measured],
) -> Forecast:
    """`alone`: images that one device has by itself, on which efficiency rests.

    The interval: the middle 90 % of the refits, widened by the error of the counts left out.
    """
    speed = model.speed(devices, per_device)
    low = high = None
    if spread:
        edges = np.quantile([one.speed(devices, per_device) for one in spread], (0.05, 0.95))
        low = min(float(edges[0]), speed) * (1 - min(error or 0.0, 0.99))
        high = max(float(edges[1]), speed) * (1 + (error or 0.0))
    same = [run for run in runs if run.devices == devices and math.isclose(run.per_device, per_device)]
    measured = float(np.median([run.images / run.seconds for run in same])) if same and model.across is None else None
    return Forecast(
        devices=devices,
        per_device=per_device,
        speed=speed,
        low=low,
        high=high,
        efficiency=speed / (devices * model.speed(1, alone)),
        measured=measured,
    )


def _verdict(error: float | None, is_what_if: bool) -> str:
    if error is None:
        said = "unchecked: two counts fit any model, so measure a third"
    elif error > UNRELIABLE:
        said = f"do not rely on it: a count left out was missed by {error:.0%}"
    else:
        said = f"a count left out was missed by {error:.0%} at most"
    return said + ("; the link asked for was not measured" if is_what_if else "")


def _data_rate(runs: Iterable[Measured]) -> float | None:
    """Images per second and device of loaders that kept a run waiting for more than a twentieth of its time."""
    slow = [run.per_device / run.seconds for run in runs if run.waits_for_data > 0.05]
    return max(slow, default=None)


def _by_count(runs: Iterable[Measured]) -> dict[int, list[Measured]]:
    ordered = sorted(runs, key=lambda run: run.devices)
    return {count: list(members) for count, members in groupby(ordered, key=lambda run: run.devices)}
