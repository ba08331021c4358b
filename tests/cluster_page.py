"""The commands of docs/cluster.md, in the page's order, for the tests that run them. One more on the page fails here by count."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]

JOB, JOB_WITH_GPUS, ARRAY, SEARCH, SRUN, TORCHRUN, CLUSTER_START, CLUSTER_STATUS, CLUSTER_STOP, KUBERNETES = COMMANDS
