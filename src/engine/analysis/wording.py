"""Format measurements, verdicts and settings as text."""

from __future__ import annotations

from collections.abc import Iterable

from src.engine.analysis.runs import RunRecord
from src.engine.analysis.statistics import INCONCLUSIVE, Contrast, Summary
from src.engine.config.suggest import timm_models
from src.engine.machine.text import yaml_text

DASH = "—"
MOST_SHOWN = 1000  # times; a larger end of an interval is not shown


def verdict_text(contrast: Contrast) -> str:
    """Format the verdict and its reason, e.g. `inconclusive: without repeats the noise is unknown`."""
    if contrast.ratio is None:
        return f"{contrast.verdict}: no block has figures of both"
    if contrast.verdict != INCONCLUSIVE:
        return contrast.verdict
    if contrast.detectable is None:
        return f"{contrast.verdict}: without repeats the noise is unknown; use sweep.repeats=5"
    blocks = f"about {contrast.blocks_needed}" if contrast.blocks_needed else "more than 1,000"
    smallest = percent(contrast.detectable, 1)
    return f"{contrast.verdict}: this sweep can detect a difference of {smallest}; a verdict needs {blocks} blocks"


def times(contrast: Contrast) -> str:
    return f"{contrast.ratio:.2f} ×"


def interval_text(contrast: Contrast, level: str = "95 % interval ") -> str:
    """Format the interval, e.g. ` (95 % interval 1.80 to 2.00)`; empty if the noise is unknown."""
    if contrast.low is None or contrast.high is None:
        return ""
    high = f"{contrast.high:.2f}" if contrast.high < MOST_SHOWN else f"more than {MOST_SHOWN:,}"
    return f" ({level}{contrast.low:.2f} to {high})"


def ratio_text(contrast: Contrast | None) -> str:
    """Format ratio and interval for a table, e.g. `1.90 × (1.80 to 2.00)`; a dash without a ratio."""
    if contrast is None or contrast.ratio is None:
        return DASH
    return times(contrast) + interval_text(contrast, "")


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %" if share < MOST_SHOWN else f"more than {100 * MOST_SHOWN:,} %"


def figure(value: float) -> str:
    """Format a number with three significant digits, or with all digits before the decimal point."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return text if "e" not in text else f"{value:.1e}"


def with_range(summary: Summary) -> str:
    """Format `median (smallest–largest)`, without the range if its ends look equal."""
    low, high = figure(summary.low), figure(summary.high)
    return figure(summary.median) + (f" ({low}–{high})" if low != high else "")


def join_short(items: Iterable[str], limit: int = 4) -> str:
    unique = list(dict.fromkeys(items))
    rest = [f"and {len(unique) - limit} more"] if len(unique) > limit else []
    return "; ".join(unique[:limit] + rest)


def model_name(run: RunRecord) -> str:
    """Format the model name: `resnet18`, or with model.kwargs `tiny (vit_tiny_patch16_224, 61 k parameters, 32 px)`."""
    name, parameters, pixels = (
        str(run.result.get("model") or DASH),
        run.integer("parameters"),
        run.integer("image_size"),
    )
    if not any(key.startswith("model.kwargs.") for key in run.config):
        return name
    details = [f"{rounded(parameters)} parameters"] if parameters is not None else []
    details += [f"{pixels} px"] if pixels is not None else []
    # An option with the name of a timm model does not describe the changed model.
    if run.model_option and run.model_option not in timm_models():
        details.insert(0, name)
        name = run.model_option
    return f"{name} ({', '.join(details)})" if details else name


def rounded(count: int) -> str:
    """Format a count as `999`, `61 k` or `5.7 M`."""
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{count / factor:.2g}{unit}" if count < 10 * factor else f"{count / factor:.0f}{unit}"
    return str(count)


def describe_settings(run: RunRecord, keys: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"{key.removeprefix(prefix)}={yaml_text(run.config.get(key))}" for key in keys)


def letter_of(number: int) -> str:
    """Convert 0, 1, … to the letters a, b, … z, aa, ab, …"""
    return (letter_of(number // 26 - 1) if number >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[number % 26]
