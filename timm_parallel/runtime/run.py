"""Files and logs of a training run on one rank. The module resumes the run, logs numbers and
images, saves checkpoints and writes the results.

All ranks must call each method, because most of them communicate. Only rank 0 writes files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from timm_parallel.config.compose import save_config
from timm_parallel.data.prefetch import Batch
from timm_parallel.errors import NotFiniteError
from timm_parallel.faults.liveness import SAVING
from timm_parallel.machine.signals import Stopped, stop_handler
from timm_parallel.machine.start_clock import start_clock
from timm_parallel.record.console import Console
from timm_parallel.record.recorder import SHOWN, Numbers, Recorder
from timm_parallel.record.result import write_result
from timm_parallel.runtime.banner import describe_wait, show_banner, show_end
from timm_parallel.runtime.evaluation import Evaluation, SplitEvaluation
from timm_parallel.runtime.replica_checks import check_replicas_at_end, check_replicas_at_start
from timm_parallel.runtime.run_result import make_result
from timm_parallel.state import checkpoint, restoring, saving
from timm_parallel.state.parts import RunParts
from timm_parallel.state.segments import describe_segments, new_segment

log = logging.getLogger(__name__)


class Run:
    """A training run, which logs its steps and evaluations and saves its checkpoints.

    It stores the segments of the run, and the newest evaluation of each split.
    """

    def __init__(self, parts: RunParts, folder: Path) -> None:
        self.parts, self.folder = parts, folder
        self.config, self.strategy, self.group = parts.config, parts.strategy, parts.strategy.group
        self.segments = [new_segment(parts, folder, {})]
        self.evaluations: dict[str, SplitEvaluation] = {}
        self.saved_at = time.monotonic()
        self._epoch_began_at = 0
        self._has_begun = False
        # Hash of the parameters at the end, and sentences about differences between the ranks.
        self._at_end: tuple[str, list[str]] | None = None
        self._on_close = ExitStack()
        for loader in (parts.train_loader, *parts.eval_loaders.values()):
            self._on_close.callback(loader.close)

    def resume(self) -> None:
        """Continue the run from its newest undamaged checkpoint, which rank 0 sends to the other
        ranks.

        Without a checkpoint, the run starts at step 0. All ranks must call this function.
        """
        newest = checkpoint.load_newest(self.folder) if self.group.is_first else None
        if not self.group.gather(newest is not None)[0]:
            return
        replay = self.parts.train_loader.replay
        if replay is not None:
            raise ValueError(
                f"data.replay_batches={replay}: resume continues real training, which must not "
                "replay batches; start a new run, or leave data.replay_batches at null"
            )
        path, contents = newest or ("rank 0's checkpoint", None)
        contents = self.group.share_state(contents)
        changed = restoring.restore_run(self.parts, contents)
        self.segments = [*contents["segments"], new_segment(self.parts, self.folder, changed)]
        if self.group.is_first and (lines := describe_segments(self.segments)):
            save_config(self.config, self.folder, lines)
        log.info("resumed from %s, step %d", path, self.parts.progress.step)

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Check that all ranks have equal parameters, log the settings, and open metrics.jsonl and
        the trackers.

        The progress bar is shown in the `with` block. All ranks must call this function.
        """
        parts, is_first = self.parts, self.strategy.is_first
        self._at_start = check_replicas_at_start(parts.state, self.strategy)
        # The config has `auto` until here for values that only the ranks can choose.
        if is_first and self.strategy.chosen:
            save_config(self.config, self.folder, describe_segments(self.segments))
        show_banner(parts, self.folder)
        step = parts.progress.step
        with Console(is_first, parts.total_steps, step) as self._console:
            self._recorder = Recorder(self.config, self.folder, is_first, step)
            self._on_close.callback(self._recorder.close)
            stop_handler.request = self.group.stop.request
            self._has_begun = True
            try:
                yield
            except NotFiniteError as error:
                raise NotFiniteError(
                    f"training stops: {error}; {self.describe_step(error.step)}", error.step
                ) from None

    def train_batches(self) -> Iterator[Batch]:
        """Return the training batches from the current step to the end of its epoch. The loop must
        be inside of `with run.begin()`.
        """
        assert self._has_begun, "the training loop must be inside of `with run.begin()`"
        start_clock.end("setup")
        # Parameters that were compared before further training must be compared again.
        self._at_end = None
        progress = self.parts.progress
        self._epoch_began_at = progress.step - progress.step_in_epoch
        first = progress.step_in_epoch * self.config.train.accumulate
        return self.parts.train_loader.epoch(progress.epoch, first)

    def eval_batches(self, split: str) -> Iterator[Batch]:
        """Yield the batches of a split to evaluate, and count them in the progress bar."""
        loader = self.parts.eval_loaders[split]
        return self._console.counted(split, loader, len(loader.sampler))

    def show_images(self) -> None:
        """Send the augmented images of the next training batch to the trackers."""
        if self._recorder.enabled:
            loader = self.parts.train_loader
            prefetcher = loader.prefetcher
            images = loader.peek(SHOWN)
            self._recorder.images(images, prefetcher.mean, 1 / prefetcher.inverse_std)

    def image(self, name: str, image: Any) -> None:
        """Send an image to the trackers at the current step: a uint8 array [H, W, 3], or a PIL
        image.
        """
        self._recorder.image(self.parts.progress.step, name, image)

    def figure(self, name: str, figure: Any) -> None:
        """Send a matplotlib figure to the trackers at the current step."""
        self.image(name, figure)

    def log_step(self, numbers: Numbers) -> None:
        """Log the loss and metrics of a step, and the speed since the last logged step."""
        self.strategy.telemetry.sample()
        meter = self.parts.hooks.meter
        speed = meter.recent()
        per_device = speed / self.config.parallel.devices if speed else None
        measured = {
            "train/images_per_sec": speed,
            "train/images_per_sec_per_device": per_device,
            "train/data_wait": meter.data_wait(),
        }
        step = self.parts.progress.step
        self._recorder.numbers(step, self.parts.epochs_done, numbers | measured)
        self._console.step(step, numbers["train/loss"] or 0.0, speed)

    def log_evaluation(
        self, split: str, raw: Evaluation, averaged: Evaluation | None = None
    ) -> bool:
        """Log the evaluation of a split, and keep it for result.json.

        `raw`: evaluation of the trained weights. `averaged`: evaluation of the averaged weights, or
        None. Returns True if this is the best evaluation on val so far.
        """
        parts, progress = self.parts, self.parts.progress
        numbers, is_best = raw.with_averaged(averaged), False
        if split == "val":
            metric = self.config.checkpoint.metric.removeprefix("val/")
            is_best = progress.add_evaluation(numbers, metric, parts.task.metrics)
            best: Numbers = {f"{name}_best": value for name, value in progress.best_values.items()}
            numbers = numbers | best
        of_weights = {split: raw} | ({} if averaged is None else {f"{split}_ema": averaged})
        self.evaluations[split] = SplitEvaluation(numbers, parts.task.details(raw), of_weights)
        values = {f"{split}/{name}": value for name, value in numbers.items()}
        self._recorder.numbers(progress.step, parts.epochs_done, values)
        return is_best

    def end_epoch(self, is_evaluated: bool) -> None:
        """End the epoch, and log the means of its metrics and the peak memory.

        `is_evaluated`: whether to also log the newest metrics on val. All ranks must call this
        function.
        """
        parts, progress = self.parts, self.parts.progress
        number = progress.epoch + 1
        val = self.evaluations["val"].numbers if is_evaluated else {}
        progress.end_epoch(is_whole=progress.step_in_epoch == parts.steps_per_epoch)
        self._recorder.memory(progress.step, parts.epochs_done, self.strategy.telemetry.memory())
        self._recorder.epoch(number, self.config.train.epochs, progress.epoch_means, val)

    def save_if_due(self) -> None:
        """Save a checkpoint if checkpoint.every_steps or checkpoint.every_minutes asks for one now.

        Does nothing after the last step of an epoch, because a checkpoint is always saved there.
        All ranks must call this function.
        """
        config, progress = self.config.checkpoint, self.parts.progress
        due = config.every_steps is not None and progress.step % config.every_steps == 0
        if not due and config.every_minutes is not None:
            seconds = time.monotonic() - self.saved_at
            # All ranks use the decision of rank 0, because their clocks differ and they must save
            # at the same step.
            due = self.group.gather(seconds > 60 * config.every_minutes)[0]
        if due and progress.step_in_epoch < self.parts.steps_per_epoch:
            self.save()

    def save(self, is_best: bool = False) -> None:
        """Save the checkpoint last.pt, and best.pt if `is_best`.

        A run that replays batches saves nothing. Raises NotFiniteError if a weight is not finite.
        All ranks must call this function.
        """
        if self.parts.train_loader.replay is not None:
            return
        self.saved_at = time.monotonic()
        with self.parts.hooks.aside(SAVING):
            contents = saving.checkpoint_of(self.parts, self.segments)
            if self.group.is_first:
                folder, config = self.folder / "checkpoints", self.config.checkpoint
                step = self.parts.progress.step
                checkpoint.save(folder, contents, step, config.keep, is_best, config.top)

    def stop(self) -> NoReturn:
        """Save a checkpoint and end the run after a stop signal.

        This works after any step, also between two logged steps. All ranks must call this function.
        """
        self.save()
        number = self.group.stop.signal
        assert number is not None
        if self.parts.train_loader.replay is None:
            log.info("saved at step %d", self.parts.progress.step)
        raise Stopped(number)

    def _check_replicas(self) -> tuple[str, list[str]]:
        """Check that all ranks end with equal weights, unless that is done."""
        if self._at_end is None:
            self._at_end = check_replicas_at_end(self.parts.state, self.strategy)
        return self._at_end

    def load_best(self) -> None:
        """Load the weights of best.pt, which rank 0 sends to the other ranks, if this file exists.

        All ranks must call this function.
        """
        # Compare the trained parameters now, because the loaded ones are equal on all ranks.
        self._check_replicas()
        best = self.folder / "checkpoints" / "best.pt"
        if self.group.gather(best.exists())[0]:
            contents = checkpoint.load(best) if self.group.is_first else None
            contents = self.group.share_state(contents)
            restoring.restore_weights(self.parts.state, self.strategy, contents)

    def end(self) -> None:
        """Write result.json, end the trackers, log the results, and leave the process group.

        All ranks must call this function.
        """
        metrics: dict[str, dict[str, Any]] = {}
        for split, evaluation in self.evaluations.items():
            metrics[split] = evaluation.numbers | evaluation.details
        result = make_result(
            self.parts, self.folder, metrics, self.segments, self._at_start, self._check_replicas()
        )
        for evaluation in self.evaluations.values():
            for name, of_weights in evaluation.of_weights.items():
                self._recorder.draw(result.steps, name, partial(self.parts.task.draw, of_weights))
        views = self._recorder.end(result)
        if self.group.is_first:
            write_result(self.folder, result)
            show_end(
                self.config,
                self.folder,
                result,
                describe_segments(self.segments),
                views,
                describe_wait(self.parts, result),
            )
        self._recorder.close()
        self.group.barrier()
        self.strategy.close()

    def close(self) -> None:
        """End the loader workers and close metrics.jsonl and the trackers, also after an error."""
        self._on_close.close()

    def describe_step(self, step: int) -> str:
        """Describe which images a failed step has read, and which checkpoint is the last good one.

        The indices of all these images are logged.
        """
        per_step = self.config.train.accumulate
        first = (step - 1 - self._epoch_began_at) * per_step
        indices = self.parts.train_loader.global_batches(first, per_step)
        log.error("training images of step %d, by index: %s", step, indices)
        good = "there is no checkpoint yet"
        # Load the file, because a checkpoint that is damaged or not finite is not a good one.
        with suppress(ValueError):
            if (newest := checkpoint.load_newest(self.folder)) is not None:
                good = f"the last good checkpoint is {newest[0]}"
        shown = ", ".join(map(str, indices[:8]))
        return f"it read the training images {shown} … (all in the log); {good}"
