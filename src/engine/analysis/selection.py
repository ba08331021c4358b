"""Choose the best configuration, and correct its value for having been chosen. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from src.engine.analysis.scales import Scale
from src.engine.analysis.statistics import SMALLEST_DIFFERENCE, SUPPORTED, Contrast, decide, estimate

Row = tuple[str, object, float]


def choose(
    rows: Iterable[Row],
    simplest_first: Sequence[str],
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> tuple[str, Contrast | None, list[str]] | None:
    """Recommend a point: the simplest one that is shown to be at most `smallest_difference` slower than the fastest.

    Shown: its whole interval is within the difference. If it had to be shown that a point is slower, one disturbed run,
    which widens all intervals, would recommend the simplest. Returns the point's name, its contrast with the fastest
    point (None if it is the fastest), and the points that share no chain of blocks with the fastest, which are not
    compared. Returns None without rows.
    """
    rows = list(rows)
    measured = {name for name, _, value in rows if value > 0}
    names = [name for name in simplest_first if name in measured]
    if not names:
        return None
    estimates = estimate(rows, [(name, names[0]) for name in names])
    differences = {e.a: e.difference for e in estimates if e.difference is not None}
    apart = [name for name in names if name not in differences]
    best = max(differences, key=lambda name: differences[name])
    for to_best in estimate(rows, [(name, best) for name in names[: names.index(best)]]):
        [contrast] = decide([to_best], smallest_difference)
        if contrast.exceeds(1 - smallest_difference) == SUPPORTED:
            return contrast.a, contrast, apart
    return best, None, apart


def best(rows: Iterable[Row], scale: Scale) -> str | None:
    """Return the point with the best estimate, without the block effects. None without rows.

    Points that no chain of blocks connects with the first one are left out.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for name, *_ in rows))
    estimates = estimate(rows, [(name, names[0]) for name in names], scale)
    known = {e.a: e.better for e in estimates if e.difference is not None}
    return max(known, key=lambda name: known[name], default=None)


def corrected_value(rows: Iterable[Row], scale: Scale) -> float | None:
    """Return what the best point is worth to new runs: choose it on all other blocks, score it on this one, average.

    The mean of the chosen point on the blocks that chose it is too good, because chance helped to choose it (leave one
    out: Stone, 1974). None with one block.
    """
    rows = list(rows)
    scores = []
    for block in dict.fromkeys(block for _, block, _ in rows):
        here = {name: value for name, of, value in rows if of == block}
        chosen = best([row for row in rows if row[1] != block and row[0] in here], scale)
        if chosen is not None:
            scores.append(here[chosen])
    return sum(scores) / len(scores) if scores else None
