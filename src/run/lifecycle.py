"""One run, top to bottom: build, wrap, resume, train, evaluate, write. The file to read first.

Every rank runs this; rank 0 alone writes. Collective calls (sum, gather, evaluate …) stand outside any `is_first`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from src.engine.machine.pulse import EVALUATING, SAVING
from src.engine.machine.ranks import Ranks
from src.engine.machine.signals import Stopped, stop_handler
from src.engine.record.console import Console, print_config
from src.engine.record.recorder import Recorder
from src.engine.record.result import write_result
from src.parallel import build_strategy
from src.run.build import Run
from src.run.proof import prove_end, prove_start, show_banner, show_end
from src.run.result import make_result
from src.schema import ResolvedConfig
from src.training import checkpoint
from src.training.determinism import use_deterministic_algorithms
from src.training.finite import NotFiniteError, check_finite
from src.training.loop import StepReport, train_epoch
from src.training.metrics import Evaluation, evaluate, with_averaged
from src.training.state import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


def run(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Run one rank of a resolved config; goes on from the newest checkpoint in `folder` where there is one."""
    try:
        training = Training(config, folder, ranks, store)
        training.resume()
    except ValueError as error:  # of data, model, optimizer or checkpoint, before the first step
        raise RefusedError(str(error)) from error
    try:
        training.train()
    finally:
        training.close()


class RefusedError(ValueError):
    """What was asked for cannot be built; the message says what to change."""


class Training:
    """A run as this rank trains it."""

    def __init__(self, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on every rank and under every strategy
        self.config, self.folder = config, folder
        if config.train.deterministic:
            use_deterministic_algorithms()
        self.strategy = build_strategy(config.parallel, ranks, store)
        self.run = Run(config, self.strategy)
        self.state = self.run.state
        self.saved_at = time.monotonic()
        self.on_close = ExitStack()
        for loader in (self.run.train, *self.run.evaluation.values()):
            self.on_close.callback(loader.close)

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def train(self) -> None:
        """The whole story."""
        run, strategy = self.run, self.strategy
        if strategy.is_first and self.config.print_config:
            print_config(self.config, full=self.config.print_config == "full")
        start = prove_start(run)
        show_banner(run, self.folder)
        with Console(strategy.is_first, run.total_steps, self.progress.step) as self.console:
            self.recorder = Recorder(self.folder, strategy.is_first, self.console, self.progress.step)
            self.on_close.callback(self.recorder.close)
            stop_handler.request = strategy.stopping.request
            try:
                while not self.is_finished():
                    self.train_epoch()
                    self.end_epoch()
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}; {self.what_was_read(error.step)}", error.step) from None
            end = prove_end(self.state.model, strategy)  # the best weights, which follow, are rank 0's on all
            self.evaluate_best()
        result = make_result(run, self.folder, start, end)
        self.recorder.end(result.steps, dataclasses.asdict(self.config), run.confusions, run.images.class_names)
        if strategy.is_first:
            write_result(self.folder, result)
            show_end(self.config, self.folder, result)
        strategy.barrier()
        strategy.close()

    def close(self) -> None:
        """Leave nothing unwritten and nobody waiting, whatever has happened."""
        self.on_close.close()

    def resume(self) -> None:
        """Go on from the newest good checkpoint that rank 0 has; the others receive what it holds."""
        found = checkpoint.load_newest(self.folder) if self.strategy.is_first else None
        if not self.strategy.gather(found is not None)[0]:
            return
        path, contents = found or ("rank 0's checkpoint", None)
        checkpoint.restore(self.state, self.strategy, self.strategy.share_state(contents))
        if self.run.mixing is not None:
            self.run.mixing.batch = self.progress.step * self.config.train.accumulate
        self.run.moments.meter.expect(self.run.total_steps - self.progress.step)
        log.info("going on from %s, step %d", path, self.progress.step)

    def is_finished(self) -> bool:
        """True after the end of the last step's epoch, or if no better for `early_stop` evaluations."""
        progress, patience = self.progress, self.config.train.early_stop
        return (
            (progress.step >= self.run.total_steps and progress.ended_at == progress.step)
            or progress.epoch >= self.config.train.epochs
            or (patience is not None and progress.evaluations_since_best >= patience)
        )

    def train_epoch(self) -> None:
        """Train to the end of the epoch, recording and saving at boundaries."""
        run, progress, every = self.run, self.progress, self.config.checkpoint.every_steps
        self.steps_before_epoch = progress.step - progress.step_in_epoch
        batches = run.train.epoch(progress.epoch, progress.step_in_epoch * self.config.train.accumulate)
        if progress.step == 0:
            self.show_images()
        for report in train_epoch(
            self.state, batches, self.config, self.strategy, run.moments, run.steps_per_epoch, run.mixing
        ):
            self.strategy.sample_utilisation()
            self.recorder.step(progress.step, run.epochs_done, self.step_numbers(report))
            due = (every is not None and progress.step % every == 0) or self.minutes_are_over()
            if due and progress.step_in_epoch < run.steps_per_epoch:
                self.save(is_best=False)
        if self.strategy.stopping.is_over and progress.step_in_epoch < run.steps_per_epoch:
            self.stop()

    def step_numbers(self, report: StepReport) -> dict[str, float | None]:
        meter = self.run.moments.meter
        speed = meter.recent()
        return {
            "train/loss": report.loss,
            "lr": report.lr,
            "train/grad_norm": report.grad_norm,
            "train/images_per_sec": speed,
            "train/images_per_sec_per_device": speed / self.config.parallel.devices if speed else None,
            "train/data_wait": meter.data_wait(),
        }

    def minutes_are_over(self) -> bool:
        """True, on all ranks alike, if checkpoint.every_minutes have passed since the last save by rank 0's clock."""
        minutes = self.config.checkpoint.every_minutes
        if minutes is None:
            return False
        return bool(self.strategy.gather(time.monotonic() - self.saved_at > 60 * minutes)[0])

    def end_epoch(self) -> None:
        """Close the books of an epoch: mean loss, evaluation, memory, checkpoint."""
        run, progress, train = self.run, self.progress, self.config.train
        number, is_best = progress.epoch + 1, False
        if progress.step >= run.total_steps or (train.evaluate_every and number % train.evaluate_every == 0):
            with run.moments.aside(EVALUATING):
                is_best = self.evaluate("val", may_stop=True)
        progress.end_epoch(is_whole=progress.step_in_epoch == run.steps_per_epoch)
        self.recorder.memory(progress.step, run.epochs_done, self.strategy.memory())
        self.recorder.epoch(number, train.epochs, progress.epoch_loss, run.numbers.get("val", {}))
        self.save(is_best)

    def evaluate(self, split: str, may_stop: bool = False) -> bool:
        """Evaluate the bare model on a split, and the averaged one. True if it is the best on val so far."""
        run, ema, is_best = self.run, self.state.ema, False
        raw = self.evaluate_model(self.state.model, split, may_stop)
        averaged = None if ema is None else self.evaluate_model(ema.module, split, may_stop)
        numbers = with_averaged(raw, averaged)
        if split == "val":
            is_best = self.progress.note_evaluation(numbers, self.config.checkpoint.metric.removeprefix("val/"))
            numbers["acc_best"] = self.progress.best_acc
        run.numbers[split], run.confusions[split] = numbers | raw.details(), raw.confusion
        if averaged is not None:
            run.confusions[f"{split}_ema"] = averaged.confusion
        values = {f"{split}/{name}": value for name, value in numbers.items()}
        self.recorder.numbers(self.progress.step, run.epochs_done, values)
        return is_best

    def evaluate_model(self, model: nn.Module, split: str, may_stop: bool) -> Evaluation:
        self.strategy.share_buffers(model)
        loader = self.run.evaluation[split]
        found = evaluate(
            self.strategy.for_evaluation(model, self.run.autocast),
            self.console.counted(split, loader, len(loader.requests)),
            strategy=self.strategy,
            num_samples=len(loader.reader.split),
            num_classes=self.run.num_classes,
            unreadable=loader.unreadable,
            should_stop=self.strategy.stopping.is_asked if may_stop else None,
        )
        if found is None:
            self.stop()
        return found

    def stop(self) -> NoReturn:
        """Save where we are, which may be between two boundaries or before an epoch's evaluation, and leave."""
        self.save(is_best=False)
        number = self.strategy.stopping.signal
        assert number is not None
        log.info("saved at step %d", self.progress.step)
        raise Stopped(number)

    def evaluate_best(self) -> None:
        """Evaluate the best weights on the test split, where there is one, and val once if it never was."""
        if "val" not in self.run.numbers:
            self.evaluate("val")
        if "test" not in self.run.evaluation:
            return
        best = self.folder / "checkpoints" / "best.pt"
        if self.strategy.gather(best.exists())[0]:
            contents = checkpoint.load(best) if self.strategy.is_first else None
            checkpoint.restore_weights(self.state, self.strategy, self.strategy.share_state(contents))
        self.evaluate("test")

    def save(self, is_best: bool) -> None:
        """Rank 0 writes last.pt (and best.pt), of weights that are finite on all ranks."""
        run, config = self.run, self.config
        made_by = {"strategy": self.strategy.kind, "devices": config.parallel.devices}
        self.saved_at = time.monotonic()
        with run.moments.aside(SAVING):
            contents = checkpoint.snapshot(
                self.state, self.strategy, run.images.class_names, run.preprocessing, made_by
            )
            check_finite([contents["model"], contents["ema"]], self.strategy, self.progress.step)
            if self.strategy.is_first:
                folder, keep = self.folder / "checkpoints", config.checkpoint.keep
                checkpoint.save(folder, contents, self.progress.step, keep, is_best)

    def what_was_read(self, step: int) -> str:
        """The images of a step and the checkpoint before it, for a message; the log gets all of their indices."""
        per_step, before = self.config.train.accumulate, step - 1 - self.steps_before_epoch
        indices = self.run.train.requests.global_batches(before * per_step, per_step)
        log.error("training images of step %d, by index: %s", step, indices)
        last = self.folder / "checkpoints" / "last.pt"
        good = f"the last good checkpoint is {last}" if last.exists() else "there is no checkpoint yet"
        return f"it read the training images {', '.join(map(str, indices[:8]))} … (all in the log); {good}"

    def show_images(self) -> None:
        """The first training batch as the model will see it."""
        if self.recorder.enabled:
            feed = self.run.train.feed
            self.recorder.images(self.run.train.peek(), feed.mean, 1 / feed.inverse_std)
