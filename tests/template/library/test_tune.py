"""Settings to try for speed (`sweep.tune`): the report, the jobs and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.sweep.sweep import Sweep as SweepRunner
from timm_parallel.machine import hardware
from timm_parallel.patches import hydra_parser
from timm_parallel.record.result import read_jobs
from timm_parallel.testing.report_sweeps import Sweep, findings, read

SHORT = (
    "experiment=tune",
    "model=tiny",
    "parallel=single",
    "parallel.accelerator=cpu",
    "train.max_steps=4",
)


def tuned(
    folder: Path, speeds: dict[str, list[float]], flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write the report on a tuning, and return its headline result. `speeds` is a dictionary
    from overrides, separated by spaces, to images/s per repeat.
    """
    sweep = Sweep(folder)
    for text, values in speeds.items():
        overrides = dict(word.partition("=")[::2] for word in text.split())
        config: dict[str, Any] = {
            "train": {"precision": "fp32", "max_steps": 40, "evaluate_every": 0},
            "model": {
                "name": "resnet18",
                "kwargs": {},
                "channels_last": "model.channels_last" in overrides,
            },
            "sweep": {"tune": ["train.precision=bf16"], "smallest_difference": 0.03},
        }
        config["train"]["precision"] = overrides.get("train.precision", "fp32")
        for block, speed in enumerate(values):
            sweep.add(
                "single", 1, speed, block=block, config={**config, "seed": block}, flags=list(flags)
            )
            sweep.jobs[-1]["overrides"] = [
                "experiment=tune",
                "data.workers=0",
                "train.max_steps=40",
                *text.split(),
            ]
    report = read(sweep.write())[2]
    lead: dict[str, Any] = report["lead"]
    return lead


@pytest.mark.usefixtures("without_plots")
def test_tuning_report_recommends_the_fastest_settings_and_shows_their_command(
    tmp_path: Path,
) -> None:
    both = "train.precision=bf16 model.channels_last=true"
    speeds: dict[str, list[float]] = {
        "": [100, 102, 101],
        "model.channels_last=true": [111, 113, 110],
        both: [150, 152, 153],
    }
    lead = tuned(tmp_path / "sweep", speeds)
    assert (
        lead["command"]
        == "python train.py data.workers=0 train.precision=bf16 model.channels_last=true"
    )
    assert lead["contrast"]["ratio"] == pytest.approx(1.502, abs=0.005)
    assert lead["contrast"]["low"] < 1.5 < lead["contrast"]["high"]
    better = findings(lead)["better"]
    labels = (better["setting"]["label"], better["baseline"]["label"])
    # The label of a setting has only what it changes.
    assert labels == (", ".join(sorted(both.split())), "the current settings")
    assert "images/s is 1.50 × as high" in lead["sentence"]
    assert lead["value"] == pytest.approx(151.7, abs=0.1)


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("speeds", "kind"),
    [
        # The speeds vary so much that the comparison is inconclusive.
        (([100, 120, 90], [110, 100, 130]), "best_mean"),
        # The current settings are shown to be the fastest.
        (([100, 101, 100], [90, 91, 90]), "better"),
        # The gain of 1 % is below sweep.smallest_difference.
        (([100, 100.1, 100], [101, 101.1, 101]), "best_mean"),
        (([100], [150]), "too_few_repeats"),
        (([100, 101, 100], []), "only_setting"),
        (([100, 101, 100], [150, 151, 150]), "disturbed"),
    ],
)
def test_tuning_report_recommends_nothing_when_no_setting_is_shown_to_be_faster(
    tmp_path: Path, speeds: tuple[list[float], list[float]], kind: str
) -> None:
    current, changed = speeds
    flags = ("other programs kept 1.0 of 2 processors busy",) if kind == "disturbed" else ()
    lead = tuned(tmp_path / "sweep", {"": current, "train.precision=bf16": changed}, flags)
    assert lead["findings"][0]["kind"] == kind
    assert lead["sentence"] and not lead["command"] and lead["point"] is None


def tune(*overrides: str) -> int:
    return multirun(hydra_parser().parse_args(["-m", *SHORT, *overrides]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("seed=1,2",), "sweep.tune"),
        (("sweep.jobs=2",), "sweep.jobs"),
        (("search=optuna",), r"search="),
        (("train.evaluate_every=1",), "train.evaluate_every"),
        (("sweep.tune=['train.precision=fp32']",), r"sweep\.tune=\['train\.precision=fp32'\]"),
        (("sweep.tune=['train.precission=bf16']",), r"sweep\.tune: train\.precission=bf16: "),
        (("cluster=slurm",), "cluster"),
    ],
)
def test_sweep_tune_is_refused_together_with_seeds_concurrent_jobs_a_search_or_slurm(
    tmp_path: Path, overrides: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        tune(f"hydra.sweep.dir={tmp_path}/sweep", *overrides)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow(seconds=1)
def test_speed_tuning_repeats_each_new_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SweepRunner, "run", lambda self: 0)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    new = ["train.precision=bf16", "train.precision=bf16 model.channels_last=true"]
    tried = [*new, new[0], "train.precision=fp32"]
    folder = tmp_path / "sweep"
    assert tune(f"sweep.tune={tried}", "sweep.repeats=2", f"hydra.sweep.dir={folder}") == 0
    jobs = read_jobs(folder).jobs
    assert sorted((job.name, job.block) for job in jobs) == sorted(
        (name, block)
        for name in ("current settings", *(text.replace(" ", ",") for text in new))
        for block in range(2)
    )
