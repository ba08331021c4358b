"""When repeated measurements bear a statement: ratios of points with intervals, and one of four words. Pure functions.

The model is that of randomised complete blocks: log(value) = point + block + noise, with one noise for all points. Its
intra-block analysis (Cochran and Cox, Experimental Designs, 1957, chapter 9) also serves blocks that lack a point or
hold one twice. Holm (1979) keeps the chance of any wrong statement of a family at `level`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t and its quantiles; scipy.stats takes a second to import

HOLDS, FAILS, UNDECIDED, UNMEASURED = "holds", "does not hold", "undecided", "cannot be measured here"
SMALLEST_DIFFERENCE = 0.03  # a smaller one is of no interest to who chooses a strategy
LEVEL = 0.05  # chance of any wrong statement in a family
POWER = 0.8  # "could have been seen": in this share of such sweeps
MOST_BLOCKS = 1000  # more are not advised to anyone


@dataclass(frozen=True)
class Estimate:
    """log(a / b) from one set of rows. `difference` is None where the rows do not connect a and b."""

    a: str
    b: str
    n: int  # measurements of a or of b, whichever are fewer
    difference: float | None = None
    error: float = 0.0  # standard error of the difference
    freedom: int = 0  # residual degrees of freedom; 0: the rows show no noise
    noise: float = 0.0  # residual standard deviation of one measurement
    points: int = 2

    @property
    def p(self) -> float:
        """Two-sided probability of such a difference where there is none. Only of one that was tested against noise."""
        assert self.difference is not None
        if self.error == 0:
            return 0.0 if self.difference else 1.0
        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))


@dataclass(frozen=True)
class Contrast:
    """The statement "a is more than b": its ratio a / b, and whether it may be made."""

    a: str
    b: str
    ratio: float | None
    low: float | None  # of the interval at the level that Holm's rule leaves to this contrast; None: no noise is known
    high: float | None
    n: int
    verdict: str
    detectable: float | None = None  # smallest difference (0.1: a tenth) to be seen in POWER of such sweeps
    blocks_needed: int | None = None  # where undecided: how many would decide, if the estimate stays; None: unknown

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high), without ends where no noise is known."""
        return (-math.inf, math.inf) if self.low is None or self.high is None else (self.low, self.high)

    def exceeds(self, limit: float) -> str:
        """The verdict on "a is at least `limit` times b"; none where the contrast itself is given none."""
        if self.verdict == UNMEASURED:
            return UNMEASURED
        low, high = self.interval
        return HOLDS if low >= limit else FAILS if high < limit else UNDECIDED


def estimate(rows: Iterable[tuple[str, object, float]], pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
    """The differences of `pairs` in logarithms, blocks taken out: name only pairs that will be stated.

    `rows`: (point, block, value) of every measurement. Values that are not positive are left out.
    """
    known = [row for row in rows if 0 < row[2] < math.inf]
    counts = Counter(name for name, *_ in known)
    named: list[tuple[str, object]] = [("point", row[0]) for row in known] + [("block", row[1]) for row in known]
    columns = {name: column for column, name in enumerate(dict.fromkeys(named))}
    design = np.zeros((len(known), len(columns)))
    for line, (name, block, _) in zip(design, known, strict=True):
        line[[columns["point", name], columns["block", block]]] = 1
    values = np.log([value for *_, value in known])
    values -= values.mean() if known else 0.0
    information = design.T @ design
    inverse = np.linalg.pinv(information, hermitian=True, rcond=1e-9)
    effects = inverse @ design.T @ values
    rest = values - design @ effects
    freedom = len(known) - round(float(np.trace(inverse @ information)))  # the trace is the rank of the design
    noise = math.sqrt(float(rest @ rest) / freedom) if freedom > 0 else 0.0
    found = []
    for a, b in pairs:
        n = min(counts[a], counts[b])
        weights = np.zeros(len(columns))
        if n:
            weights[columns["point", a]] += 1
            weights[columns["point", b]] -= 1  # the same column where a point is held against itself
        if not n or np.abs(information @ (inverse @ weights) - weights).max() > 1e-6:  # no chain of blocks joins them
            found.append(Estimate(a, b, n))
            continue
        error = noise * math.sqrt(float(weights @ inverse @ weights))
        found.append(Estimate(a, b, n, float(weights @ effects), error, freedom, noise, len(counts)))
    return found


def decide(
    estimates: Sequence[Estimate], smallest_difference: float = SMALLEST_DIFFERENCE, level: float = LEVEL
) -> list[Contrast]:
    """Contrasts of one family, in the order of `estimates`.

    Holm: the smallest of m probabilities is held against level / m, the next against level / (m - 1), and so on, until
    one fails; the others stay at its level. The interval of each is at that same level, so that it tells what the rule
    tells.
    """
    tested = sorted((e for e in estimates if e.freedom), key=lambda e: e.p)
    levels: dict[int, float] = {}
    share, passed = level, True
    for place, e in enumerate(tested):
        if passed:
            share = level / (len(tested) - place)
            passed = e.p <= share
        levels[id(e)] = share
    return [_contrast(e, levels.get(id(e), level), smallest_difference) for e in estimates]


def _contrast(e: Estimate, level: float, smallest: float) -> Contrast:
    if e.difference is None:
        return Contrast(e.a, e.b, None, None, None, e.n, UNMEASURED)
    ratio = math.exp(e.difference)
    if not e.freedom:
        return Contrast(e.a, e.b, ratio, None, None, e.n, UNDECIDED)
    reach, power = (float(stdtrit(e.freedom, share)) * e.error for share in (1 - level / 2, POWER))
    with np.errstate(over="ignore"):  # with one degree of freedom and a large family t reaches beyond all floats
        low, high, detectable = np.exp([e.difference - reach, e.difference + reach, reach + power]) - (0, 0, 1)
    verdict = FAILS if high < 1 + smallest else HOLDS if low > 1 else UNDECIDED
    needed = _blocks_needed(e, level, smallest) if verdict == UNDECIDED else None
    return Contrast(e.a, e.b, ratio, float(low), float(high), e.n, verdict, float(detectable), needed)


def _blocks_needed(e: Estimate, level: float, smallest: float) -> int | None:
    """Blocks after which the estimate, if it stays, lies clear of no difference or of the smallest of interest."""
    assert e.difference is not None
    margin = max(e.difference, math.log1p(smallest) - e.difference)

    def enough(blocks: int) -> bool:
        freedom = max(1, (blocks - 1) * (e.points - 1))
        reach = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
        return bool(2 * (reach * e.noise / margin) ** 2 <= blocks)

    more = range(e.n + 1, MOST_BLOCKS + 1)
    place = bisect_left(more, True, key=enough)
    return more[place] if place < len(more) else None


def choose(
    rows: Iterable[tuple[str, object, float]],
    simplest_first: Sequence[str],
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> tuple[str, Contrast | None, list[str]] | None:
    """The point that leads, where it leads as the simpler one its contrast with the highest, and the points that share no
    block with it or with one that does; None without rows.

    That is the highest estimate, or the simplest point whose interval shows it at most `smallest_difference` slower.
    "The simplest that cannot be excluded" would be led by one disturbed run, which widens all intervals.
    """
    rows = list(rows)
    measured = {name for name, _, value in rows if value > 0}
    names = [name for name in simplest_first if name in measured]
    if not names:
        return None
    to_first = {e.a: e.difference for e in estimate(rows, [(name, names[0]) for name in names])}
    apart = [name for name in names if to_first[name] is None]
    best = max(names, key=lambda name: -math.inf if (found := to_first[name]) is None else found)
    for to_best in estimate(rows, [(name, best) for name in names[: names.index(best)]]):
        [found] = decide([to_best], smallest_difference)
        if found.exceeds(1 - smallest_difference) == HOLDS:
            return found.a, found, apart
    return best, None, apart


@dataclass(frozen=True)
class Summary:
    """Repeats of one measurement: their median, smallest, largest and number. It describes; it decides nothing."""

    median: float
    low: float
    high: float
    count: int


def summarise(values: Iterable[float | None]) -> Summary | None:
    """None where nothing finite was measured: never a 0 in place of a missing number."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Summary(median(finite), min(finite), max(finite), len(finite)) if finite else None
