"""One run, top to bottom: build, wrap, resume, train, evaluate, write. Read this file first.

Every rank runs it; only rank 0 writes. Collective calls (sum, gather, evaluate …) are outside any
`if is_first`.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from src.parallel import build_strategy
from src.schema import ResolvedConfig
from src.train.build import RunParts
from src.train.loop import StepReport, train_epoch
from src.train.losses import find_loss
from src.train.metrics import confusion, details, metrics_of
from src.train.step import AUTOCAST, Autocast
from timm_parallel.errors import NotFiniteError, RefusedError
from timm_parallel.faults.liveness import EVALUATING, SAVING
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import Stopped, stop_handler
from timm_parallel.record.console import Console
from timm_parallel.record.recorder import Recorder
from timm_parallel.record.result import write_result
from timm_parallel.runtime import checkpoint, restoring, saving, segments
from timm_parallel.runtime.banner import show_banner, show_end
from timm_parallel.runtime.determinism import use_deterministic_algorithms
from timm_parallel.runtime.evaluation import Evaluation, evaluate
from timm_parallel.runtime.progress import Progress
from timm_parallel.runtime.replica_checks import check_replicas_at_end, check_replicas_at_start
from timm_parallel.runtime.run_result import make_result

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


def run(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank. Continues from the newest checkpoint in the run folder,
    if there is one.
    """
    try:
        trainer = Trainer(config, folder, ranks, store)
        trainer.resume()
    # Data, model, optimizer or checkpoint do not fit the config.
    except ValueError as error:
        raise RefusedError(str(error)) from error
    try:
        trainer.train()
    finally:
        trainer.close()


class Trainer:
    """Training run on one rank: holds its parts, and has a method per phase."""

    def __init__(
        self, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None
    ) -> None:
        # The same initial weights on every rank and under every strategy.
        torch.manual_seed(config.seed)
        self.config, self.folder = config, folder
        if config.train.deterministic:
            use_deterministic_algorithms()
        self.strategy = build_strategy(config.parallel, ranks, store)
        self.group = self.strategy.group
        self.parts = RunParts(config, self.strategy)
        self.state = self.parts.state
        self.parts.segments = segments.first_segment(self.parts, folder)
        self.saved_at = time.monotonic()
        self.on_close = ExitStack()
        for loader in (self.parts.train, *self.parts.evaluation.values()):
            self.on_close.callback(loader.close)

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def train(self) -> None:
        """Train until the last epoch, evaluate the best weights, and write result.json."""
        parts, strategy = self.parts, self.strategy
        at_start = check_replicas_at_start(self.state, strategy)
        show_banner(parts, self.folder)
        with Console(strategy.is_first, parts.total_steps, self.progress.step) as self.console:
            self.recorder = Recorder(
                self.config, self.folder, strategy.is_first, self.console, self.progress.step
            )
            self.on_close.callback(self.recorder.close)
            stop_handler.request = self.group.stop.request
            try:
                while not self.is_finished():
                    self.train_epoch()
                    self.end_epoch()
            except NotFiniteError as error:
                described = segments.describe_step(
                    parts, self.folder, error.step, self.steps_before_epoch
                )
                raise NotFiniteError(f"{error}; {described}", error.step) from None
            # Check before evaluate_best gives all ranks the weights of rank 0.
            at_end = check_replicas_at_end(self.state, strategy)
            self.evaluate_best()
        result = make_result(parts, self.folder, at_start, at_end)
        views = self.recorder.end(result, parts.confusions, parts.dataset.class_names)
        if strategy.is_first:
            write_result(self.folder, result)
            show_end(self.config, self.folder, result, segments.describe_segments(parts), views)
        self.recorder.close()
        self.group.barrier()
        strategy.close()

    def close(self) -> None:
        """End loader workers and close log files, also after an error."""
        self.on_close.close()

    def resume(self) -> None:
        """Continue from rank 0's newest undamaged checkpoint, whose contents rank 0 sends to the
        other ranks.
        """
        newest = checkpoint.load_newest(self.folder) if self.group.is_first else None
        if not self.group.gather(newest is not None)[0]:
            return
        path, contents = newest or ("rank 0's checkpoint", None)
        restoring.continue_from(self.parts, self.group.share_state(contents), self.folder)
        log.info("resumed from %s, step %d", path, self.progress.step)

    def is_finished(self) -> bool:
        """Return True after the epoch of the last step, or after `early_stop` evaluations without a
        better metric.
        """
        progress, patience = self.progress, self.config.train.early_stop
        return (
            (progress.step >= self.parts.total_steps and progress.ended_at == progress.step)
            or progress.epoch >= self.config.train.epochs
            or (patience is not None and progress.evaluations_since_best >= patience)
        )

    def train_epoch(self) -> None:
        """Train to the end of the epoch. Log metrics and save checkpoints at the steps that are
        due.
        """
        parts, progress, every = self.parts, self.progress, self.config.checkpoint.every_steps
        self.steps_before_epoch = progress.step - progress.step_in_epoch
        batches = parts.train.epoch(
            progress.epoch, progress.step_in_epoch * self.config.train.accumulate
        )
        if progress.step == 0:
            self.show_images()
        for report in train_epoch(
            self.state,
            batches,
            self.config,
            self.strategy,
            parts.hooks,
            parts.steps_per_epoch,
            parts.mixing,
        ):
            self.strategy.telemetry.sample()
            self.recorder.step(progress.step, parts.epochs_done, self.step_numbers(report))
            due = (every is not None and progress.step % every == 0) or self.minutes_are_over()
            if due and progress.step_in_epoch < parts.steps_per_epoch:
                self.save(is_best=False)
        if self.group.stop.stopped and progress.step_in_epoch < parts.steps_per_epoch:
            self.stop()

    def step_numbers(self, report: StepReport) -> dict[str, float | None]:
        """Return name -> value for the log: training metrics, learning rate, gradient norm and
        speed.
        """
        meter = self.parts.hooks.meter
        speed = meter.recent()
        return {
            **{f"train/{name}": value for name, value in report.means.items()},
            "lr": report.lr,
            "train/grad_norm": report.grad_norm,
            "train/images_per_sec": speed,
            "train/images_per_sec_per_device": speed / self.config.parallel.devices
            if speed
            else None,
            "train/data_wait": meter.data_wait(),
        }

    def minutes_are_over(self) -> bool:
        """Return True, on all ranks alike, if checkpoint.every_minutes have passed on rank 0 since
        the last save.
        """
        minutes = self.config.checkpoint.every_minutes
        if minutes is None:
            return False
        return bool(self.group.gather(time.monotonic() - self.saved_at > 60 * minutes)[0])

    def end_epoch(self) -> None:
        """End an epoch: evaluate, record training means and memory, and save a checkpoint."""
        parts, progress, train = self.parts, self.progress, self.config.train
        number, is_best, val = progress.epoch + 1, False, {}
        is_due = train.evaluate_every and number % train.evaluate_every == 0
        if is_due or progress.step >= parts.total_steps:
            with parts.hooks.aside(EVALUATING):
                is_best = self.evaluate("val", may_stop=True)
                val = parts.numbers["val"]
        progress.end_epoch(is_whole=progress.step_in_epoch == parts.steps_per_epoch)
        self.recorder.memory(progress.step, parts.epochs_done, self.strategy.telemetry.memory())
        self.recorder.epoch(number, train.epochs, progress.epoch_means, val)
        self.save(is_best)

    def evaluate(self, split: str, may_stop: bool = False) -> bool:
        """Evaluate raw and averaged weights on a split. Return True if the result is the best on
        val so far.
        """
        parts, ema, is_best = self.parts, self.state.ema, False
        raw = self.evaluate_model(self.state.model, split, may_stop)
        averaged = None if ema is None else self.evaluate_model(ema.module, split, may_stop)
        numbers = raw.with_averaged(averaged)
        if split == "val":
            metric = self.config.checkpoint.metric.removeprefix("val/")
            is_best = self.progress.add_evaluation(
                numbers, metric, metrics_of(self.config.train.task)
            )
            numbers |= {f"{name}_best": value for name, value in self.progress.best_values.items()}
        parts.numbers[split] = numbers | details(raw)
        for name, evaluation in ((split, raw), (f"{split}_ema", averaged)):
            if evaluation is not None and confusion in evaluation.sums:
                parts.confusions[name] = evaluation.sums[confusion]
        values = {f"{split}/{name}": value for name, value in numbers.items()}
        self.recorder.numbers(self.progress.step, parts.epochs_done, values)
        return is_best

    def evaluate_model(self, model: nn.Module, split: str, may_stop: bool) -> Evaluation:
        """Evaluate one set of weights (raw or averaged) on a split, over all ranks."""
        self.strategy.buffers.share(model)
        loader = self.parts.evaluation[split]
        autocast = Autocast(model, self.strategy.device.type, AUTOCAST[self.config.train.precision])
        evaluation = evaluate(
            self.strategy.for_evaluation(autocast),
            loader,
            metrics_of(self.config.train.task),
            find_loss(self.config.train.loss).of_images,
            self.group,
            should_stop=self.group.stop.stop_requested if may_stop else None,
            batches=self.console.counted(split, loader, len(loader.sampler)),
            multilabel=self.config.train.task == "multilabel",
        )
        if evaluation is None:
            self.stop()
        return evaluation

    def stop(self) -> NoReturn:
        """Save a checkpoint and exit after a stop signal. Works after any step, also between two
        logged steps.
        """
        self.save(is_best=False)
        number = self.group.stop.signal
        assert number is not None
        log.info("saved at step %d", self.progress.step)
        raise Stopped(number)

    def evaluate_best(self) -> None:
        """Evaluate the best weights on the test split, if there is one, and on val if no epoch
        evaluated it.
        """
        if "val" not in self.parts.numbers:
            self.evaluate("val")
        if "test" not in self.parts.evaluation:
            return
        best = self.folder / "checkpoints" / "best.pt"
        if self.group.gather(best.exists())[0]:
            contents = checkpoint.load(best) if self.group.is_first else None
            restoring.restore_weights(self.state, self.strategy, self.group.share_state(contents))
        self.evaluate("test")

    def save(self, is_best: bool) -> None:
        """Save last.pt, and best.pt if `is_best`, on rank 0. Raises NotFiniteError for non-finite
        weights.
        """
        parts, config = self.parts, self.config
        self.saved_at = time.monotonic()
        with parts.hooks.aside(SAVING):
            contents = saving.checkpoint_of(parts)
            saving.check_finite(
                [contents["model"], contents["ema"], contents["train_step"]],
                self.group,
                self.progress.step,
            )
            if self.group.is_first:
                folder, keep, top = (
                    self.folder / "checkpoints",
                    config.checkpoint.keep,
                    config.checkpoint.top,
                )
                checkpoint.save(folder, contents, self.progress.step, keep, is_best, top)

    def show_images(self) -> None:
        """Show the augmented images of the first training batch in the trackers."""
        if self.recorder.enabled:
            prefetcher = self.parts.train.prefetcher
            self.recorder.images(
                self.parts.train.peek(), prefetcher.mean, 1 / prefetcher.inverse_std
            )
