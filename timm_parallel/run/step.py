"""One optimizer step: its batches, the backward pass of each phase, the update, and the losses and
numbers, which stay on the device until they are logged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from timm_parallel.batch import Batch
from timm_parallel.errors import NotFiniteError
from timm_parallel.faults.liveness import BACKWARD, FORWARD, READING, liveness
from timm_parallel.machine.seeds import seed_for
from timm_parallel.metric import to_double
from timm_parallel.model.freeze import check_statistics_move, write_counts
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.networks import Networks
from timm_parallel.parallel.strategy import whole
from timm_parallel.run.parts import Phase, RunParts, require_gradients
from timm_parallel.run.progress import Progress
from timm_parallel.task import Task

# Name of the loss, and start of the names of the losses of several phases.
LOSS = "loss"


class MetricWindow:
    """Losses and numbers of each training step since the last logged step, summed over images.

    The sums stay on the device until `fetch` adds them to those in the progress of the run, which a
    checkpoint stores.
    """

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._names: tuple[str, ...] = ()
        # Rows of each step. The key is the phase with the names of its values.
        self._steps: dict[int, dict[tuple[str, tuple[str, ...]], Tensor]] = {}
        self._images: dict[int, int] = {}

    def add(self, step: int, part: str, values: dict[str, Tensor], images: int) -> None:
        """Add the values of one batch to the sums of its step.

        `part`: name of the phase; each phase adds its own values for each batch. `values`: means
        over the `images` images of the batch.
        """
        row = torch.stack(
            [value.to(self._device, torch.float32, non_blocking=True) for value in values.values()]
        )
        row = row * images
        rows = self._steps.setdefault(step, {})
        key = part, tuple(values)
        rows[key] = rows[key] + row if key in rows else row

    def add_images(self, step: int, images: int) -> None:
        """Count the images of one batch of a step."""
        self._images[step] = self._images.get(step, 0) + images

    def fetch(self, group: ProcessGroup, is_logged: bool) -> dict[str, float]:
        """Sum the values of the steps since the last call over all ranks. At a logged step, return
        the means since the last logged one, and start the sums again. Otherwise return nothing.

        Raises ValueError if a phase returned other numbers than in an earlier step, and
        NotFiniteError for a loss that is not finite. All ranks must call this function.
        """
        names = self._check_names()
        local = torch.stack([torch.cat([*rows.values()]) for rows in self._steps.values()])
        images = torch.tensor(list(self._images.values()), dtype=torch.float32, device=self._device)
        table = group.sum(torch.cat([local, images[:, None]], 1)).tolist()
        for index, (step, row) in enumerate(zip(self._steps, table, strict=True)):
            for column, name in enumerate(names):
                if name.startswith(LOSS) and not math.isfinite(row[column]):
                    finite = group.gather(bool(local[index, column].isfinite()))
                    ranks = ", ".join(
                        str(rank) for rank, is_finite in enumerate(finite) if not is_finite
                    )
                    raise NotFiniteError(
                        f"the {name} is {row[column]} at step {step} (rank {ranks})", step
                    )
        self._steps, self._images = {}, {}
        progress = self._progress
        # Add one step at a time, so that stopping and resuming between two steps does not change
        # the rounding.
        for row in table:
            _add(progress.window_sums, _with_loss(dict(zip(names, row, strict=False))))
            progress.window_images += int(row[-1])
        if not is_logged:
            return {}
        sums, count = progress.window_sums, progress.window_images
        _add(progress.epoch_sums, sums)
        progress.epoch_images += count
        progress.window_sums, progress.window_images = {}, 0
        return {name: value / count for name, value in sums.items()}

    def _check_names(self) -> tuple[str, ...]:
        for rows in self._steps.values():
            names = tuple(name for _, of_part in rows for name in of_part)
            if len(set(names)) < len(names) or self._names not in ((), names):
                now, before = (", ".join(each) or "none" for each in (names, self._names))
                raise ValueError(
                    "losses() must return the same numbers for each batch, with different names in "
                    f"each phase; the names are {now}" + (f"; before: {before}" if before else "")
                )
            self._names = names
        return self._names


def _add(sums: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _with_loss(sums: dict[str, float]) -> dict[str, float]:
    """Add the loss of a step, which is the sum of the losses of its phases."""
    of_phases = [value for name, value in sums.items() if name.startswith(f"{LOSS}_")]
    return sums if LOSS in sums else {LOSS: sum(of_phases), **sums}


# Draws of the phases start at multiples of this number, so that each phase has its own.
DRAWS_PER_PHASE = 2**16


class Step:
    """An optimizer step of all phases.

    `train()` is what most runs do. A loop of a project may do the same in parts: for each phase,
    `backward(batch, phase)` for each batch of `batches()`, then `update(phase)`.
    """

    def __init__(self, parts: RunParts, batches: Iterator[Batch], window: MetricWindow) -> None:
        """Start the step after the last one, and seed the random generators of the devices for it.
        `batches`: the remaining batches of the epoch.
        """
        self.parts, self.number = parts, parts.progress.step + 1
        # True at a step that logs, saves or evaluates, or is the last one of its epoch.
        self.is_logged = _is_logged(parts, self.number)
        self._source, self._window = batches, window
        self._accumulate, self._strategy = parts.config.train.accumulate, parts.strategy
        self._phases = {phase.name: phase for phase in parts.state.phases}
        self._has_weight = type(parts.task).weight is not Task.weight
        self._read: list[Batch] = []
        # Sum of the weights of all batches of the step over all ranks.
        self._total: Tensor | None = None
        # Number of backward passes of each phase since its last update.
        self._backward = dict.fromkeys(self._phases, 0)
        self._updated: list[str] = []
        # True while an optimizer computes the losses of the step again, which are not logged.
        self._computes_again = False
        self._numbers: dict[str, float | None] = {}
        # Norm of the gradients of each phase before clipping, at a logged step.
        self._norms: dict[str, Tensor] = {}
        # True after the step if the run must stop, because it received a stop signal.
        self._stops = False
        # In the first step of an epoch, how often its frozen modules had been written before.
        is_first = parts.progress.step_in_epoch == 0
        self._frozen = parts.state.phases[0].step.frozen
        self._written = write_counts(self._frozen) if is_first else None
        liveness.step = self.number
        self._seed()

    def train(self) -> dict[str, float | None]:
        """Train all phases on the batches of this step. All ranks must call this function.

        Returns the numbers to log: means since the last logged step, as `train/<name>`, learning
        rates and norms of gradients. The dictionary is empty at a step that is not logged, because
        reading the numbers waits for the device. Raises NotFiniteError on all ranks at the same
        step if a loss is not finite.
        """
        for name, phase in self._phases.items():
            if not needs_closure(phase):
                for batch in self.batches():
                    self.backward(batch, name)
            self.update(name)
        return self._numbers

    def batches(self) -> Iterator[Batch]:
        """Yield the train.accumulate batches of the step. They are read once, also if this function
        is called for several phases.
        """
        if self._has_weight and not self._read:
            self._read = [self._fetch() for _ in range(self._accumulate)]
            weights = [torch.as_tensor(self.parts.task.weight(batch)) for batch in self._read]
            device = self._strategy.device
            own = torch.stack([to_double(weight.to(device)) for weight in weights]).sum()
            total = self._strategy.group.sum(own)
            self._total = torch.where(total == 0, 1.0, total).float()
        if self._read:
            yield from self._read
            return
        keeps = len(self._phases) > 1 or any(map(needs_closure, self._phases.values()))
        for _ in range(self._accumulate):
            batch = self._fetch()
            yield batch
            if keeps:
                self._read.append(batch)

    def backward(self, batch: Batch, phase: str = "train") -> Tensor:
        """Compute the losses of a batch in a phase, and add the gradients of their mean over the
        whole optimizer step. Return the loss, a detached scalar on the device.
        """
        of_phase = self._phases[phase]
        if self._backward[phase] == 0 and len(self._phases) > 1:
            trained = {name: each.parameters for name, each in self._phases.items()}
            require_gradients(trained, phase, self._strategy)
        self._backward[phase] += 1
        # Skip the synchronization of gradients until the last batch of the step, because the ranks
        # need only the sum over these batches.
        is_last = self._backward[phase] == self._accumulate
        batch.draws = DRAWS_PER_PHASE * list(self._phases).index(phase)
        with nullcontext() if is_last else self._strategy.skip_sync(of_phase.wrapped):
            losses, values = of_phase.wrapped(batch)
            if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != len(batch)):
                raise ValueError(
                    f"train.task: losses() returned a tensor {list(losses.shape)} for a batch of "
                    f"{len(batch)}; return the loss of each sample [{len(batch)}], or their mean"
                )
            loss, scaled = self._means(losses, batch)
            self.parts.hooks.at(BACKWARD)
            (scaled if of_phase.scaler is None else of_phase.scaler.scale(scaled)).backward()
        if not self._computes_again:
            name = LOSS if len(self._phases) == 1 else f"{LOSS}_{phase}"
            numbers = {key: value.detach().float().mean() for key, value in values.items()}
            self._window.add(self.number, phase, {name: loss.detach(), **numbers}, len(batch))
            if phase == next(iter(self._phases)):
                self._window.add_images(self.number, len(batch))
        return loss.detach()

    def _means(self, losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return two scalars: the loss of a batch for the log, whose mean over all batches of the
        step is the loss of the step, and the tensor to differentiate. The strategy averages its
        gradients over ranks, and those of batches add up.
        """
        if self._total is not None:
            weight = torch.as_tensor(self.parts.task.weight(batch), device=losses.device)
            own = losses * weight if losses.ndim == 0 else losses.sum()
            share = own * (self._strategy.group.world_size / self._total.to(losses.device))
            return share * self._accumulate, share
        mean = losses if losses.ndim == 0 else losses.sum() / len(batch)
        return mean, mean / self._accumulate if self._accumulate > 1 else mean

    def update(self, phase: str = "train") -> dict[str, float | None]:
        """Let the optimizer of a phase change its parameters. After the last phase, update averages
        and learning rates too, and return the numbers to log, as `train` does.

        Raises RuntimeError if the loop has not called `backward` for all batches. All ranks must
        call this function.
        """
        of_phase, hooks = self._phases[phase], self.parts.hooks
        if needs_closure(of_phase):
            self._step_with_closure(of_phase)
        else:
            self._check_batches(phase)
            hooks.start_update()
            self._strategy.start_update()
            self._clip(of_phase)
            if of_phase.scaler is not None:
                # The scaler skips a step whose gradients overflowed. All ranks have the same
                # averaged gradients, so all of them skip the step.
                of_phase.scaler.step(of_phase.optimizer)
                of_phase.scaler.update()
            else:
                of_phase.optimizer.step()
        # Set gradients to None instead of 0. The next backward pass then writes the gradients,
        # which is faster than adding to zeros. Other phases may have got gradients under fsdp.
        for each in self._phases.values():
            each.optimizer.zero_grad(set_to_none=True)
        self._backward[phase] = 0
        self._updated.append(phase)
        if self._is_done:
            self._finish()
        return self._numbers

    def _check_batches(self, phase: str) -> None:
        if self._backward[phase] != self._accumulate:
            raise RuntimeError(
                f"train.accumulate={self._accumulate}: the training loop called backward for "
                f"{self._backward[phase]} batches in step {self.number}; it must do so for each "
                "batch of step.batches()"
            )

    def _step_with_closure(self, phase: Phase) -> None:
        """Step an optimizer that computes the loss several times. Each time has the same draws."""
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            phase.optimizer.zero_grad(set_to_none=True)
            if calls:
                self._seed()
            self._computes_again = calls > 0
            self._backward[phase.name] = 0
            calls += 1
            with torch.enable_grad():
                losses = [self.backward(batch, phase.name) for batch in self.batches()]
            self._strategy.start_update()
            self._clip(phase)
            return torch.stack(losses).mean()

        phase.optimizer.step(closure)  # type: ignore[arg-type]
        if not calls:
            raise RuntimeError(
                f"optim.opt: {type(phase.optimizer).__name__} declares needs_closure, but its step "
                "did not call the closure"
            )
        self._computes_again = False
        self.parts.hooks.start_update()

    def _clip(self, phase: Phase) -> None:
        """Clip the gradients of a phase, and note their norm before clipping at a logged step."""
        clip = phase.learning.clip
        if clip is None and not self.is_logged:
            return
        # With fp16, remove the loss scale from the gradients, because clipping and the logged norm
        # need unscaled ones.
        if phase.scaler is not None:
            phase.scaler.unscale_(phase.optimizer)
        if self.is_logged:
            gradients = [p.grad for p in phase.parameters.values() if p.grad is not None]
            norm = whole(nn.utils.get_total_norm(gradients))
            self._norms[phase.name] = norm
        if clip is not None:
            clip()

    def _finish(self) -> None:
        """Update averages and schedules after all phases, and fetch the numbers of a logged
        step.
        """
        parts, progress, state = self.parts, self.parts.progress, self.parts.state
        self._strategy.after_step(self.number)
        # Average after the strategy's own update, which may change weights, so that all ranks
        # average equal weights.
        for average, source in state.averages.values():
            average.update(state.networks[source], self.number)
        if type(parts.task).after_step is not Task.after_step:
            with torch.no_grad():
                parts.task.after_step(Networks(state.modules), parts.task.ranks)
        if self._written is not None:
            check_statistics_move(self._written, write_counts(self._frozen))
        progress.step, progress.step_in_epoch = self.number, progress.step_in_epoch + 1
        self._stops = parts.hooks.end_step()
        means: dict[str, float] = {}
        if self.is_logged or self._stops:
            means = self._window.fetch(self._strategy.group, self.is_logged)
            parts.hooks.meter.synchronized()
        self._numbers = {f"train/{name}": mean for name, mean in means.items()}
        # There are norms only at a logged step.
        for name, norm in self._norms.items():
            suffix = "" if len(self._phases) == 1 else f"_{name}"
            groups = self._phases[name].optimizer.param_groups
            self._numbers[f"lr{suffix}"] = max(float(group["lr"]) for group in groups)
            self._numbers[f"train/grad_norm{suffix}"] = norm.item()
        for phase in self._phases.values():
            phase.learning.schedule.step_update(progress.schedule_step(parts.steps_per_epoch))

    @property
    def _is_done(self) -> bool:
        """True if all phases were updated."""
        return len(self._updated) == len(self._phases)

    def _seed(self) -> None:
        group = self._strategy.group
        seed_step(self.parts.config.seed, self.number, group.rank, self._strategy.devices)

    def _fetch(self) -> Batch:
        """Return the next batch, with mixup or cutmix if configured, and measure how long the
        device waits.
        """
        parts, progress = self.parts, self.parts.progress
        parts.hooks.at(READING)
        batch = next(self._source)
        parts.hooks.at(FORWARD)
        if parts.mixing is not None:
            batch = parts.mixing(batch)
        batch.share = progress.step / parts.total_steps
        return batch


def _is_logged(parts: RunParts, step: int) -> bool:
    """Return True if the next step, whose number is `step`, logs, saves or evaluates, or is the
    last one of its epoch.
    """
    config = parts.config
    periods = (
        config.train.log_every,
        config.checkpoint.every_steps,
        config.train.evaluate_every_steps,
    )
    is_last = parts.progress.step_in_epoch + 1 == parts.steps_per_epoch
    is_last |= step == config.train.max_steps
    return is_last or any(step % period == 0 for period in periods if period is not None)


def needs_closure(phase: Phase) -> bool:
    """Return True if the optimizer of a phase computes the loss several times in a step."""
    return bool(getattr(phase.optimizer, "needs_closure", False))


def seed_step(seed: int, step: int, rank: int, devices: Sequence[torch.device]) -> None:
    """Seed the random generators of all devices of this process before a training step.

    The seeds depend on the run's seed, the step, the rank and the index of the device.
    """
    # A resumed run then draws the same numbers for dropout and drop path, although its checkpoints
    # store no random states. The replicas of dp on a CPU run in threads that share one generator.
    seeds = [seed_for(seed, step, rank, index) for index in range(len(devices))]
    torch.default_generator.manual_seed(seeds[0])
    for device, device_seed in zip(devices, seeds, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(device_seed)
        elif device.type == "mps":
            torch.mps.manual_seed(device_seed)
