"""Choose the best configuration, and estimate its value without the bias that comes from choosing
the best. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from timm_parallel.lab.analysis.scales import Scale
from timm_parallel.lab.analysis.statistics import (
    SMALLEST_DIFFERENCE,
    SUPPORTED,
    Contrast,
    Row,
    decide,
    estimate,
)


def choose(
    rows: Sequence[Row],
    simplest_first: Sequence[str],
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> tuple[str, Contrast | None, list[str]] | None:
    """Choose the simplest configuration whose confidence interval shows that it is at most
    `smallest_difference` slower than the fastest one.

    `rows`: measured speeds. `simplest_first`: configurations from the simplest to the most complex
    one. Return (configuration, its comparison with the fastest one, other configurations). The
    comparison is None if the configuration is the fastest. The other configurations share no repeat
    with the fastest, so that they cannot be compared with it. Return None without rows.
    """
    # The rule "take the simplest configuration that is not shown to be slower" is not used here.
    # One disturbed run widens all intervals, and the rule would then choose too simple a
    # configuration.
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


def best(rows: Sequence[Row], scale: Scale) -> str | None:
    """Return the configuration with the best mean, after removing the differences between repeats.
    Return None without rows.
    """
    values: dict[str, dict[object, float]] = {}
    for name, block, value in rows:
        values.setdefault(name, {})[block] = scale.sign * scale.to(value)
    names = list(values)
    if all(of.keys() == values[names[0]].keys() for of in values.values()):
        return max(names, key=lambda name: sum(values[name].values()), default=None)
    # Leave out configurations that share no repeat with the first one, because they cannot be
    # compared.
    estimates = estimate(rows, [(name, names[0]) for name in names], scale)
    known = {e.a: e.better for e in estimates if e.difference is not None}
    return max(known, key=lambda name: known[name], default=None)


def corrected_values(rows: Sequence[Row], scale: Scale) -> dict[object, tuple[str, float]]:
    """For each repeat, choose the configuration that is best in all other repeats, and take its
    value in this repeat. Return a dictionary from repeat to (configuration, value), which is empty
    for a single repeat.

    The mean of these values estimates the value of the best configuration in new runs. The mean
    over the repeats that made the choice would be too good, because chance helped (Stone, 1974).
    """
    scores = {}
    for block in dict.fromkeys(block for _, block, _ in rows):
        here = {name: value for name, of, value in rows if of == block}
        chosen = best([row for row in rows if row[1] != block and row[0] in here], scale)
        if chosen is not None:
            scores[block] = chosen, here[chosen]
    return scores
