"""A training run from top to bottom: build, resume, train, evaluate, write. Read this file first.

Every rank executes this code, and only rank 0 writes files. Collective calls (sum, gather, evaluate
…) are outside of any `if is_first`, because all ranks must make them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from src.schema import ResolvedConfig
from src.train.build import build_run
from src.train.loop import run_steps
from src.train.step import AUTOCAST, Autocast
from timm_parallel import Evaluation, Ranks, RefusedError, Run, build_strategy, evaluate

if TYPE_CHECKING:
    from torch.distributed import Store


def run(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank of a run. Continue from the newest checkpoint in the run folder, if there
    is one. All ranks must call this function.
    """
    try:
        trainer = Trainer(config, folder, ranks, store)
        trainer.resume()
    # These errors mean that data, model, optimizer or checkpoint do not fit the config, so the user
    # must change it.
    except ValueError as error:
        raise RefusedError(str(error)) from error
    try:
        trainer.train()
    finally:
        trainer.run.close()


class Trainer:
    """A training run on one rank. It has the objects of the run (`parts`), its files and logs
    (`run`), and a method for each phase.
    """

    def __init__(
        self, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None
    ) -> None:
        # Seed every rank alike, so that every rank and every strategy starts from the same weights.
        torch.manual_seed(config.seed)
        self.config = config
        self.strategy = build_strategy(config.parallel, ranks, store, config.train.deterministic)
        self.parts = build_run(config, self.strategy)
        self.state, self.run = self.parts.state, Run(self.parts, folder)

    def resume(self) -> None:
        """Load the newest checkpoint in the run folder, if there is one, so that training continues
        there.
        """
        self.run.resume()
        if self.parts.mixing is not None:
            self.parts.mixing.batch = self.parts.progress.step * self.config.train.accumulate

    def train(self) -> None:
        """Train until the last epoch or early stop, evaluate the best weights, and write
        result.json.
        """
        with self.run.begin():
            while not self.is_finished():
                self.run_epoch()
                self.end_epoch()
            self.evaluate_at_end()
        self.run.end()

    def is_finished(self) -> bool:
        """Return True if training is over: all steps or epochs are done, or train.early_stop ends
        the run.
        """
        progress = self.parts.progress
        return (
            (progress.step >= self.parts.total_steps and progress.ended_at == progress.step)
            or progress.epoch >= self.config.train.epochs
            or self.stops_early
        )

    @property
    def stops_early(self) -> bool:
        """True if train.early_stop evaluations in a row did not improve checkpoint.metric."""
        patience = self.config.train.early_stop
        return patience is not None and self.parts.progress.evaluations_since_best >= patience

    def run_epoch(self) -> None:
        """Run the remaining training steps of an epoch. Log metrics and save checkpoints at the
        steps where they are due.
        """
        parts, progress = self.parts, self.parts.progress
        if progress.step == 0:
            self.run.show_images()
        # A resumed run may have been stopped during an evaluation. Repeat this evaluation first.
        self.evaluate_within_epoch()
        for report in run_steps(parts, self.run.train_batches()):
            # To log more numbers of a step, add them here.
            numbers = {f"train/{name}": value for name, value in report.means.items()}
            self.run.log_step({**numbers, "lr": report.lr, "train/grad_norm": report.grad_norm})
            if not self.evaluate_within_epoch():
                self.run.save_if_due()
            elif self.stops_early:
                return
        if self.strategy.group.stop.stopped and progress.step_in_epoch < parts.steps_per_epoch:
            self.run.stop()

    def end_epoch(self) -> None:
        """Finish an epoch: evaluate if an evaluation is due, log the epoch, and save a
        checkpoint.
        """
        progress, every, is_best = self.parts.progress, self.config.train.evaluate_every, False
        is_due = bool(every) and (progress.epoch + 1) % every == 0
        is_due |= progress.step >= self.parts.total_steps
        is_due |= self.is_evaluation_step()
        if is_due and progress.evaluated_at != progress.step:
            is_best = self.evaluate_val()
        self.run.end_epoch(is_evaluated=is_due)
        self.run.save(is_best)

    def evaluate_within_epoch(self) -> bool:
        """Evaluate and save a checkpoint if train.evaluate_every_steps asks for it before the end
        of the epoch. Return True if this step is such a step.
        """
        step_in_epoch = self.parts.progress.step_in_epoch
        is_due = self.is_evaluation_step() and 0 < step_in_epoch < self.parts.steps_per_epoch
        if is_due and self.parts.progress.evaluated_at != self.parts.progress.step:
            self.run.save(self.evaluate_val())
        return is_due

    def evaluate_val(self) -> bool:
        """Evaluate the weights on val, and log the result. Return True if it is the best result so
        far.
        """
        with self.parts.hooks.aside():
            return self.evaluate_split("val", may_stop=True)

    def is_evaluation_step(self) -> bool:
        """Return True if the number of steps so far is a multiple of train.evaluate_every_steps."""
        every = self.config.train.evaluate_every_steps
        return every is not None and self.parts.progress.step % every == 0

    def evaluate_at_end(self) -> None:
        """Evaluate the best weights on test, if the dataset has this split. Evaluate on val too, if
        no epoch did.
        """
        if "val" not in self.run.evaluations:
            self.evaluate_split("val")
        if "test" in self.parts.eval_loaders:
            self.run.load_best()
            self.evaluate_split("test")

    def evaluate_split(self, split: str, may_stop: bool = False) -> bool:
        """Evaluate raw and averaged weights on a split, over all ranks, and log the metrics. Return
        True if this is the best result on val so far.

        To log pictures of your own, call `self.run.image(name, pixels)` or `self.run.figure(name,
        figure)` here.
        """
        ema = self.state.ema
        raw = self.evaluate_weights(self.state.model, split, may_stop)
        averaged = None if ema is None else self.evaluate_weights(ema.module, split, may_stop)
        return self.run.log_evaluation(split, raw, averaged)

    def evaluate_weights(self, model: nn.Module, split: str, may_stop: bool) -> Evaluation:
        """Evaluate one set of weights (raw or averaged) on a split. With `may_stop`, a stop signal
        ends the evaluation and the process.
        """
        strategy, train = self.strategy, self.config.train
        strategy.buffers.share(model)
        autocast = Autocast(model, strategy.device.type, AUTOCAST[train.precision])
        evaluation = evaluate(
            strategy.for_evaluation(autocast),
            self.parts.eval_loaders[split],
            self.parts.task,
            strategy.group,
            should_stop=strategy.group.stop.stop_requested if may_stop else None,
            batches=self.run.eval_batches(split),
        )
        if evaluation is None:
            self.run.stop()
        return evaluation
