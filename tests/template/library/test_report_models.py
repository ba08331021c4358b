"""Description of a model in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timm_parallel.testing.report_sweeps import Sweep, read

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.mark.parametrize(
    ("kwargs", "parameters", "pixels", "title"),
    [
        ({"depth": 2}, 61_114, 32, "vit_tiny (61,114 parameters, 32 px)"),
        ({"depth": 2}, 999, [32, 48], "vit_tiny (999 parameters, 32 x 48 px)"),
        # A run of an older version of this project has not recorded its image size.
        ({"depth": 2}, 999, None, "vit_tiny (999 parameters)"),
        ({}, 11_000_000, 32, "vit_tiny"),
    ],
)
def test_report_title_of_a_changed_model_has_its_parameter_count_and_image_size(
    tmp_path: Path,
    kwargs: dict[str, int],
    parameters: int,
    pixels: int | list[int] | None,
    title: str,
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    model = {"name": "vit_tiny", "kwargs": kwargs}
    recorded: dict[str, Any] = {"parameters": parameters, "image_size": pixels}
    sweep.add("single", 1, config={"model": model}, model="vit_tiny", **recorded)
    html, markdown, plain = read(sweep.write())
    [group] = plain["groups"]
    assert group["title"] == f"{title}, strong scaling, global batch 64"
    assert group["title"] in html and group["title"].replace("_", "\\_") in markdown
    assert group["model"] == "vit_tiny"
