"""This project, as the library sees it. Importing it loads neither torch nor timm."""

from __future__ import annotations

from pathlib import Path

from src.schema import Config, ResolvedConfig
from src.tasks import all_metrics
from timm_parallel.app import App

app = App(
    name="src.app:app",
    root=Path(__file__).resolve().parents[1],
    config=Config,
    resolved=ResolvedConfig,
    run="src.train.run.run",
    rules="src.tasks.problems",
    check_data="src.train.check.check_data",
    check_batch="src.train.check.check_batch",
    training_size="src.train.check.training_size",
    metrics=all_metrics(),
    preload=("src.train.run", "timm_parallel.parallel.data_parallel", "torch.utils.tensorboard"),
    trial=("debug=fast", "model=tiny", "data=synthetic", "data.batch_size=32"),
)
