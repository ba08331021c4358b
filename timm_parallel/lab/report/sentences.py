"""Put the findings of a report into words. The sentences are in sentences.j2; the console, the
report and the verdict print the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from timm_parallel.lab.analysis import labels
from timm_parallel.lab.analysis.findings import Finding
from timm_parallel.lab.analysis.statistics import Summary
from timm_parallel.lab.report import formats
from timm_parallel.machine.text import plural


def sentences(findings: Iterable[Finding]) -> str:
    """Return the sentences of findings, separated by spaces."""
    return " ".join(sentence(finding) for finding in findings)


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
        "figure": formats.figure,
        "level": formats.level_text,
        "limit": formats.limit_text,
        "list_short": labels.join_short,
        "number": formats.number_text,
        "percent": formats.percent,
        "plural": plural,
        "range": formats.range_text,
        "setting": lambda setting: _one_line(macros().part_setting(setting)),
        "size": formats.size_text,
        "times": formats.times,
        "value": formats.value_text,
        "with_range": lambda summary: formats.with_range(Summary(**summary)),
    }
    return environment.get_template("sentences.j2").module
