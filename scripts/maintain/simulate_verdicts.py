"""Simulate verdicts on code changes whose true effect is known: `python
scripts/maintain/simulate_verdicts.py [series]`.

Each row has another kind of noise. Its columns are the shares of verdicts on equal code that say
better or worse, the pairs of runs that these needed, the power if the head is better by 1, 2 or 3
standard deviations of a run, and how often the interval at the stop holds the true difference. The
default is 10,000 series per row. The series are computed all at once; a test compares them with the
function that decides (timm_parallel/lab/analysis/verdict.py).

A second table has sweeps that add repeats until the comparisons with the baseline are decided
(sweep.repeats=auto).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import stdtr, stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.sequential import (
    FIRST,
    LEAST_CHANCE,
    LEVEL,
    conditional_power,
    levels,
)
from timm_parallel.lab.analysis.statistics import LEVEL as SWEEP_LEVEL
from timm_parallel.lab.analysis.verdict import BASE, CODE, HEAD, LOST_ALONE

Array = np.ndarray
LIMIT = 12
# True differences between head and base, in standard deviations of a run.
DIFFERENCES = (1, 2, 3)
ACCURACY, NOISE = 0.7, 0.01
# Numbers of settings that a sweep compares with its baseline.
SETTINGS = (1, 3, 9)
SAMPLES = 10_000


@dataclass(frozen=True)
class Series:
    """Accuracies of base and head: series × pairs. NaN is a run that diverged."""

    base: Array
    head: Array
    # True difference between head and base.
    truth: float
    # Number of images that a run evaluates.
    samples: int = SAMPLES


@dataclass(frozen=True)
class Outcome:
    """Ends of many series: 1 for better, -1 for worse, 0 for no difference shown; the number of
    pairs; and True if the interval holds the true difference.
    """

    words: Array
    pairs: Array
    covered: Array


Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def normal(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    return draw.standard_normal(shape)


def heavy_tailed(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Draw Student's t with 3 degrees of freedom and a standard deviation of 1."""
    return draw.standard_t(3, shape) / np.sqrt(3)


def skewed(draw: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Draw from a negative exponential distribution with a standard deviation of 1."""
    return 1 - draw.standard_exponential(shape)


def pairs_of_runs(
    draw: np.random.Generator,
    series: int,
    difference: float = 0,
    noise: Draw = normal,
    spread: float = 1,
    correlation: float = 0,
    lost: float = 0,
) -> Series:
    """Simulate accuracies. `difference`: how much better head is, in standard deviations of a run
    of base. `spread`: noise of head relative to that of base. `correlation`: correlation of the two
    runs of a pair. `lost`: share of runs that diverge.
    """
    shape = series, LIMIT
    shared = np.sqrt(correlation) * draw.standard_normal(shape)
    own = np.sqrt(1 - correlation)
    base = ACCURACY + NOISE * (shared + own * noise(draw, shape))
    head = ACCURACY + NOISE * (difference + shared + spread * own * noise(draw, shape))
    for values in (base, head):
        values[draw.random(shape) < lost] = np.nan
    return Series(np.minimum(base, 1), np.minimum(head, 1), NOISE * difference)


def images(
    draw: np.random.Generator,
    series: int,
    difference: float = 0,
    share: float = 0.99,
    n: int = 1000,
) -> Series:
    """Simulate the share of `n` new images that a run classifies correctly."""
    shape = series, LIMIT
    truth = min(share + difference * np.sqrt(share * (1 - share) / n), 1.0)
    base, head = draw.binomial(n, share, shape) / n, draw.binomial(n, truth, shape) / n
    return Series(base, head, truth - share, n)


Make = Callable[..., Series]
ROWS: dict[str, Make] = {
    "normal": pairs_of_runs,
    "t with 3 degrees of freedom": partial(pairs_of_runs, noise=heavy_tailed),
    "skewed (exponential)": partial(pairs_of_runs, noise=skewed),
    "head 5 times as noisy": partial(pairs_of_runs, spread=5),
    "20 % of runs diverge": partial(pairs_of_runs, lost=0.2),
    **{f"correlation {r}": partial(pairs_of_runs, correlation=r) for r in (0.3, 0.5, 0.8)},
    "90 % of 270 images": partial(images, share=0.9, n=270),
    "99 % of 1,000 images": images,
    "99.6 % of 270 images": partial(images, share=0.996, n=270),
    "99.9 % of 10,000 images": partial(images, share=0.999, n=10_000),
}
# A kind of noise for which four to twelve pairs are too few for any t test.
UNDECIDABLE: dict[str, Make] = {
    "skewed, head 5 times as noisy": partial(pairs_of_runs, noise=skewed, spread=5)
}


def angle(values: Array) -> Array:
    return np.arcsin(np.sqrt(values))


def decide_all(series: Series, persists: bool = False, level: float = LEVEL) -> Outcome:
    """Decide on many series at once, as `judge` does on one. `persists`: go on to the limit where a
    verdict stops because it is unlikely to decide. `level`: chance of a false verdict.
    """
    boundaries = levels(LIMIT, level)
    count = len(series.base)
    words, ends = np.zeros(count, int), np.zeros(count, int)
    covered = np.ones(count, bool)
    running = np.ones(count, bool)
    known = ~np.isnan(series.base) & ~np.isnan(series.head)
    alone_base = np.isnan(series.base) & ~np.isnan(series.head)
    alone_head = np.isnan(series.head) & ~np.isnan(series.base)
    for run in range(FIRST, LIMIT + 1):
        base, head, both = series.base[:, :run], series.head[:, :run], known[:, :run]
        lost_base, lost_head = alone_base[:, :run].sum(axis=1), alone_head[:, :run].sum(axis=1)
        enough = min(LOST_ALONE, run)
        by_loss = ((lost_base == 0) & (lost_head >= enough)) * -1 + (
            (lost_head == 0) & (lost_base >= enough)
        )
        n = both.sum(axis=1)
        of_pairs = np.array([boundaries.get(pairs, 0.0) for pairs in n])
        p, sign = _test(angle(base), angle(head), both, _step(series, run))
        shown = np.where((n >= FIRST) & (p <= of_pairs), sign, 0)
        # An accuracy cannot show less than one image.
        shown[np.abs(_moments(base, head, both)[1]) <= 1 / series.samples] = 0
        # A version that lost runs is not better.
        shown[(shown > 0) & np.isnan(head).any(axis=1)] = 0
        word = np.where(by_loss != 0, by_loss, shown)
        last = np.minimum(n + LIMIT - run, LIMIT)
        stops = (word != 0) | (run == LIMIT)
        for end in {*last[n >= FIRST].tolist()} if run < LIMIT and not persists else ():
            few = (last == end) & (n >= FIRST)
            power = conditional_power(p[few], n[few], end, boundaries[end])
            stops[few] |= power < LEAST_CHANCE
        stops &= running
        words[stops], ends[stops] = word[stops], run
        covered[stops] = _covers(base, head, both, of_pairs, series)[stops]
        running &= ~stops
    return Outcome(words, ends, covered)


def _step(series: Series, run: int) -> Array:
    """Return the standard deviation of rounding to whole images, on the scale of angles, at the
    mean of all runs of a series.
    """
    both = np.concatenate([series.base[:, :run], series.head[:, :run]], axis=1)
    middle = _mean(angle(both))
    value = np.sin(middle) ** 2
    up = np.where(
        value + 1 / series.samples <= 1, value + 1 / series.samples, value - 1 / series.samples
    )
    step: Array = np.abs(angle(up) - middle) / np.sqrt(12)
    return step


def _moments(base: Array, head: Array, both: Array) -> tuple[Array, Array, Array]:
    """Return (number of complete pairs, mean of their differences, its standard error)."""
    n = both.sum(axis=1)
    differences = np.where(both, head - base, 0.0)
    mean = differences.sum(axis=1) / np.maximum(n, 1)
    squares = (np.where(both, differences - mean[:, None], 0.0) ** 2).sum(axis=1)
    return n, mean, np.sqrt(squares / np.maximum(n - 1, 1) / np.maximum(n, 1))


def _slack(base: Array, head: Array) -> tuple[Array, Array]:
    """Return how much lower and higher the difference may be if each lost run was the worst or the
    best of its series.
    """
    low = np.fmin.reduce(np.concatenate([base, head], axis=1), axis=1)
    high = np.fmax.reduce(np.concatenate([base, head], axis=1), axis=1)
    share_base, share_head = np.isnan(base).mean(axis=1), np.isnan(head).mean(axis=1)
    of_base, of_head = _mean(base), _mean(head)
    down = share_head * (of_head - low) + share_base * (high - of_base)
    up = share_head * (high - of_head) + share_base * (of_base - low)
    return down, up


def _mean(values: Array) -> Array:
    """Return the mean of the known values of each series, 0 if there are none."""
    known = ~np.isnan(values)
    mean: Array = np.where(known, values, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return mean


def _test(base: Array, head: Array, both: Array, step: Array) -> tuple[Array, Array]:
    """Return (two-sided p-value, sign of the difference) of each series."""
    n, mean, error = _moments(base, head, both)
    error = np.maximum(error, np.sqrt(2 / np.maximum(n, 1)) * step)
    down, up = _slack(base, head)
    certain = np.maximum(np.maximum(mean - down, -mean - up), 0)
    ratio = np.divide(certain, error, out=np.zeros_like(certain), where=error > 0)
    return 2 * stdtr(np.maximum(n - 1, 1), -ratio), np.sign(mean).astype(int)


def _covers(base: Array, head: Array, both: Array, level: Array, series: Series) -> Array:
    """Return True for each series whose interval, in points, holds the true difference."""
    n, mean, error = _moments(base, head, both)
    reach = stdtrit(np.maximum(n - 1, 1), 1 - level / 2) * np.maximum(error, 1e-12)
    down, up = _slack(base, head)
    low = np.minimum(mean - reach - down, mean - 1 / series.samples)
    high = np.maximum(mean + reach + up, mean + 1 / series.samples)
    inside: Array = (low <= series.truth) & (series.truth <= high)
    return inside


def row(name: str, make: Make, series: int) -> list[float]:
    """Simulate a row of the table: false verdicts and mean pairs on equal code, the power for each
    of DIFFERENCES, and the smallest coverage. Each row has its own random numbers.
    """
    draw = np.random.default_rng([53, sum(map(ord, name))])
    equal = decide_all(make(draw, series))
    others = [decide_all(make(draw, series, difference=size)) for size in DIFFERENCES]
    covered = min(float(outcome.covered.mean()) for outcome in (equal, *others))
    power = [float((outcome.words > 0).mean()) for outcome in others]
    return [float((equal.words != 0).mean()), float(equal.pairs.mean()), *power, covered]


def sweep_row(settings: int, count: int) -> list[float]:
    """Simulate sweeps of a baseline and other `settings`, of which none differs from it, or one is
    better by 2 standard deviations of a run. Return (sweeps with anything false, mean seeds of a
    setting, mean seeds of the baseline) if none differs, then (sweeps that find the better one, its
    mean seeds), and how often all intervals of a sweep hold.
    """
    draw = np.random.default_rng([53, settings])
    results = []
    for size in (0, 2):
        base = ACCURACY + NOISE * draw.standard_normal((count, LIMIT))
        outcomes = []
        for number in range(settings):
            truth = NOISE * size * (number == 0)
            head = ACCURACY + truth + NOISE * draw.standard_normal((count, LIMIT))
            series = Series(base, np.minimum(head, 1), truth)
            outcomes.append(decide_all(series, level=SWEEP_LEVEL / settings))
        results.append(outcomes)
    equal, others = results
    pairs = np.array([outcome.pairs for outcome in equal])
    false = np.any([outcome.words != 0 for outcome in equal], axis=0)
    covered = [np.all([outcome.covered for outcome in each], axis=0).mean() for each in results]
    return [
        float(false.mean()),
        float(pairs.mean()),
        float(pairs.max(axis=0).mean()),
        float((others[0].words > 0).mean()),
        float(others[0].pairs.mean()),
        float(min(covered)),
    ]


def most_false(count: int, level: float = LEVEL) -> float:
    """Return the largest share of false verdicts that chance explains: `level` plus two standard
    errors. `count`: number of verdicts.
    """
    return level + 2 * float(np.sqrt(level * (1 - level) / count))


def records(series: Series, number: int, pairs: int) -> list[RunRecord]:
    """Build the run records of the first `pairs` pairs of a series."""
    runs = []
    for name, values in ((BASE, series.base), (HEAD, series.head)):
        for seed, value in enumerate(values[number, :pairs]):
            status = "not_finite" if np.isnan(value) else "done"
            result = {
                "val.acc": float(value),
                "metrics.acc.lower_is_better": False,
                "metrics.acc.is_proportion": True,
                "val.samples": series.samples,
                "devices": 1,
            }
            runs.append(
                RunRecord(
                    name=f"{name}_{seed}",
                    folder=Path(name),
                    status=status,
                    block=seed,
                    overrides=(f"{CODE}={name}",),
                    result=result if status == "done" else {},
                    config={CODE: name, "seed": seed, "checkpoint.metric": "val/acc"},
                )
            )
    return runs


def main(argv: list[str]) -> None:
    series = int(argv[0]) if argv else 10_000
    power = " | ".join(f"{size} sd" for size in DIFFERENCES)
    print(f"| noise | false, % | pairs | {power} | covered, % |")
    print(f"|---|---:|---:|{'---:|' * len(DIFFERENCES)}---:|")
    for name, make in (ROWS | UNDECIDABLE).items():
        false, pairs, *found, covered = row(name, make, series)
        shares = " | ".join(f"{share:.2f}" for share in found)
        print(f"| {name} | {100 * false:.1f} | {pairs:.1f} | {shares} | {100 * covered:.1f} |")
    print("\n| settings | false, % | seeds | of baseline | 2 sd | its seeds | covered, % |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for settings in SETTINGS:
        false, seeds, of_base, found_two, seeds_two, covered = sweep_row(settings, series)
        print(
            f"| {settings} | {100 * false:.1f} | {seeds:.1f} | {of_base:.1f} | {found_two:.2f} "
            f"| {seeds_two:.1f} | {100 * covered:.1f} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
