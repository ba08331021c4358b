"""The figures in the documentation match the code that draws them."""

from __future__ import annotations

import pytest

from scripts.maintain import docs_figures


@pytest.mark.parametrize("language", list(docs_figures.WORDS))
def test_documentation_figure_of_the_training_step_matches_its_generator(language: str) -> None:
    """If this test fails, run `make docs-figures`."""
    assert (docs_figures.FIGURES / f"step.{language}.svg").read_text(encoding="utf-8") == docs_figures.draw_step(
        language
    )
