"""The `App` object, through which the library finds this project's config, training function, tasks
and datasets. Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

from pathlib import Path

from src.schema import DATASETS, TASKS, Config, ResolvedConfig
from timm_parallel import App

app = App(
    name="src.app:app",
    root=Path(__file__).resolve().parents[1],
    config=Config,
    resolved=ResolvedConfig,
    build="src.train.build.build_run",
    loop="src.train.run.train",
    rules="src.tasks.problems",
    tasks=TASKS,
    datasets=DATASETS,
    trial=("debug=fast", "model=tiny", "data=synthetic", "data.batch_size=32"),
)
