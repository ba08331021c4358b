"""Tracker for Weights & Biases.

In offline mode, the files are in `wandb/` of the run folder, and the command `wandb sync` uploads
them.
"""

from __future__ import annotations

import os
import shlex
import uuid
from pathlib import Path

import numpy as np

from timm_parallel.keys import ResolvedConfig
from timm_parallel.trackers.tracker import Tracker

# Do not let wandb collect data by itself, which may hold secrets: console output, command line and
# git remote. environment.json has the rest of these data.
PRIVATE = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_save_requirements": False,
}


class Wandb(Tracker):
    """Tracker for Weights & Biases.

    A resumed run continues the same run in wandb. The jobs of a sweep form a group.
    """

    def __init__(self, config: ResolvedConfig, folder: Path, resume_step: int) -> None:
        super().__init__(config, folder, resume_step)
        # Send no error reports to the makers of wandb and print nothing, unless the user sets these
        # variables.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb

    def start(self) -> None:
        options = self.config.tracker
        self._run = self._wandb.init(
            project=options.project or self.config.task_name,
            entity=options.entity,
            mode=options.mode,  # type: ignore[arg-type]
            id=self.run_id(lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            name=self.name,
            group=self.sweep,
            tags=self.config.tags,
            dir=self.folder,
            config=self.settings,
            # If the server does not answer, wandb waits for this many seconds, and once more when
            # the process exits.
            settings=self._wandb.Settings(finish_timeout=6, **PRIVATE),
        )
        # Log the step as a metric of its own, because a resume from an older checkpoint repeats
        # steps. The step counter of wandb must not decrease.
        self._run.define_metric("*", step_metric="step")
        folder = shlex.quote(str(self.folder))
        self.view = (
            f"wandb sync {folder}/wandb/offline-run-*" if self._run.offline else str(self._run.url)
        )

    def numbers(self, step: int, epoch: float, time: float, values: dict[str, float]) -> None:
        self._run.log({"step": step, "epoch": epoch, **values})

    def image(self, name: str, step: int, pixels: np.ndarray) -> None:
        self._run.log({"step": step, name: self._wandb.Image(pixels)})

    def end(self, status: str, summary: dict[str, float]) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=0 if status == "done" else 1)
