"""Commands of docs/slurm.md."""

from __future__ import annotations

import re

from timm_parallel.testing import cluster_commands
from timm_parallel.testing.commands import ROOT


def test_commands_of_the_slurm_page_are_those_that_its_tests_run() -> None:
    """timm_parallel/tests has them as constants, because a fork may replace the page."""
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    shown = [line.partition("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    tested = [value for name, value in vars(cluster_commands).items() if name.isupper()]
    assert shown == tested
