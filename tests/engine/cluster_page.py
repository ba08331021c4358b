"""The commands of docs/cluster.md, in the page's order, for the tests that run them. One more on the page fails here by count."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.partition("  #")[0].rstrip() for block in BLOCKS for line in block.splitlines()]

LARGE_JOB, JOB_WITH_GPUS, JOB, ARRAY, SEARCH, SRUN, TORCHRUN, *DEVELOPMENT_CLUSTER, KUBERNETES = COMMANDS
CLUSTER_START, CLUSTER_STATUS, CLUSTER_STOP = DEVELOPMENT_CLUSTER
