"""Put the findings and the numbers of a report into words. The sentences are in sentences.j2; the
console, the report and the verdict print the same ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from timm_parallel.lab.analysis.groups import DASH, join_short
from timm_parallel.lab.analysis.headline import Finding
from timm_parallel.lab.analysis.statistics import Contrast, Summary, Unit
from timm_parallel.machine.text import plural

# If the upper limit of the interval of a ratio is larger than this, the report prints no number.
MOST_SHOWN = 1000


def sentences(findings: Iterable[Finding]) -> str:
    """Return the sentences of findings, separated by spaces."""
    return " ".join(filter(None, map(sentence, findings)))


def sentence(finding: Finding) -> str:
    """Return the sentence of a finding, or its sentences, as one line."""
    return _one_line(getattr(macros(), finding.kind)(**finding.numbers))


def _one_line(text: str) -> str:
    """Join the lines of a macro, and remove the spaces that they leave before punctuation."""
    return re.sub(r" +(?=[.,;:)](\s|$))|(?<=\() +", "", " ".join(text.split()))


@cache
def macros() -> Any:
    """Load the module of sentences.j2, whose macros are named after the kinds of findings."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "figure": figure,
        "level": level_text,
        "limit": limit_text,
        "list_short": join_short,
        "number": number_text,
        "percent": percent,
        "plural": plural,
        "range": range_text,
        "setting": lambda setting: _one_line(macros().part_setting(setting)),
        "size": size_text,
        "times": times,
        "value": value_text,
        "with_range": lambda summary: with_range(Summary(**summary)),
    }
    return environment.get_template("sentences.j2").module


def times(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def limit_text(ratio: float) -> str:
    """Format an end of the interval of a ratio."""
    return f"{ratio:.2f}" if ratio < MOST_SHOWN else f"more than {MOST_SHOWN:,}"


def effect_text(contrast: Contrast | None) -> str:
    """Format a ratio or a difference with its interval, for example `1.90 × (1.80 to 2.00)` or
    `+7.9 (+1.4 to +14.4)`.
    """
    if contrast is None or contrast.effect is None:
        return DASH
    unit = contrast.scale.unit
    ends = [end for end in (contrast.low, contrast.high) if end is not None]
    texts = [limit_text(end) if unit == "ratio" else _signed(end, unit) for end in ends]
    effect = times(contrast.effect) if unit == "ratio" else _signed(contrast.effect, unit)
    return effect + (f" ({' to '.join(texts)})" if texts else "")


def _signed(difference: float, unit: Unit) -> str:
    return ("+" if difference > 0 else "") + number_text(difference, unit)


def number_text(size: float, unit: Unit) -> str:
    """Format a difference without the word for its unit: `12.0 %` for a ratio, `7.9` for a
    proportion, else a number.
    """
    if unit == "ratio":
        return percent(size, 1)
    return points(size) if unit == "proportion" else figure(size)


def size_text(size: float, unit: Unit) -> str:
    """Format the size of a difference: `12.0 %` for a ratio, `7.9 points` for a proportion, else a
    number.
    """
    return number_text(size, unit) + (" points" if unit == "proportion" else "")


def points(share: float) -> str:
    """Format a fraction as a percentage with one decimal place. Below 0.001, show two significant
    digits.
    """
    return f"{100 * share:.{_decimals(share, 0.001)}f}"


def _decimals(share: float, limit: float) -> int:
    return 1 if share == 0 or abs(share) >= limit else 1 + math.ceil(-math.log10(100 * abs(share)))


def value_text(value: float | None, unit: Unit, *alike: float) -> str:
    """Format a value of the metric. A proportion near 0 or 100 % gets enough decimal places to show
    its distance from 0 or 100 % with two significant digits.

    `alike`: values next to it in a sentence, which determine the decimal places instead.
    """
    if value is None:
        return DASH
    if unit != "proportion":
        return figure(value)
    return percent(value, max(map(_places, alike or (value,))))


def _places(value: float) -> int:
    # Round away the error of floating point, because 1 - 0.996 is not exactly 0.004.
    rest = round(min(value, 1 - value), 12)
    return _decimals(rest, 0.01) if rest > 0 else 1


def range_text(ends: Sequence[float], unit: Unit, *alike: float) -> str:
    """Format the ends of an interval of metric values, for example `70.1 % to 72.3 %`. `alike`:
    see value_text.
    """
    return " to ".join(value_text(end, unit, *alike) for end in ends)


def level_text(chance: float) -> str:
    """Format the level of a confidence interval, for example `95 %`. `chance`: probability that the
    interval does not contain the true value.
    """
    return f"{100 * (1 - chance):.4g} %"


def percent(share: float, digits: int = 0) -> str:
    return (
        f"{100 * share:.{digits}f} %" if share < MOST_SHOWN else f"more than {100 * MOST_SHOWN:,} %"
    )


def figure(value: float) -> str:
    """Format a number with three significant digits, or with all digits before the decimal point if
    there are more.
    """
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return text if "e" not in text else f"{value:.1e}"


def with_range(summary: Summary) -> str:
    """Format repeated measurements as `median (smallest–largest)`. The range is left out if both
    ends look the same.
    """
    low, high = figure(summary.low), figure(summary.high)
    return figure(summary.median) + (f" ({low}–{high})" if low != high else "")
