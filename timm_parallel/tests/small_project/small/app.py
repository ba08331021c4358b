"""App object of a small project, which tests use to check that the library works without this
template. A real project describes itself to the library in the same way.
"""

from __future__ import annotations

from pathlib import Path

from small.config import Config, ResolvedConfig
from timm_parallel import App

app = App(
    name="small.app:app",
    root=Path(__file__).resolve().parents[1],
    config=Config,
    resolved=ResolvedConfig,
    build="small.training.build",
    loop="small.training.train",
    rules="small.config.problems",
    tasks={
        "position": "small.task.Position",
        "pair": "small.pair.Pair",
        "points": "small.points.Points",
    },
    datasets={"spots": "small.data.Spots", "scattered": "small.data.Scattered"},
    trial=("train.epochs=1",),
)
