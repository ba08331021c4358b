"""Tracker for MLflow, which writes to a tracking server or to the database mlflow.db in
paths.output_dir.
"""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from timm_parallel.keys import ResolvedConfig, leaves
from timm_parallel.machine.secrets import hide_in
from timm_parallel.machine.text import yaml_text
from timm_parallel.trackers.tracker import Tracker

# Least time between two requests with metrics.
SECONDS_PER_REQUEST = 1.0
STATUSES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class Mlflow(Tracker):
    """Tracker for MLflow.

    A resumed run continues the same run in MLflow. All jobs of a sweep are in one experiment.
    """

    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        super().__init__(config, folder, resume_step)
        # Send no usage reports to the makers of MLflow, unless the user sets this variable.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        for library in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(library).setLevel(logging.ERROR)
        output = Path(config.paths.output_dir).resolve()
        local = f"sqlite:///{output / 'mlflow.db'}"
        uri = config.tracker.uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        # Folder for images if the database is local. A server has its own folder.
        self._images = (output / "mlflow_images").as_uri() if uri == local else None
        # Creating the client also creates a local database. A server is contacted only in `start`.
        self._mlflow, self._client = mlflow, mlflow.MlflowClient(tracking_uri=uri)
        # Metrics that are not sent yet, and the time of the last ones that are, in seconds.
        self._metrics: list[Any] = []
        self._sent_at = 0.0
        self.view = (
            uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        )

    def start(self) -> None:
        self._id = self.run_id(self._create)
        self._client.update_run(self._id, status="RUNNING")

    def _create(self) -> str:
        name = self.config.tracker.project or self.sweep or self.config.task_name
        # Try to create the experiment before reading it. Jobs that start at the same time would
        # otherwise all find no experiment and create it.
        try:
            experiment = self._client.create_experiment(name, artifact_location=self._images)
        except self._mlflow.MlflowException:
            experiment = self._client.get_experiment_by_name(name).experiment_id
        tags = {"sweep": self.sweep or "", **dict.fromkeys(self.config.tags, "")}
        run_id: str = self._client.create_run(experiment, tags=tags, run_name=self.name).info.run_id
        # Log the config only when the run is created, because MLflow rejects changes of a
        # parameter. One request may have at most 100 parameters.
        values = {key: yaml_text(hide_in(value, key)) for key, value, _ in leaves(self.config)}
        params = [self._mlflow.entities.Param(key, value) for key, value in values.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(run_id, params=params[first : first + 100])
        return run_id

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        metric, milliseconds = self._mlflow.entities.Metric, int(1000 * time)
        self._metrics += [metric(name, value, milliseconds, step) for name, value in values.items()]
        # A server may need longer for a request than the run needs for a step.
        if time - self._sent_at >= SECONDS_PER_REQUEST:
            self._sent_at = time
            self._send()

    def _send(self) -> None:
        # One request may have at most 1000 metrics.
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:1000])
            del self._metrics[:1000]

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        self._client.log_image(self._id, pixels, key=name, step=step, synchronous=True)

    def end(self, status: str, summary: dict[str, float]) -> None:
        self._send()
        for name, value in summary.items():
            self._client.log_metric(self._id, name, value)
        self._client.set_terminated(self._id, STATUSES[status])
