"""Description of a model in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timm_parallel.testing.report_sweeps import Sweep, read

pytestmark = pytest.mark.usefixtures("without_plots")
CHANGED = {"name": "vit_tiny_patch16_224", "kwargs": {"depth": 2}}
CHOICES = (
    "hydra:\n  runtime:\n    version: 1.3.8\n    choices:\n      data: digits\n      "
    "model: "
    "{}\n  verbose: false\n"
)


def titles(report: tuple[str, str, dict[str, Any]]) -> list[str]:
    """Return the titles of the groups of runs, which must be headings in HTML and Markdown."""
    html, markdown, values = report
    results = [group["title"].partition(", strong scaling")[0] for group in values["groups"]]
    assert all(title in html and title.replace("_", "\\_") in markdown for title in results)
    return results


def sweep_of(folder: Path, option: str | None, model: dict[str, Any], **changes: Any) -> Path:
    sweep = Sweep(folder)
    run = sweep.add("single", 1, config={"model": model}, model=model["name"], **changes)
    if option is not None:
        (run / ".hydra").mkdir()
        (run / ".hydra" / "hydra.yaml").write_text(CHOICES.format(option))
    return sweep.write()


@pytest.mark.parametrize(
    ("option", "model", "parameters", "pixels", "title"),
    [
        ("tiny", CHANGED, 61114, 32, "tiny (vit_tiny_patch16_224, 61 k parameters, 32 px)"),
        ("tiny", CHANGED, 999, [32, 48], "tiny (vit_tiny_patch16_224, 999 parameters, 32 x 48 px)"),
        # The recorded option resnet18 names another model than the config, because model.name was
        # overridden. The title must not name this option.
        ("resnet18", CHANGED, 5_717_416, 224, "vit_tiny_patch16_224 (5.7 M parameters, 224 px)"),
        # A run of an older version of this project has recorded neither its image size nor its
        # config group options.
        (None, CHANGED, 999, None, "vit_tiny_patch16_224 (999 parameters)"),
        ("resnet18", {"name": "resnet18", "kwargs": {}}, 11_000_000, 32, "resnet18"),
        (
            "vit_tiny",
            {"name": "vit_tiny_patch16_224", "kwargs": {}},
            5_717_416,
            224,
            "vit_tiny_patch16_224",
        ),
    ],
)
def test_report_title_of_a_changed_model_has_option_parameter_count_and_image_size(
    tmp_path: Path,
    option: str | None,
    model: dict[str, Any],
    parameters: int,
    pixels: int | list[int] | None,
    title: str,
) -> None:
    folder = sweep_of(tmp_path / "sweep", option, model, parameters=parameters, image_size=pixels)
    report = read(folder)
    assert titles(report) == [title]
    assert report[2]["groups"][0]["model"] == model["name"]
