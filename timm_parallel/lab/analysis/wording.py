"""Format measurements, verdicts and settings as the texts of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable

from timm_parallel.config.timm_names import timm_models
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.scales import Scale
from timm_parallel.lab.analysis.statistics import INCONCLUSIVE, Contrast, Summary
from timm_parallel.machine.text import yaml_text

DASH = "—"
# If the upper limit of the interval of a ratio is larger than this, the report prints no number.
MOST_SHOWN = 1000


def verdict_text(contrast: Contrast) -> str:
    """Format a verdict with its reason, for example `inconclusive: without repeats the noise is
    unknown`.
    """
    if contrast.effect is None:
        return f"{contrast.verdict}: no repeat measured both configurations"
    if contrast.verdict != INCONCLUSIVE:
        return contrast.verdict
    if contrast.detectable is None:
        return f"{contrast.verdict}: without repeats the noise is unknown; use sweep.repeats=5"
    needed = f"about {contrast.blocks_needed}" if contrast.blocks_needed else "more than 1,000"
    smallest = size_text(contrast.scale, contrast.detectable)
    return (
        f"{contrast.verdict}: this sweep can detect a difference of {smallest}; a verdict "
        f"needs {needed} repeats"
    )


def times(contrast: Contrast) -> str:
    return f"{contrast.ratio:.2f} ×"


def interval_text(contrast: Contrast, level: str = "95 % interval ") -> str:
    """Format a confidence interval, for example ` (95 % interval 1.80 to 2.00)`. The text is empty
    if the noise is unknown.
    """
    if contrast.low is None or contrast.high is None:
        return ""
    high = f"{contrast.high:.2f}" if contrast.high < MOST_SHOWN else f"more than {MOST_SHOWN:,}"
    return f" ({level}{contrast.low:.2f} to {high})"


def effect_text(contrast: Contrast | None) -> str:
    """Format a ratio or a difference with its interval, for example `1.90 × (1.80 to 2.00)` or
    `+7.9 (+1.4 to +14.4)`.
    """
    if contrast is None or contrast.effect is None:
        return DASH
    if contrast.scale.is_ratio:
        return times(contrast) + interval_text(contrast, "")
    ends = [
        _signed(contrast.scale, end) for end in (contrast.low, contrast.high) if end is not None
    ]
    return _signed(contrast.scale, contrast.effect) + (f" ({' to '.join(ends)})" if ends else "")


def _signed(scale: Scale, difference: float) -> str:
    return ("+" if difference > 0 else "") + (
        points(difference) if scale.is_proportion else figure(difference)
    )


def size_text(scale: Scale, size: float) -> str:
    """Format the size of a difference without its sign: `12.0 %` for a ratio, `7.9 points` for a
    proportion, else a number.
    """
    if scale.is_ratio:
        return percent(size, 1)
    return f"{points(size)} points" if scale.is_proportion else figure(size)


def points(share: float, limit: float = 0.001) -> str:
    """Format a fraction as a percentage with one decimal place. If the fraction is below `limit`,
    show two significant digits.
    """
    return f"{100 * share:.{_decimals(share, limit)}f}"


def _decimals(share: float, limit: float) -> int:
    return 1 if share == 0 or abs(share) >= limit else 1 + math.ceil(-math.log10(100 * abs(share)))


def value_text(scale: Scale, value: float | None) -> str:
    """Format a value of the metric. A proportion near 0 or 100 % gets enough decimal places to show
    its distance from 0 or 100 % with two significant digits.
    """
    if value is None:
        return DASH
    if not scale.is_proportion:
        return figure(value)
    rest = min(value, 1 - value)
    # Round away the error of floating point, because 1 - 0.996 is not exactly 0.004.
    return percent(value, _decimals(round(rest, 12), 0.01) if rest > 0 else 1)


def range_text(scale: Scale, ends: tuple[float, float]) -> str:
    """Format the ends of an interval of metric values, for example `70.1 % to 72.3 %`."""
    return " to ".join(value_text(scale, end) for end in ends)


def level_text(chance: float) -> str:
    """Format the level of a confidence interval, for example `95 %`. `chance`: probability that the
    interval does not contain the true value.
    """
    return f"{100 * (1 - chance):.4g} %"


def difference_text(contrast: Contrast, level: str = "95 % interval ") -> str:
    """Format a difference of two settings, for example `7.9 points higher (95 % interval 1.4 to
    14.4)`.
    """
    assert contrast.effect is not None
    low, high = contrast.interval
    sign = 1 if contrast.effect > 0 else -1
    text = f"{size_text(contrast.scale, abs(contrast.effect))} {'higher' if sign > 0 else 'lower'}"
    if contrast.low is None or contrast.high is None:
        return text
    low, high = sorted((sign * low, sign * high))
    low_text, high_text = (
        size_text(contrast.scale, end).removesuffix(" points") for end in (low, high)
    )
    return f"{text} ({level}{low_text} to {high_text})"


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


def join_short(items: Iterable[str], limit: int = 4) -> str:
    unique = list(dict.fromkeys(items))
    rest = [f"and {len(unique) - limit} more"] if len(unique) > limit else []
    return "; ".join(unique[:limit] + rest)


def model_name(run: RunRecord) -> str:
    """Return the name of a run's model, for example `resnet18`. If model.kwargs changes the model,
    add its size: `tiny (vit_tiny_patch16_224, 61 k parameters, 32 px)`.
    """
    name = str(run.result.get("model") or DASH)
    parameters, sides = run.integer("parameters"), run.entries(int, "image_size")
    pixels = " x ".join(map(str, sides)) or run.integer("image_size")
    if not any(key.startswith("model.kwargs.") for key in run.config):
        return name
    details = [f"{rounded(parameters)} parameters"] if parameters is not None else []
    details += [f"{pixels} px"] if pixels is not None else []
    # Do not use a config file's name that is also the name of a timm model, because it does not
    # describe the changed model.
    if run.model_option and run.model_option not in timm_models():
        details.insert(0, name)
        name = run.model_option
    return f"{name} ({', '.join(details)})" if details else name


def rounded(count: int) -> str:
    """Format a count with at most two or three digits, for example `999`, `61 k` or `5.7 M`."""
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if count >= factor:
            return (
                f"{count / factor:.2g}{unit}"
                if count < 10 * factor
                else f"{count / factor:.0f}{unit}"
            )
    return str(count)


def describe_settings(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={yaml_text(run.config.get(key))}" for key in keys)
