"""Test the error rate and the power of the report's decisions on simulated sweeps with known
speeds. The settings are those of scripts/maintain/simulate_sweeps.py.

`python timm_parallel/tests/test_report_simulation.py` prints the table of
docs/dev/report_method.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from timm_parallel.lab.analysis.statistics import SUPPORTED, choose, decide, estimate

Row = tuple[str, object, float]
Key = tuple[str, int]
NOISE, DRIFT, SLOW_SHARE = 0.05, 0.10, 0.05
SWEEPS, BLOCKS = 2000, (3, 5, 8, 10, 20)
THREE: tuple[Key, ...] = (("single", 1), ("dp", 2), ("ddp", 2))
SEVEN: tuple[Key, ...] = (("single", 1), *((s, n) for s in ("dp", "ddp") for n in (2, 4, 8)))
AGAINST_SINGLE = {points: [(p, points[0]) for p in points[1:]] for points in (THREE, SEVEN)}
# A simulated sweep of 3 configurations has 2 comparisons, one of 7 configurations has 9. With 3
# configurations, the comparison of ddp with dp is left out.
PAIRS = {
    THREE: AGAINST_SINGLE[THREE],
    SEVEN: AGAINST_SINGLE[SEVEN] + [(("ddp", n), ("dp", n)) for n in (2, 4, 8)],
}


def sweep_of(
    speeds: dict[Key, float], blocks: int, drift: float, draw: np.random.Generator, slow: float = 0
) -> Iterator[tuple[Key, int, float]]:
    """Generate (configuration, repeat, images/s) of simulated runs, in random order within each
    repeat. `slow` is the fraction of runs at half speed.
    """
    points = list(speeds)
    noise = draw.standard_normal((blocks, len(points))) * NOISE
    halved = draw.random((blocks, len(points))) < slow
    total, position = blocks * len(points), 0
    for block in range(blocks):
        for place in draw.permutation(len(points)):
            change = (
                noise[block, place] - drift * position / total - halved[block, place] * np.log(2)
            )
            yield points[place], block, speeds[points[place]] * float(np.exp(change))
            position += 1


def named(runs: Iterator[tuple[Key, int, float]]) -> list[Row]:
    return [(f"{strategy} × {devices}", block, value) for (strategy, devices), block, value in runs]


def names(pairs: list[tuple[Key, Key]]) -> list[tuple[str, str]]:
    return [(f"{a[0]} × {a[1]}", f"{b[0]} × {b[1]}") for a, b in pairs]


@cache
def stated_wrongly(
    points: tuple[Key, ...], blocks: int, drift: float, sweeps: int = SWEEPS
) -> float:
    """Compute the fraction of simulated sweeps in which the report states a difference although
    all speeds are equal.
    """
    draw, pairs, wrong = np.random.default_rng([1, len(points), blocks]), names(PAIRS[points]), 0
    for _ in range(sweeps):
        results = decide(
            estimate(named(sweep_of(dict.fromkeys(points, 1000.0), blocks, drift, draw)), pairs)
        )
        wrong += any(
            c.low is not None and c.high is not None and not c.low <= 1 <= c.high for c in results
        )
    return wrong / sweeps


@cache
def found_of_a_tenth(
    points: tuple[Key, ...], blocks: int, drift: float, sweeps: int = SWEEPS
) -> float:
    """Compute the fraction of true differences of 10 % that the report states."""
    draw, pairs = np.random.default_rng([2, len(points), blocks]), names(PAIRS[points])
    faster = points[1:] if points == SEVEN else points[2:]
    speeds = {point: 1100.0 if point in faster else 1000.0 for point in points}
    differ = [place for place, (a, b) in enumerate(PAIRS[points]) if speeds[a] > speeds[b]]
    results = 0
    for _ in range(sweeps):
        decided = decide(estimate(named(sweep_of(speeds, blocks, drift, draw)), pairs))
        results += sum(decided[place].verdict == SUPPORTED for place in differ)
    return results / sweeps / len(differ)


@cache
def badly_led(blocks: int, drift: float, sweeps: int = SWEEPS) -> float:
    """Compute the fraction of simulated sweeps in which the report does not recommend the
    fastest configuration. 5 % of the runs have half speed.
    """
    draw, wrong = np.random.default_rng([3, blocks]), 0
    speeds: dict[Key, float] = dict(zip(THREE, (1000.0, 1250.0, 1900.0), strict=True))
    for _ in range(sweeps):
        led = choose(
            named(sweep_of(speeds, blocks, drift, draw, SLOW_SHARE)),
            ["single × 1", "dp × 2", "ddp × 2"],
        )
        wrong += led is None or led[0] != "ddp × 2"
    return wrong / sweeps


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("points", [THREE, SEVEN], ids=["3 points", "7 points"])
def test_speed_verdicts_have_expected_error_rate_and_power_in_a_small_simulation(
    points: tuple[Key, ...],
) -> None:
    assert stated_wrongly(points, 5, DRIFT, 200) <= 0.1
    assert found_of_a_tenth(points, 5, DRIFT, 200) > 0.4
    assert found_of_a_tenth(points, 10, DRIFT, 200) > 0.85
    assert badly_led(3, DRIFT, 200) <= 0.03


if __name__ == "__main__":
    print(
        "| blocks | "
        + " | ".join(f"{words}, {n} points" for n in (3, 7) for words in ("wrong", "results"))
        + " | bad lead |"
    )
    print("|---:" * 6 + "|")
    for blocks in BLOCKS:
        cells = []
        for points in (THREE, SEVEN):
            for measure in (stated_wrongly, found_of_a_tenth):
                cells.append(
                    " / ".join(
                        f"{100 * measure(points, blocks, drift):.1f}" for drift in (0.0, DRIFT)
                    )
                )
        cells.append(" / ".join(f"{100 * badly_led(blocks, drift):.1f}" for drift in (0.0, DRIFT)))
        print(f"| {blocks} | " + " | ".join(cells) + " |", flush=True)
