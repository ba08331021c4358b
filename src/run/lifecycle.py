"""One run, top to bottom: build, wrap, resume, train, evaluate, write. The file to read first.

Every rank runs this; rank 0 alone writes. Collective calls (sum, gather, evaluate …) stand outside any `is_first`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from src.engine.machine.pulse import SAVING, pulse
from src.engine.machine.ranks import Ranks
from src.engine.machine.signals import Stopped, stop_handler
from src.engine.record.console import Console, print_config
from src.engine.record.recorder import Recorder
from src.engine.record.result import write_result
from src.parallel import build_strategy
from src.run.build import build
from src.run.proof import collect, prove_start, show_banner, show_end
from src.schema import Config
from src.training import checkpoint
from src.training.finite import NotFiniteError, check_finite
from src.training.loop import Progress, train_epoch
from src.training.metrics import Evaluation, evaluate

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


def run(config: Config, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Run one rank of a resolved config; goes on from the newest checkpoint in `folder` where there is one."""
    try:
        prepared = Run(config, folder, ranks, store)
        prepared.resume()
    except ValueError as error:  # of data, model, optimizer or checkpoint, before the first step
        raise RefusedError(str(error)) from error
    try:
        prepared.tell()
    finally:
        prepared.close()


class RefusedError(ValueError):
    """What was asked for cannot be built; the message says what to change."""


class Run:
    """The parts of a run and what is done with them."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks, store: Store | None) -> None:
        torch.manual_seed(config.seed)  # the same initial weights on every rank and under every strategy
        self.config, self.folder = config, folder
        self.strategy = build_strategy(config.parallel, ranks, store)
        self.parts = build(config, self.strategy, ranks.local_world_size)
        self.progress = Progress()
        self.evaluations: dict[str, Evaluation] = {}  # the newest of each split
        self.train_loss: float | None = None  # mean over the last whole or partial epoch

    def tell(self) -> None:
        """The whole story."""
        config, strategy = self.config, self.strategy
        if strategy.is_first and config.print_config:
            print_config(config, full=config.print_config == "full")
        proof = prove_start(self.parts, strategy)
        show_banner(config, self.folder, self.parts, strategy, self.progress)
        with Console(strategy.is_first, self.parts.total_steps, self.progress.step) as self.console:
            self.recorder = Recorder(self.folder, strategy.is_first, self.console, self.progress.step)
            stop_handler.request = self.strategy.stopping.request
            try:
                while not self.is_finished():
                    self.train_epoch()
                    self.end_epoch()
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}; {self.what_was_read(error.step)}", error.step) from None
            self.evaluate_best()
        result = collect(self, proof)
        self.recorder.end(config, result, self.evaluations, self.parts.images.class_names)
        if strategy.is_first:
            write_result(self.folder, result)
            show_end(config, self.folder, result)
        strategy.barrier()
        strategy.close()

    def close(self) -> None:
        for loader in (self.parts.train, *self.parts.evaluation.values()):
            loader.close()

    def resume(self) -> None:
        """Go on from the newest good checkpoint that rank 0 has; the others receive what it holds."""
        path = checkpoint.newest(self.folder) if self.strategy.is_first else None
        if not self.strategy.gather(path is not None)[0]:
            return
        contents = self.strategy.share_state(path and checkpoint.load(path, self.strategy.device))
        self.progress = checkpoint.restore(self.parts.trainee, contents)
        if self.parts.mixing is not None:
            self.parts.mixing.batch = self.progress.step * self.config.train.accumulate
        log.info("going on from %s, step %d", path or "rank 0's checkpoint", self.progress.step)

    def is_finished(self) -> bool:
        """At the last step or epoch, or no better for `early_stop` evaluations."""
        patience = self.config.train.early_stop
        return (
            self.progress.step >= self.parts.total_steps
            or self.progress.epoch >= self.config.train.epochs
            or (patience is not None and self.progress.evaluations_since_best >= patience)
        )

    def train_epoch(self) -> None:
        """Train to the end of the epoch, recording and saving at boundaries."""
        parts, progress, train = self.parts, self.progress, self.config.train
        every = self.config.checkpoint.every_steps
        batches = parts.train.epoch(progress.epoch, progress.step_in_epoch * train.accumulate)
        if progress.step == 0:
            self.show_images()
        parts.meter.epoch_begins()
        for report in train_epoch(
            parts.trainee,
            batches,
            progress,
            strategy=self.strategy,
            config=train,
            clip_grad=self.config.optim.clip_grad,
            seed=self.config.seed,
            steps_per_epoch=parts.steps_per_epoch,
            is_boundary=lambda step: step % train.log_every == 0 or (every is not None and step % every == 0),
            meter=parts.meter,
            mix=parts.mixing,
        ):
            self.strategy.sample_utilisation()
            speed = parts.meter.recent(train.log_every)
            self.recorder.step(report, speed, int(self.config.parallel.devices), parts.meter.data_wait())
            if every is not None and report.step % every == 0 and progress.step_in_epoch < parts.steps_per_epoch:
                self.save(is_best=False)
        parts.meter.epoch_ends()
        if self.strategy.stopping.is_due(progress.step) and progress.step_in_epoch < parts.steps_per_epoch:
            self.stop()

    def end_epoch(self) -> None:
        """Close the books of an epoch: mean loss, evaluation, memory, checkpoint."""
        progress, train = self.progress, self.config.train
        ended = progress.epoch + progress.step_in_epoch / self.parts.steps_per_epoch
        last = progress.step >= self.parts.total_steps
        is_best = False
        if last or (train.evaluate_every and (progress.epoch + 1) % train.evaluate_every == 0):
            is_best = self.evaluate("val", ended, may_stop=True)
        self.train_loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.begin_epoch()
        self.recorder.memory(progress.step, ended, self.strategy.memory())
        self.recorder.epoch(
            progress.epoch, self.config.train.epochs, self.train_loss, self.evaluations, progress.best_acc
        )
        self.save(is_best)

    def evaluate(self, split: str, epoch: float, may_stop: bool = False) -> bool:
        """Evaluate the bare model on a split, and the averaged one; returns whether it is the best on val so far."""
        trainee, progress, metric = self.parts.trainee, self.progress, self.config.checkpoint.metric
        raw = self.evaluate_model(trainee.model, split, may_stop)
        ema = None if trainee.ema is None else self.evaluate_model(trainee.ema.module, split, may_stop)
        self.evaluations[split] = raw
        if ema is not None:
            self.evaluations[f"{split}_ema"] = ema
        judged = ema if ema is not None and metric.endswith("_ema") else raw
        is_best = split == "val" and progress.note_evaluation(judged, metric)
        self.recorder.evaluation(progress.step, epoch, split, raw, ema, progress.best_acc if split == "val" else None)
        return is_best

    def evaluate_model(self, model: nn.Module, split: str, may_stop: bool) -> Evaluation:
        self.strategy.share_buffers(model)
        loader = self.parts.evaluation[split]
        found = evaluate(
            self.strategy.for_evaluation(model, self.parts.autocast),
            self.console.counted(split, loader, len(loader.requests)),
            strategy=self.strategy,
            num_samples=len(loader.reader.split),
            num_classes=self.parts.num_classes,
            unreadable=loader.unreadable,
            should_stop=(lambda: self.strategy.stopping.is_due(self.progress.step)) if may_stop else None,
        )
        if found is None:
            self.stop()
        return found

    def stop(self) -> NoReturn:
        """Save where we are, which may be between two boundaries or before an epoch's evaluation, and leave."""
        self.save(is_best=False)
        self.recorder.close()
        number = self.strategy.stopping.signal
        assert number is not None
        log.info("saved at step %d", self.progress.step)
        raise Stopped(number)

    def evaluate_best(self) -> None:
        """Evaluate the best weights on the test split, where there is one, and val once if it never was."""
        if "val" not in self.evaluations:
            self.evaluate("val", self.progress.epoch)
        if "test" not in self.parts.evaluation:
            return
        best = self.folder / "checkpoints" / "best.pt"
        if self.strategy.gather(best.exists())[0]:
            contents = checkpoint.load(best, self.strategy.device) if self.strategy.is_first else None
            checkpoint.restore_weights(self.parts.trainee, self.strategy.share_state(contents))
        self.evaluate("test", self.progress.epoch)

    def save(self, is_best: bool) -> None:
        """Rank 0 writes last.pt (and best.pt), of weights that are finite on all ranks."""
        pulse.at(SAVING)
        ema = self.parts.trainee.ema
        check_finite(
            [self.parts.trainee.model, *([] if ema is None else [ema.module])], self.strategy, self.progress.step
        )
        if self.strategy.is_first:
            made_by = {"strategy": self.strategy.kind, "devices": int(self.config.parallel.devices)}
            parts = self.parts
            contents = checkpoint.snapshot(
                parts.trainee, self.progress, parts.images.class_names, parts.preprocessing, made_by
            )
            checkpoint.save(
                self.folder / "checkpoints", contents, self.progress.step, self.config.checkpoint.keep, is_best
            )

    def what_was_read(self, step: int) -> str:
        """The images of a step and the checkpoint before it, for a message; the log gets all of their indices."""
        per_step, progress = self.config.train.accumulate, self.progress
        in_epoch = step - (progress.step - progress.step_in_epoch) - 1
        indices = self.parts.train.requests.shard.global_batches(in_epoch * per_step, per_step)
        log.error("training images of step %d, by index: %s", step, indices)
        last = self.folder / "checkpoints" / "last.pt"
        good = f"the last good checkpoint is {last}" if last.exists() else "there is no checkpoint yet"
        return f"it read the training images {', '.join(map(str, indices[:8]))} … (all in the log); {good}"

    def show_images(self) -> None:
        """The first training batch as the model will see it."""
        if self.recorder.enabled:
            feed = self.parts.train.feed
            self.recorder.images(self.parts.train.peek(), feed.mean, 1 / feed.inverse_std)
