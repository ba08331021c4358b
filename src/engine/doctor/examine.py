"""The doctor's visit: look, find what is wrong, try, and say what to do."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from src.engine.doctor.findings import Finding, advice, findings_of, findings_of_tries, strategies_to_try
from src.engine.doctor.look import Facts, look, try_strategy
from src.engine.machine.secrets import hide_in


def examine(as_json: bool) -> int:
    """Print what was found and what to do. Returns 1 when training could not start, else 0."""
    facts = look(_say)
    findings = findings_of(facts)
    for strategy, devices in strategies_to_try(facts, findings).items():
        _say(f"trying a step with parallel={strategy} on {devices} device(s) …")
        facts.tries[strategy] = try_strategy(strategy, devices)
    findings += findings_of_tries(facts)
    print(json.dumps(hide_in(as_dict(facts, findings)), indent=2) if as_json else as_text(facts, findings))
    return 1 if any(finding.stops for finding in findings) else 0


def as_dict(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    can_train = not any(finding.stops for finding in findings)
    return {
        "can_train": can_train,
        "command": advice(facts) if can_train else None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }


def as_text(facts: Facts, findings: list[Finding]) -> str:
    """A line per finding; below them either the command to begin with, or what to mend, in order."""
    width = max(len(finding.name) for finding in findings)
    mark = {True: "✗", False: "!", None: "✓"}
    lines = [f"{mark[f.stops if f.remedy else None]} {f.name:<{width}}  {f.said}" for f in findings]
    mends = [f for f in findings if f.remedy]
    stops = [f for f in mends if f.stops]
    if stops:
        return "\n".join([*lines, "", "Training cannot start. Mend, in this order:", *_numbered(stops)])
    worth = ["", "Worth mending:", *_numbered(mends)] if mends else []
    return "\n".join([*lines, *worth, "", f"Begin with:  {advice(facts)}"])


def _numbered(findings: list[Finding]) -> list[str]:
    return [f"  {number}. {finding.name}: {finding.remedy}" for number, finding in enumerate(findings, 1)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
