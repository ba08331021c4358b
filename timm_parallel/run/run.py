"""A training run on one rank: its steps, evaluations, logs, checkpoints and results.

All ranks must call each method, because most of them communicate. Only rank 0 writes files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from timm_parallel.app import current
from timm_parallel.config.compose import save_config
from timm_parallel.errors import NotFiniteError, RefusedError
from timm_parallel.faults.liveness import SAVING
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.files import RunFolder
from timm_parallel.machine.imports import import_name
from timm_parallel.machine.process import start_clock
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import Stopped, stop_handler
from timm_parallel.parallel.fully_sharded import LockstepNetworks
from timm_parallel.parallel.group import share_buffers
from timm_parallel.parallel.networks import LOSS, Networks
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.record.console import Console
from timm_parallel.record.recorder import SHOWN, Numbers, Recorder, grid_of
from timm_parallel.record.result import write_result
from timm_parallel.run import checkpoint, restoring
from timm_parallel.run.banner import describe_segments, show_banner, show_end
from timm_parallel.run.evaluation import Evaluation, evaluate
from timm_parallel.run.parts import RunParts, evaluation_networks
from timm_parallel.run.replica_checks import check_replicas_at_end, check_replicas_at_start
from timm_parallel.run.run_result import make_result, new_segment
from timm_parallel.run.step import MetricWindow, Step
from timm_parallel.task import Task

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


def start_run(
    config: ResolvedConfig, folder: Path, ranks: Ranks | None = None, store: Store | None = None
) -> Run:
    """Build a run on this rank, and continue from the newest checkpoint in the run folder, if there
    is one. All ranks must call this function.

    `ranks`, `store`: as in `build_strategy`. Raises RefusedError if data, model, optimizer or
    checkpoint do not fit the config.
    """
    # Seed every rank alike, so that every rank and every strategy starts from the same weights.
    torch.manual_seed(config.seed)
    try:
        strategy = build_strategy(config, ranks, store)
        return Run(import_name(current().build)(config, strategy), folder)
    # These errors mean that data, model, optimizer or checkpoint do not fit the config, so the user
    # must change it.
    except ValueError as error:
        raise RefusedError(str(error)) from error


class Run:
    """A training run that continues from its newest undamaged checkpoint, if it has one.

    The constructor raises ValueError if data, model, optimizer or checkpoint do not fit the config.
    """

    def __init__(self, parts: RunParts, folder: Path) -> None:
        self.parts, self.folder = parts, folder
        earlier, changed = self._resume()
        self.segments = [*earlier, new_segment(parts, folder, changed)]

    def _resume(self) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
        """Continue from the newest undamaged checkpoint. Return the earlier segments of the run,
        and the settings that have changed since; without a checkpoint, both are empty.
        """
        group = self.parts.strategy.group
        newest = checkpoint.load_newest(self.folder) if group.is_first else None
        if not group.gather(newest is not None)[0]:
            return [], {}
        replay = self.parts.train_loader.replay
        if replay is not None:
            raise ValueError(
                f"data.replay_batches={replay}: resume continues real training, which must not "
                "replay batches; start a new run, or leave data.replay_batches at null"
            )
        # Rank 0 sends its checkpoint to the other ranks.
        path, contents = newest or ("rank 0's checkpoint", None)
        contents = group.share_state(contents)
        changed = restoring.restore_run(self.parts, contents)
        log.info("resumed from %s, step %d", path, self.parts.progress.step)
        return contents["segments"], changed

    @contextmanager
    def training(self) -> Iterator[Training]:
        """Return the object with which a loop trains. All ranks must call this function.

        At the start of the block, all ranks are checked to have equal parameters, the settings are
        logged, and metrics.jsonl and the trackers are opened. At its end, the best weights are
        evaluated and result.json is written. Loader workers and files are closed also after an
        error.
        """
        parts, strategy = self.parts, self.parts.strategy
        with ExitStack() as on_close:
            for loader in (parts.train_loader, *parts.eval_loaders.values()):
                on_close.callback(loader.close)
            at_start = check_replicas_at_start(parts.state, strategy)
            # Save the config again if a resume has changed settings, and with the values that only
            # the ranks can choose, which were `auto` until here.
            attempts = describe_segments(self.segments)
            if strategy.group.is_first:
                save_config(parts.config, self.folder, attempts)
            show_banner(parts, self.folder)
            step = parts.progress.step
            with Console(strategy.group.is_first, parts.total_steps, step) as console:
                recorder = Recorder(parts.config, self.folder, strategy.group.is_first, step)
                on_close.callback(recorder.close)
                place = on_close.enter_context(closing(RunFolder(self.folder)))
                stop_handler.request = strategy.group.stop.request
                training = Training(self, recorder, console, place)
                try:
                    yield training
                    at_end = training._evaluate_at_end()
                except NotFiniteError as error:
                    raise NotFiniteError(
                        f"training stops: {error}; {training._describe_step(error.step)}",
                        error.step,
                    ) from None
            training._end(at_start, at_end)


class Training:
    """Argument of a training loop: `for step in training.steps(): training.log(step.train())`."""

    def __init__(self, run: Run, recorder: Recorder, console: Console, place: RunFolder) -> None:
        self.parts, self._folder, self._segments = run.parts, run.folder, run.segments
        self._place = place
        self._recorder, self._console = recorder, console
        self._config, self._strategy = run.parts.config, run.parts.strategy
        # Metrics and details of the newest evaluation of each split, for result.json. Values of the
        # averaged weights have names that end with `_ema`.
        self._results: dict[str, dict[str, Any]] = {}
        # Newest evaluation of the raw weights under the name of the split, and of the averaged
        # weights under `<split>_ema`.
        self._evaluations: dict[str, Evaluation] = {}
        self._saved_at = time.monotonic()
        # Seconds in steps since the last logged one.
        self._step_seconds = 0.0
        # Step that `log` has logged last.
        self._logged: int | None = None
        self._is_over = False
        # Step before the first one of the current epoch.
        self._epoch_began_at = 0

    # Steps of the loop.

    def steps(self) -> Iterator[Step]:
        """Yield the remaining optimizer steps of the run. Between two steps, evaluate, log and save
        where this is due, and end epochs.

        The steps end after train.epochs, train.max_steps or train.max_minutes, by train.early_stop,
        or by a stop signal, after which a checkpoint is saved and Stopped is raised. Raises
        RuntimeError if a loop left out a part of a step.
        """
        while not self._is_finished():
            yield from self._steps_of_epoch()
            self._end_epoch()
        self._is_over = True

    def _steps_of_epoch(self) -> Iterator[Step]:
        parts, progress = self.parts, self.parts.progress
        # An epoch with fewer steps than the checkpoint has trained would never end.
        if progress.step_in_epoch > parts.steps_per_epoch:
            raise RuntimeError(
                f"the checkpoint was saved at step {progress.step_in_epoch} of an epoch, but an "
                f"epoch now has {parts.steps_per_epoch} steps, because the training data changed"
            )
        if progress.step == 0:
            self._show_images()
        # A resumed run may have been stopped during an evaluation. Repeat this evaluation first.
        self._evaluate_within_epoch()
        start_clock.end("setup")
        self._epoch_began_at = progress.step - progress.step_in_epoch
        first = progress.step_in_epoch * self._config.train.accumulate
        batches = parts.train_loader.epoch(progress.epoch, first)
        window = MetricWindow(self._strategy.device, progress)
        self._train_mode()
        while progress.step_in_epoch < parts.steps_per_epoch and progress.step < parts.total_steps:
            began = time.perf_counter()
            step = Step(parts, batches, window)
            yield step
            self._check_is_whole(step)
            self._step_seconds += time.perf_counter() - began
            if step.is_logged or step._stops:
                self._count_seconds()
            if step.is_logged:
                if not self._evaluate_within_epoch():
                    self._save_if_due()
                elif self._stops_early:
                    return
                self._train_mode()
            if step._stops:
                if progress.step_in_epoch < parts.steps_per_epoch:
                    self._stop()
                return

    def _count_seconds(self) -> None:
        """Add the seconds of the steps since the last logged one to the progress. All ranks must
        call this function.
        """
        seconds = self._step_seconds
        # All ranks use the time of rank 0, because they must end at the same step.
        if self._config.train.max_minutes is not None:
            seconds = self._strategy.group.gather(seconds)[0]
        self.parts.progress.seconds += seconds
        self._step_seconds = 0.0

    def log(self, numbers: Mapping[str, float | None]) -> None:
        """Log the numbers of a step, and the speed since the last logged step. Numbers of a loop's
        own may be added to them. Without numbers, nothing is logged.
        """
        if not numbers:
            return
        parts, step = self.parts, self.parts.progress.step
        parts.telemetry.sample()
        meter = parts.hooks.meter
        speed = meter.recent()
        measured = {
            "train/images_per_sec": speed,
            "train/data_wait": meter.data_wait(),
        }
        self._recorder.numbers(step, self._epochs_done, {**numbers, **measured})
        self._console.step(step, numbers["train/loss"] or 0.0, speed)
        self._logged = step

    def image(self, name: str, image: Any) -> None:
        """Send an image to the trackers at the current step: a uint8 array [H, W, 3], a PIL image,
        or a matplotlib figure.
        """
        self._recorder.pictures(self.parts.progress.step, name, lambda: {"": image})

    @property
    def _epochs_done(self) -> float:
        return self.parts.progress.epochs_done(self.parts.steps_per_epoch)

    def _check_is_whole(self, step: Step) -> None:
        """Raise RuntimeError if a loop has left out a part of a step."""
        if not step._is_done:
            raise RuntimeError(
                f"train.loop: step {step.number} was not updated; call step.train(), or "
                "step.update(phase) for each phase"
            )
        if step.is_logged and self._logged != step.number:
            raise RuntimeError(
                f"train.loop: step {step.number} was not logged; call log(step.train()), or pass "
                "the numbers that the last step.update(phase) returns"
            )

    def _train_mode(self) -> None:
        for phase in self.parts.state.phases:
            phase.wrapped.train()

    # What is due at a step.

    def _is_finished(self) -> bool:
        """Return True if all steps or epochs are done, or train.early_stop ends the run."""
        progress = self.parts.progress
        return (
            (progress.step >= self.parts.total_steps and progress.ended_at == progress.step)
            or progress.epoch >= self._config.train.epochs
            or self._stops_early
        )

    @property
    def _stops_early(self) -> bool:
        """True if train.early_stop evaluations in a row did not improve checkpoint.metric."""
        patience = self._config.train.early_stop
        return patience is not None and self.parts.progress.evaluations_since_best >= patience

    def _is_evaluation_step(self) -> bool:
        every = self._config.train.evaluate_every_steps
        return every is not None and self.parts.progress.step % every == 0

    def _evaluate_within_epoch(self) -> bool:
        """Evaluate and save a checkpoint if train.evaluate_every_steps asks for it before the end
        of the epoch. Return True if this step is such a step.
        """
        progress = self.parts.progress
        is_due = self._is_evaluation_step()
        is_due &= 0 < progress.step_in_epoch < self.parts.steps_per_epoch
        if is_due and progress.evaluated_at != progress.step:
            self._save(self._evaluate_val())
        return is_due

    def _end_epoch(self) -> None:
        """Finish an epoch: evaluate if an evaluation is due, log the epoch with the peak memory,
        and save a checkpoint.
        """
        parts, progress, train = self.parts, self.parts.progress, self._config.train
        is_due = bool(train.evaluate_every) and (progress.epoch + 1) % train.evaluate_every == 0
        is_due |= progress.step >= parts.total_steps
        is_due |= self._is_evaluation_step()
        is_best = False
        if is_due and progress.evaluated_at != progress.step:
            is_best = self._evaluate_val()
        # A run that was resumed at its last step has no numbers of this step. It evaluates at its
        # end.
        val = self._results.get("val", {}) if is_due else {}
        number = progress.epoch + 1
        progress.end_epoch(is_whole=progress.step_in_epoch == parts.steps_per_epoch)
        memory = parts.telemetry.memory()
        self._recorder.memory(progress.step, self._epochs_done, memory)
        self._recorder.epoch(number, train.epochs, progress.epoch_means, val)
        self._save(is_best)

    def _show_images(self) -> None:
        """Send the augmented images of the first training batch to the trackers."""
        if self._recorder.enabled:
            loader = self.parts.train_loader
            prefetcher = loader.prefetcher
            images = loader.peek(SHOWN).image
            mean, std = prefetcher.mean, prefetcher.std
            self._recorder.pictures(0, "train/images", lambda: {"": grid_of(images, mean, std)})

    # Evaluation.

    def _evaluate_val(self) -> bool:
        """Evaluate on val, and log the result. Return True if it is the best one so far."""
        with self.parts.hooks.aside():
            return self._evaluate("val", may_stop=True)

    def _evaluate(self, split: str, may_stop: bool = False) -> bool:
        """Evaluate the raw and the averaged weights on a split, over all ranks, and log the
        metrics. With `may_stop`, a stop signal ends the evaluation and the process.

        Returns True if this is the best result on val so far.
        """
        state, strategy = self.parts.state, self._strategy
        # The buffers of a loss are constants, or equal on all ranks.
        for name, module in state.modules.items():
            if name != LOSS:
                share_buffers(module, strategy.group, strategy.config.dist_bn == "reduce")
        networks = evaluation_networks(state.evaluated(), self._config, strategy)
        raw, averaged = self._evaluate_networks(networks, split, may_stop), None
        if split == "val" and type(self.parts.task).pictures is not Task.pictures:
            self._draw_pictures(networks)
        if state.ema is not None:
            of_average = state.evaluated(averaged=True)
            networks = evaluation_networks(of_average, self._config, strategy)
            averaged = self._evaluate_networks(networks, split, may_stop)
        return self._log_evaluation(split, raw, averaged)

    def _evaluate_networks(self, networks: Networks, split: str, may_stop: bool) -> Evaluation:
        loader, stop = self.parts.eval_loaders[split], self._strategy.group.stop
        evaluation = evaluate(
            networks,
            loader,
            self.parts.task,
            self._strategy.group,
            should_stop=stop.stop_requested if may_stop else None,
            batches=self._console.counted(split, loader, len(loader.sampler)),
        )
        if evaluation is None:
            self._stop()
        return evaluation

    def _log_evaluation(self, split: str, raw: Evaluation, averaged: Evaluation | None) -> bool:
        """Log the evaluation of a split, and keep it for result.json. Return True if this is the
        best one on val so far.
        """
        parts, progress = self.parts, self.parts.progress
        numbers, is_best = dict(raw.numbers), False
        if averaged is not None:
            numbers |= {f"{name}_ema": value for name, value in averaged.numbers.items()}
            self._evaluations[f"{split}_ema"] = averaged
        if split == "val":
            metric = self._config.checkpoint.metric.removeprefix("val/")
            is_best = progress.add_evaluation(numbers, metric, parts.task.metrics)
            for phase in parts.state.phases:
                schedule = phase.learning.schedule
                if hasattr(schedule, "observe"):
                    schedule.observe(numbers)
                    # Let the next step have the new learning rate, as after a resume.
                    schedule.step_update(progress.schedule_step(parts.steps_per_epoch))
            best: Numbers = {f"{name}_best": value for name, value in progress.best_values.items()}
            numbers = numbers | best
        self._results[split], self._evaluations[split] = numbers | parts.task.details(raw), raw
        values = {f"{split}/{name}": value for name, value in numbers.items()}
        self._recorder.numbers(progress.step, self._epochs_done, values)
        return is_best

    def _draw_pictures(self, networks: Networks) -> None:
        """Send the pictures that the task makes with its networks to the trackers."""
        with torch.no_grad():
            pictures = self.parts.task.pictures(networks)
        if isinstance(networks, LockstepNetworks):
            networks.finish()
        for name, picture in pictures.items():
            self.image(name, picture)

    # Checkpoints and the end of the run.

    def _save_if_due(self) -> None:
        """Save a checkpoint if checkpoint.every_steps or checkpoint.every_minutes asks for one now.

        Does nothing after the last step of an epoch, because a checkpoint is always saved there.
        """
        config, progress = self._config.checkpoint, self.parts.progress
        due = config.every_steps is not None and progress.step % config.every_steps == 0
        if not due and config.every_minutes is not None:
            seconds = time.monotonic() - self._saved_at
            # All ranks use the decision of rank 0, because their clocks differ and they must save
            # at the same step.
            due = self._strategy.group.gather(seconds > 60 * config.every_minutes)[0]
        if due and progress.step_in_epoch < self.parts.steps_per_epoch:
            self._save()

    def _save(self, is_best: bool = False) -> None:
        """Save the checkpoint last.pt, and best.pt if `is_best`.

        A run that replays batches saves nothing. Raises NotFiniteError if a weight is not finite.
        """
        if self.parts.train_loader.replay is not None:
            return
        self._saved_at = time.monotonic()
        with self.parts.hooks.aside(SAVING):
            contents = restoring.checkpoint_of(self.parts, self._segments)
            if self._strategy.group.is_first:
                # A folder of this name may now belong to another run.
                if problem := self._place.problem():
                    raise OSError(problem)
                folder, keep = self._folder / "checkpoints", self._config.checkpoint.keep
                checkpoint.save(folder, contents, self.parts.progress.step, keep, is_best)

    def _stop(self) -> NoReturn:
        """Save a checkpoint and end the run after a stop signal. This works after any step, also
        between two logged steps.
        """
        self._save()
        number = self._strategy.group.stop.signal
        assert number is not None
        if self.parts.train_loader.replay is None:
            log.info("saved at step %d", self.parts.progress.step)
        raise Stopped(number)

    def _evaluate_at_end(self) -> tuple[str, list[str]]:
        """Evaluate the best weights on test, if the dataset has this split. Evaluate on val too, if
        no epoch did. Raises RuntimeError if the loop has not taken all steps.

        Returns the comparison of the ranks' weights after the last step.
        """
        if not self._is_over:
            raise RuntimeError("train.loop: the loop ended before steps() did; take all steps")
        if "val" not in self._results:
            self._evaluate("val")
        # Compare the weights before the best ones are loaded, which are equal on all ranks.
        at_end = check_replicas_at_end(self.parts.state, self._strategy)
        if "test" in self.parts.eval_loaders:
            self._load_best()
            self._evaluate("test")
        return at_end

    def _load_best(self) -> None:
        """Load the weights of best.pt, which rank 0 sends to the other ranks, if it exists."""
        group, best = self._strategy.group, self._folder / "checkpoints" / "best.pt"
        if group.gather(best.exists())[0]:
            contents = group.share_state(checkpoint.load(best) if group.is_first else None)
            restoring.restore_weights(self.parts.state, contents)

    def _end(self, at_start: tuple[int, str], at_end: tuple[str, list[str]]) -> None:
        """Write result.json, end the trackers, log the results, and leave the process group.

        `at_start`, `at_end`: results of the comparisons of parameters at the start and at the end.
        """
        parts, group = self.parts, self._strategy.group
        result = make_result(parts, self._folder, self._results, self._segments, at_start, at_end)
        for name, evaluation in self._evaluations.items():
            self._recorder.pictures(result.steps, name, partial(parts.task.draw, evaluation))
        views = self._recorder.end(result)
        if group.is_first:
            write_result(self._folder, result)
            show_end(parts, self._folder, result, views)
        self._recorder.close()
        group.barrier()
        group.close()

    def _describe_step(self, step: int) -> str:
        """Describe which images a failed step has read, and which checkpoint is the last good one.

        The indices of all these images are logged.
        """
        per_step, loader = self._config.train.accumulate, self.parts.train_loader
        first = (step - 1 - self._epoch_began_at) * per_step
        indices = loader.fetcher.numbers(loader.sampler.global_batches(first, per_step))
        log.error("training images of step %d, by index: %s", step, indices)
        good = "there is no checkpoint yet"
        # Load the file, because a checkpoint that is damaged or not finite is not a good one.
        with suppress(ValueError):
            if (newest := checkpoint.load_newest(self._folder)) is not None:
                good = f"the last good checkpoint is {newest[0]}"
        shown = ", ".join(map(str, indices[:8]))
        return f"it read the training images {shown} … (all in the log); {good}"
