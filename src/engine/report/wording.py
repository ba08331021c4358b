"""How figures and settings are written for a reader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from src.engine.report.measured import RunRecord
from src.engine.report.statistics import UNDECIDED, Contrast, Summary

MOST_SHOWN = 1000  # times: what an interval reaches beyond it is of no interest to anyone


def doubt(contrast: Contrast) -> str:
    """The verdict with its reason, e.g. `undecided: this sweep could have seen a difference of 12.0 %; about 9 blocks would do`."""
    if contrast.ratio is None:
        return f"{contrast.verdict}: no block has figures of both to compare"
    if contrast.verdict != UNDECIDED:
        return contrast.verdict
    if contrast.detectable is None:
        return "undecided: without repeats the noise is not known; sweep.repeats=5 would tell"
    more = f"about {contrast.blocks_needed} blocks would do" if contrast.blocks_needed else "1,000 blocks would not do"
    return f"undecided: this sweep could have seen a difference of {percent(contrast.detectable, 1)}; {more}"


def times(contrast: Contrast, level: str = "95 %: ") -> str:
    """E.g. `1.90 × (95 %: 1.80 to 2.00)`; `level` is empty below a heading that names it."""
    assert contrast.ratio is not None
    if contrast.low is None or contrast.high is None:
        return f"{contrast.ratio:.2f} ×"
    high = f"{contrast.high:.2f}" if contrast.high < MOST_SHOWN else f"more than {MOST_SHOWN:,}"
    return f"{contrast.ratio:.2f} × ({level}{contrast.low:.2f} to {high})"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %" if share < MOST_SHOWN else f"more than {100 * MOST_SHOWN:,} %"


def figure(value: float) -> str:
    """A number as a person reads it: three digits, or all digits before the point."""
    if value == 0 or abs(value) >= 99.95:
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
    return "; ".join(found[:most] + more)


def words(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={spelled(run.config.get(key))}" for key in keys)


def spelled(value: Any) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "''"
