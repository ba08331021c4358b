"""How figures are written for a reader."""

from __future__ import annotations

from collections.abc import Iterable

from src.engine.report.statistics import UNDECIDED, Contrast, Summary


def doubt(contrast: Contrast) -> str:
    """The verdict with its reason, e.g. `undecided: this sweep could have seen a difference of 12 %; about 9 blocks would do`."""
    if contrast.ratio is None:
        return f"{contrast.verdict}: no block has figures of both to compare"
    if contrast.verdict != UNDECIDED:
        return contrast.verdict
    if contrast.detectable is None:
        return "undecided: one measurement of each shows no noise; sweep.repeats=5 does"
    more = f"about {contrast.blocks_needed} blocks" if contrast.blocks_needed else "more than 1,000 blocks"
    return f"undecided: this sweep could have seen a difference of {percent(contrast.detectable, 1)}; {more} would do"


def times(contrast: Contrast) -> str:
    """E.g. `1.90 × (95 %: 1.80 to 2.00)`."""
    assert contrast.ratio is not None
    interval = "" if contrast.low is None else f" (95 %: {contrast.low:.2f} to {contrast.high:.2f})"
    return f"{contrast.ratio:.2f} ×{interval}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def figure(value: float) -> str:
    """A number as a person reads it: three digits, or all digits before the point."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return text if "e" not in text else f"{value:.1e}"


def with_range(summary: Summary, unit: str = "", factor: float = 1) -> str:
    """Median, unit and, where they differ in what is shown, (smallest–largest)."""
    low, high = figure(summary.low * factor), figure(summary.high * factor)
    return figure(summary.median * factor) + unit + (f" ({low}–{high})" if low != high else "")


def listing(items: Iterable[str], most: int = 4) -> str:
    found = list(dict.fromkeys(items))
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "; ".join(found[:most] + more) or "—"
