"""Test the sentences of a report: every kind of finding has one, which contains its numbers."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from jinja2 import UndefinedError

from timm_parallel.lab.analysis.headline import Finding, Kind
from timm_parallel.lab.analysis.sequential import NO_DIFFERENCE
from timm_parallel.lab.report.sentences import macros, sentence, sentences

KINDS: tuple[Kind, ...] = get_args(Kind)
RATIO = {
    "a": "x",
    "b": "y",
    "ratio": 1.27,
    "low": 1.13,
    "high": 1.42,
    "n": 7,
    "verdict": "inconclusive",
    "detectable": 0.123,
    "blocks_needed": 19,
    "unit": "ratio",
}
DIFFERENCE = {
    **{key: value for key, value in RATIO.items() if key != "ratio"},
    **{"difference": -0.027, "low": -0.042, "high": -0.013, "unit": "proportion"},
}
POINT = {"strategy": "ddp", "devices": 3, "nodes": 2, "options": "bucket_cap_mb=5"}
SETTING = {"label": "optim.lr=0.02", "lost": {"failed": 2, "not finite": 1}, "runs": 6}
SUMMARY = {"median": 812.0, "low": 801.0, "high": 823.0, "count": 3}
# Parameter of a macro -> a value, and the texts that a sentence with this value contains.
SAMPLES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "point": (POINT, ("ddp on 3 devices of 2 nodes with bucket_cap_mb=5",)),
    "other": ({**POINT, "strategy": "single", "devices": 1, "options": ""}, ("single",)),
    "setting": (SETTING, ("optim.lr=0.02", "2 of 6 runs failed", "1 of 6 runs not finite")),
    "baseline": ({**SETTING, "label": "optim.lr=0.9"}, ("optim.lr=0.9",)),
    "settings": (57, ("57",)),
    "metric": ("val/acc", ("val/acc",)),
    "value": (0.8125, ("81.2 %",)),
    "interval": ((0.791, 0.834), ("79.1 %", "83.4 %")),
    "mean": (0.823, ("82.3 %",)),
    "speed": (SUMMARY, ("812", "801–823")),
    "others": (["a=1", "b=2", "c=3", "d=4", "e=5"], ("a=1", "and 1 more")),
    "level": (0.02, ("2 %",)),
    "runs": (41, ("41",)),
    "jobs": (43, ("43",)),
    "count": (23, ("23",)),
    "ratio": (1.31, ("31 %",)),
    "number": (11, ("11",)),
    "shared": (2, ("2 seeds",)),
    "false_in_100": (9, ("about 9",)),
    "minutes": (12.5, ("in 12.5 minutes",)),
    "smallest": (0.5, ("0.500",)),
    "is_futile": (True, ("unlikely",)),
    "equal": (["a=6", "b=7"], ("a=6; b=7",)),
    "undecided": (["c=8"], ("Not decided yet: c=8",)),
    "by_settings": (True, ("is not recommended",)),
    "reasons": (["hot", "slow"], ("hot; slow",)),
    "commits": (["0123abc", "4567def"], ("0123abc; 4567def",)),
    "repeats": ("seed", ()),
    "sweeps": (3, ("3 sweeps",)),
    "threads": (8, ("8 threads",)),
    "cores": (4, ("4 cores",)),
    "unit": ("proportion", ()),
    "lower_is_better": (False, ()),
    "keys": (["optim.lr", "seed"], ("optim.lr, seed",)),
    "most": (5, ("in common",)),
    "is_left": (True, ()),
    "adds_repeats": (True, ("Continue the sweep",)),
    "measure": ("metric", ("metric",)),
    "base": (1500, ("1,500",)),
    "head": (2500, ("2,500",)),
    **{
        name: (f"<{name}>", (f"<{name}>",))
        for name in ("label", "rank", "reason", "run", "text", "code", "key", "missing", "word")
    },
}
# Numbers that differ from SAMPLES for some kinds.
OTHER: dict[str, dict[str, tuple[Any, tuple[str, ...]]]] = {
    "expected": {"others": (3, ("3 of 23 cases",))},
    "other_baseline": {"baseline": ("optim.lr=1", ("optim.lr=1",))},
    "lost_runs": {"settings": ([SETTING], ("optim.lr=0.02 (2 of 6 runs failed",))},
    "better": {"best_of": (None, ())},
    "best_mean": {"is_baseline": (False, ())},
    "not_worse": {
        "others": ([SETTING] * 2, ("optim.lr=0.02",)),
        **{name: (number, ()) for name, number in (("rivals", 2), ("compared", 9))},
        "settings": (57, ()),
    },
    "loses_runs": {"runs": ([{"seed": 17, "status": "x"}] * 5, ("seed 17", "1 more"))},
    "far_off": {"runs": ([{"run": "r", "setting": "s", "value": 0.4}], ("r (s): 40.0 %",))},
    "unknown_direction": {"runs": (["r", "s"], ("r; s",))},
    "refused": {"base": ("b1", ("b1",)), "head": ("h1", ("h1",))},
    "ratio": {"of": ("the speed of x", ("the speed of x",))},
    "not_measured": {"measure": ("metric", ())},
    "head_is": {
        "level": (0.02, ("98 % interval",)),
        "smallest": (0.5, ()),
        "is_futile": (False, ()),
    },
    "number_of_verdict": {"base": ("main (0123abc)", ("main (0123abc)",))},
}
OF_RATIO = ("1.27", "1.13", "1.42")
OF_DIFFERENCE = ("2.7 points lower", "1.3 to 4.2", "7 seeds")


def samples(kind: Kind) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return a value, and the texts that the sentence must have, for each parameter of a kind."""
    known = SAMPLES | OTHER.get(kind, {})
    if kind == "best_mean":
        known["contrast"] = (DIFFERENCE, (*OF_DIFFERENCE[:2], "12.3 points"))
    elif kind in ("better", "head_is"):
        known["contrast"] = (DIFFERENCE, OF_DIFFERENCE)
    elif kind == "pair":
        known["contrast"] = (RATIO, ("inconclusive", "12.3 %", "19"))
    else:
        known["contrast"] = (RATIO, OF_RATIO)
    return {name: known[name] for name in getattr(macros(), kind).arguments}


def numbers_of(kind: Kind) -> dict[str, Any]:
    return {name: value for name, (value, _) in samples(kind).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_of_each_kind_has_all_of_its_numbers(kind: Kind) -> None:
    text = sentence(Finding(kind, numbers_of(kind)))
    for name, (_, words) in samples(kind).items():
        for word in words:
            assert word in text, name
    assert text and not re.search(r"[{}]|None|Undefined|  | [.,;]", text)


def test_every_macro_is_a_kind_of_finding_or_a_part_of_a_sentence() -> None:
    names = [name for name in vars(macros()) if not name.startswith(("_", "part_"))]
    assert sorted(names) == sorted(KINDS)


def test_sentence_of_a_finding_without_its_numbers_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        sentence(Finding("not_worse"))


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("pair", {"contrast": RATIO | {"verdict": "supported"}}, "supported"),
        ("pair", {"contrast": RATIO | {"detectable": None}}, "sweep.repeats=5"),
        ("pair", {"contrast": RATIO | {"blocks_needed": None}}, "more than 1,000"),
        (
            "pair",
            {"contrast": RATIO | {"ratio": None, "verdict": "not measurable"}},
            "not measurable: no repeat",
        ),
        ("best_mean", {"setting": {**SETTING, "lost": {}}}, "lost runs"),
        ("best_mean", {"contrast": DIFFERENCE | {"verdict": "not supported"}}, "smallest_diff"),
        ("expected", {"value": None, "others": 0}, "one seed cannot"),
        ("expected", {"value": None}, "by chance"),
        ("better", {"best_of": 57}, "shown to be the best of 57 settings"),
        ("best_mean", {"is_baseline": True}, "which has the best mean val/acc itself"),
        ("not_worse", {"rivals": 0, "compared": 57}, "best of all 57 settings"),
        ("not_worse", {"rivals": 0}, "best of the 9 settings that have a value"),
        ("not_worse", {"rivals": 8}, "No setting is shown to be worse"),
        ("head_is", {"word": "equal"}, "equals base within 0.500 points"),
        ("head_is", {"word": NO_DIFFERENCE}, "could have shown 12.3 points"),
        ("head_is", {"word": NO_DIFFERENCE, "is_futile": True}, "unlikely"),
        (
            "head_is",
            {"word": NO_DIFFERENCE, "contrast": DIFFERENCE | {"detectable": None}},
            "too few",
        ),
        (
            "best_mean",
            {
                "setting": {**SETTING, "lost": {}},
                "contrast": DIFFERENCE | {"verdict": "not measurable"},
            },
            "one seed does not show",
        ),
    ],
)
def test_sentence_depends_on_the_numbers(kind: Kind, change: dict[str, Any], text: str) -> None:
    assert text in sentence(Finding(kind, numbers_of(kind) | change))


def test_sentence_on_the_best_mean_states_the_seeds_that_would_decide_if_no_run_is_lost() -> None:
    whole = {"setting": {**SETTING, "lost": {}}, "baseline": {**SETTING, "lost": {}}}
    assert "about 19 seeds" in sentence(Finding("best_mean", numbers_of("best_mean") | whole))
    assert "19" not in sentence(Finding("best_mean", numbers_of("best_mean")))


def test_sentences_of_several_findings_are_joined_in_their_order() -> None:
    found = [Finding("over_folds"), Finding("noted", {"text": "x."})]
    assert sentences(found) == f"{sentence(found[0])} x."


@pytest.mark.parametrize("kind", ["faster_than_single", "better", "head_is"])
def test_sentence_has_no_interval_when_the_noise_is_unknown(kind: Kind) -> None:
    numbers = numbers_of(kind)
    assert "interval" in sentence(Finding(kind, numbers))
    numbers["contrast"] = {**numbers["contrast"], "low": None, "high": None}
    assert "interval" not in sentence(Finding(kind, numbers))
