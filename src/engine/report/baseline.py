"""Whether points have become slower than they were in an earlier report: `scripts/report.py <folder> --baseline report.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from src.engine.report.contents import FORMAT
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED, decide, estimate
from src.engine.report.wording import figure, listing, percent, spelled, times

# Settings that change what a step computes: figures under different ones are not held against each other.
DECIDES_SPEED = ("model.", "data.", "parallel.", "optim.opt", "optim.kwargs", "train.precision", "train.accumulate")
SPEED_ALL_THE_SAME = (
    "data.root",
    "data.workers",
    "parallel.timeout",
    "parallel.start_timeout",
    "parallel.max_restarts",
)
ARGUMENTS = ("model.kwargs.", "data.kwargs.", "optim.kwargs.", "parallel.options.")
Key = tuple[Any, ...]


def read_report(path: Path) -> dict[str, Any]:
    """Errors: ValueError where `path` is no report.json."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); give the report.json of a sweep") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path}: not a report.json of this version; give one that scripts/report.py has written")
    return report


def changes(now: dict[str, Any], before: dict[str, Any], max_drop: float) -> list[tuple[str, str]]:
    """(verdict on "at most `max_drop` (0.05: a twentieth) slower", a line for the user) of the points that both measured.

    All runs of all points have one noise, as in the report; blocks of two sweeps have nothing in common, so what differs
    between them widens the interval. All points are one family.
    Errors: ValueError, one line, where nothing can be held against the baseline.
    """
    of_now, of_before = _points(now), _points(before)
    common = [key for key in of_now if key in of_before]
    if not common:
        raise ValueError(_nothing_in_common(of_now, of_before))
    _check_settings(now, before)
    rows = [
        (f"{key} {when}", None, speed)
        for when, points in (("now", of_now), ("before", of_before))
        for key in common
        for speed in points[key][1]
    ]
    found = decide(estimate(rows, [(f"{key} now", f"{key} before") for key in common]))
    limit = 1 - max_drop
    said = {
        HOLDS: "ok",
        FAILS: f"slower by more than {percent(max_drop, 1)}",
        UNDECIDED: f"undecided: the interval holds {limit:.2f}; more blocks would tell",
        UNMEASURED: "no verdict: most runs were disturbed",
    }
    verdicts = []
    for key, contrast in zip(common, found, strict=True):
        (name, _, disturbed), (_, _, was_disturbed) = of_now[key], of_before[key]
        if disturbed or was_disturbed:
            verdict = UNMEASURED
        elif contrast.low is None:  # without repeats there is no interval: the ratio decides
            verdict = HOLDS if (contrast.ratio or 0) >= limit else FAILS
        else:
            verdict = contrast.exceeds(limit)
        verdicts.append((verdict, f"{name}: {times(contrast)} the images/s of the baseline: {said[verdict]}"))
    return verdicts


def _points(report: dict[str, Any]) -> dict[Key, tuple[str, list[float], bool]]:
    """What tells a point from others -> its name, images/s of its repeats, and whether most runs of its group were disturbed.

    Its machine is devices and processor without the versions, which an upgrade changes. None of dp as threads on CPU.
    """
    rows = {row["run"]: row for row in report["runs"]}
    disturbed = {(group["hardware"], group["title"]): group["disturbed"] for group in report["groups"]}
    found: dict[Key, tuple[str, list[float], bool]] = {}
    for point in report["points"]:
        compared = [rows[name] for name in point["runs"]]
        compared = [row for row in compared if row["block"] is not None and not row["neighbours"]]
        speeds = [row["images_per_sec"] for row in compared if row["images_per_sec"]]
        if speeds and not point["stand_in"]:
            machine = point["hardware"].partition("; torch ")[0]
            key = (machine, *(point[name] for name in ("group", "strategy", "devices", "nodes", "options")))
            name = f"{point['group']}, {point['label']} at {figure(sum(speeds) / len(speeds))} images/s"
            found[key] = name, speeds, disturbed[point["hardware"], point["group"]]
    return found


def _nothing_in_common(now: dict[Key, Any], before: dict[Key, Any]) -> str:
    here, there = ({key[0] for key in points} for points in (now, before))
    if here and there and not here & there:
        return f"--baseline: was measured on other hardware: {listing(sorted(there))}; here: {listing(sorted(here))}"
    names = (listing(f"{k[1]}, {k[2]} × {k[3]}" for k in points) or "none" for points in (now, before))
    return "--baseline: has no point in common with this report; here: {}; there: {}".format(*names)


def _check_settings(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Of what all points share; a key that one report lacks is newer, but an argument that is missing was not given."""
    varied = {*now["varied"], *before["varied"]}
    differing = [
        f"{key}={spelled(now['shared'].get(key))} against {spelled(before['shared'].get(key))}"
        for key in sorted({*now["shared"], *before["shared"]} - varied)
        if key.startswith(DECIDES_SPEED) and key not in SPEED_ALL_THE_SAME
        if (key in now["shared"] and key in before["shared"]) or key.startswith(ARGUMENTS)
        if now["shared"].get(key) != before["shared"].get(key)
    ]
    if differing:
        raise ValueError(f"--baseline: was measured with other settings: {listing(differing)}")
