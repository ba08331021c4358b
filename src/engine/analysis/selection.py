"""Choose the best configuration, and estimate its value without the bias of choosing the best. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from src.engine.analysis.scales import Scale
from src.engine.analysis.statistics import SMALLEST_DIFFERENCE, SUPPORTED, Contrast, Row, decide, estimate


def choose(
    rows: Iterable[Row], simplest_first: Sequence[str], smallest_difference: float = SMALLEST_DIFFERENCE
) -> tuple[str, Contrast | None, list[str]] | None:
    """Return the simplest configuration whose interval shows it at most `smallest_difference` slower than the fastest.

    Returns the label, the contrast with the fastest (None if it is the fastest), and the labels that cannot be compared
    with the fastest, because no repeat ran both; None without rows.
    """
    # The rule "the simplest that is not shown to be slower" would choose too simple a configuration when one disturbed run
    # widens all intervals.
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
    """Return the configuration with the best mean, adjusted for differences between repeats; None without rows."""
    rows = list(rows)
    # Configurations that share no repeat with the first one cannot be compared, and are left out.
    names = list(dict.fromkeys(name for name, *_ in rows))
    estimates = estimate(rows, [(name, names[0]) for name in names], scale)
    known = {e.a: e.better for e in estimates if e.difference is not None}
    return max(known, key=lambda name: known[name], default=None)


def corrected_value(rows: Iterable[Row], scale: Scale) -> float | None:
    """Estimate the value of the best configuration in new runs, by leave-one-out over the repeats; None with one repeat."""
    rows = list(rows)
    # The mean over the repeats that made the choice is too good, because chance helped. So choose on all other repeats and
    # score on this one (Stone, 1974).
    scores = []
    for block in dict.fromkeys(block for _, block, _ in rows):
        here = {name: value for name, of, value in rows if of == block}
        chosen = best([row for row in rows if row[1] != block and row[0] in here], scale)
        if chosen is not None:
            scores.append(here[chosen])
    return sum(scores) / len(scores) if scores else None
