"""Commands of docs/slurm.md, docs/kubernetes.md and the Slurm section of CONTRIBUTING.md equal
those of the tests.
"""

from __future__ import annotations

import re

from timm_parallel.testing import cluster_commands
from timm_parallel.testing.commands import ROOT

CLUSTER = r"dev_cluster\.sh|srun|torchrun|cluster=(slurm|kubernetes)"
# The pages contain placeholders for the addresses and ports that the tests use.
PLACEHOLDERS = {"10.77.0.1": "<first node>", "29511": "29500"}


def test_commands_on_slurm_and_kubernetes_pages_equal_the_commands_that_tests_run() -> None:
    """The commands are constants in timm_parallel/tests, because a fork may replace the pages."""
    pages = ("docs/slurm.md", "docs/kubernetes.md", "CONTRIBUTING.md")
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages]
    blocks = [
        block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    ]
    lines = [line.partition("  #")[0].rstrip() for block in blocks for line in block.splitlines()]
    shown = [line for line in lines if re.search(CLUSTER, line)]
    tested = [value for name, value in vars(cluster_commands).items() if name.isupper()]
    for address, placeholder in PLACEHOLDERS.items():
        tested = [command.replace(address, placeholder) for command in tested]
    assert sorted(shown) == sorted(tested)
