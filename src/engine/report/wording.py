"""How figures are written for a reader."""

from __future__ import annotations

from collections.abc import Iterable

from src.engine.report.statistics import UNDECIDED, Contrast, Summary


def doubt(contrast: Contrast) -> str:
    """The verdict with what an undecided one needs, e.g. `undecided: this sweep could have seen 12 %; 9 blocks would do`."""
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


def method(smallest_difference: float) -> list[str]:
    """How the figures came about and what the words mean; docs/report.md says more."""
    return [
        "Images/s of a run are images over seconds of its timed window, waiting for data and logging in it, warm-up, "
        "evaluation and saving not. Tables show medians over repeats with the smallest and the largest; they describe "
        "and decide nothing. Strong scaling keeps the global batch, weak scaling the batch per device.",
        "Each block of a sweep runs every point once, in an order of its own. Ratios are of mean log images/s with the "
        "blocks' differences taken out; their intervals come from Student's t with the noise pooled over the points of "
        "a table. Tested are each point against single, and ddp against dp on the same devices, together by Holm's "
        "rule: where nothing differs, a page says something wrong in 6 % of cases at most. An interval is as wide as "
        "that rule asks, 95 % or more.",
        "Holds: the interval excludes no difference, in the claimed direction. Does not hold: it lies wholly below a "
        f"difference of {percent(smallest_difference)} (sweep.smallest_difference). Undecided: neither; then it says which "
        "difference would have been seen in 80 of 100 such sweeps, and how many blocks would decide if the estimate "
        "stays. Cannot be measured here: with the reason.",
        "The first sentence names the highest estimate, or a simpler point that is shown to be at most "
        f"{percent(smallest_difference)} slower. Outliers and flagged runs are named and kept; runs beside other jobs are "
        "shown and not compared. A dash was not recorded. n/a cannot be measured here.",
    ]
