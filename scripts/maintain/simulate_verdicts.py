"""Simulate verdicts on code changes whose true effect is known, and count false ones: `python
scripts/maintain/simulate_verdicts.py [verdicts] [families] [processes]`.

The script passes invented run records to the function that decides
(timm_parallel/lab/analysis/verdict.py). The first Markdown table shows how often equal code is
called better or worse, by one verdict and by 20 successive verdicts on one base. The second table
shows the power. Defaults are 1000 verdicts, 500 families (series of 20 verdicts) and 2 processes.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import LEVEL
from timm_parallel.lab.analysis.verdict import (
    BASE,
    BETTER,
    CODE,
    HEAD,
    WORSE,
    Record,
    judge,
    word_of,
)

SEEDS = (3, 5, 8)
# Number of successive verdicts on one base.
FAMILY = 20
# Positions of a verdict in such a series for which the power is computed.
NUMBERS = (1, 5, 20)
# True differences between head and base, in standard deviations of a run.
DIFFERENCES = (1, 2, 3)
ACCURACY, NOISE, SEED_NOISE = 0.7, 0.01, 0.005
IMAGES_PER_SECOND, SPEED_NOISE = 1000.0, 0.03


def run_records(draw: np.random.Generator, seeds: int, difference: float = 0) -> list[RunRecord]:
    """Invent the runs of a verdict. Base and head have the same speed. `difference`: how much
    better the accuracy of head is, in standard deviations of a run.
    """
    shared = SEED_NOISE * draw.standard_normal(seeds)
    runs = []
    for name, mean in ((BASE, ACCURACY), (HEAD, ACCURACY + difference * NOISE)):
        accuracy = mean + shared + NOISE * draw.standard_normal(seeds)
        speed = IMAGES_PER_SECOND * np.exp(SPEED_NOISE * draw.standard_normal(seeds))
        for seed in range(seeds):
            result = {
                "val.acc": float(accuracy[seed]),
                "metrics.acc.lower_is_better": False,
                "metrics.acc.is_proportion": True,
                "throughput.images_per_sec": float(speed[seed]),
                "val.samples": 10_000,
                "devices": 1,
            }
            runs.append(
                RunRecord(
                    name=f"{name}_{seed}",
                    folder=Path(name),
                    status="done",
                    block=seed,
                    overrides=(f"{CODE}={name}",),
                    result=result,
                    config={CODE: name, "seed": seed, "checkpoint.metric": "val/acc"},
                )
            )
    return runs


def words(draw: np.random.Generator, seeds: int, number: int, difference: float = 0) -> list[str]:
    """Simulate a verdict. Return its conclusion (better, worse or no difference shown), followed by
    the conclusion of each measure.
    """
    verdict = judge(run_records(draw, seeds, difference), Record(BASE, HEAD, number))
    measured = [contrast for contrast in verdict.contrasts.values() if contrast.effect is not None]
    return [verdict.word, *map(word_of, measured)]


def is_false(said: list[str]) -> bool:
    """Return True if a verdict on equal code says better or worse anywhere, which is then false."""
    return bool({BETTER, WORSE} & {*said})


def count_equal(verdicts: int, seeds: int) -> tuple[int, int]:
    """Simulate verdicts on equal code, each the first on its base. Return (number of verdicts that
    say better or worse, number of verdicts with a difference in any measure).
    """
    draw = np.random.default_rng([39, seeds])
    said = [words(draw, seeds, 1) for _ in range(verdicts)]
    return sum(is_false(line[:1]) for line in said), sum(map(is_false, said))


def count_false_families(families: int, seeds: int) -> int:
    """Simulate series of 20 verdicts on equal code. Return how many series contain a false
    statement.
    """
    draw = np.random.default_rng([40, seeds])
    return sum(
        any(is_false(words(draw, seeds, number)) for number in range(1, FAMILY + 1))
        for _ in range(families)
    )


def power(verdicts: int, case: tuple[int, int, int]) -> float:
    """Return the power of a verdict: the share of simulated verdicts that say better if the head is
    truly better. `case`: position of the verdict in its series, number of seeds, and true
    difference.
    """
    number, seeds, difference = case
    draw = np.random.default_rng([41, *case])
    return (
        sum(words(draw, seeds, number, difference)[0] == BETTER for _ in range(verdicts)) / verdicts
    )


def most_false(count: int) -> float:
    """Return the largest share of false verdicts that chance explains: the nominal error rate LEVEL
    plus two standard errors. `count`: number of verdicts.
    """
    return LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / count)


def main(argv: list[str]) -> None:
    verdicts, families, processes = (
        int(word) for word in (argv + ["1000", "500", "2"][len(argv) :])[:3]
    )
    with Pool(processes) as pool:
        print("| seeds | equal code: better or worse | any row of its table | 20 in a row |")
        print("|---:|---:|---:|---:|", flush=True)
        false = pool.map(partial(count_false_families, families), SEEDS, chunksize=1)
        equal = pool.map(partial(count_equal, verdicts), SEEDS, chunksize=1)
        for seeds, (word, table), family in zip(SEEDS, equal, false, strict=True):
            shares = word / verdicts, table / verdicts, family / families
            print(f"| {seeds} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")
        limits = [most_false(count) for count in (verdicts, verdicts, families)]
        print(f"| at most | {' | '.join(f'{100 * share:.1f} %' for share in limits)} |\n")
        cases = [(n, seeds, d) for n in NUMBERS for seeds in SEEDS for d in DIFFERENCES]
        found = dict(
            zip(cases, pool.map(partial(power, verdicts), cases, chunksize=1), strict=True)
        )
    print(f"| verdict | seeds | {' | '.join(f'{d} sd' for d in DIFFERENCES)} |")
    print(f"|---:|---:|{'---:|' * len(DIFFERENCES)}")
    for number in NUMBERS:
        for seeds in SEEDS:
            powers = (100 * found[number, seeds, d] for d in DIFFERENCES)
            print(f"| {number} | {seeds} | {' | '.join(f'{share:.0f} %' for share in powers)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
