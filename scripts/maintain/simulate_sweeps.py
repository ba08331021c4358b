"""Simulate sweeps whose true results are known, and count the false statements of their reports:
`python scripts/maintain/simulate_sweeps.py`.

The script passes invented run records to the functions that write a report. It prints a Markdown
table with a row for each kind of sweep. Optional arguments are `[sweeps] [processes] [part of a
row's name]`, by default 1000 sweeps, 2 processes and all rows. Biases are in standard errors of the
mean of a setting. They are positive if the report states too good a value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timm_parallel.lab.analysis.groups import with_contrasts
from timm_parallel.lab.analysis.headline import recommend
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.metric import metric_name

Array = np.ndarray
MISSING, FAILED, DIVERGED = "waiting", "failed", "not_finite"
ACCURACY, SEED_NOISE, NOISE = 0.7, 0.005, 0.01
LOSS, LOSS_NOISE, DIVERGED_LOSS = 0.3, 0.05, 2.3


@dataclass(frozen=True)
class Sweep:
    """Simulated results of a sweep, for each setting, fold and seed, and the true values of the
    settings.
    """

    # Results of the runs: settings × folds × seeds.
    values: Array
    # Expected value of each setting. None: it is equal for all settings, and estimated by the mean
    # over many sweeps.
    truth: Array | None
    # Standard error of the mean of a setting with ordinary noise.
    error: float
    # Status of the runs without a result: dictionary from the index of a run in `values` to its
    # status.
    status: Mapping[tuple[int, ...], str]
    metric: str = "val/acc"
    # Number of images that a run evaluates.
    samples: int | None = None

    @property
    def sign(self) -> int:
        return -1 if self.metric == "val/loss" else 1

    def records(self) -> list[RunRecord]:
        runs = []
        for place, value in np.ndenumerate(self.values):
            setting, fold, seed = place
            config = {
                "optim.lr": setting,
                "seed": seed,
                "data.fold": fold,
                "checkpoint.metric": self.metric,
            }
            status = self.status.get(place, "done")
            result = {
                self.metric.replace("/", "."): float(value),
                f"metrics.{metric_name(self.metric)}.lower_is_better": self.sign < 0,
                f"metrics.{metric_name(self.metric)}.is_proportion": self.sign > 0,
                "val.samples": self.samples,
            }
            runs.append(
                RunRecord(
                    name=f"{setting}_{fold}_{seed}",
                    folder=Path(str(setting)),
                    status=status,
                    block=fold * self.values.shape[2] + seed,
                    overrides=(f"optim.lr={setting}",),
                    result=result if status == "done" else {},
                    config=config if status != MISSING else {},
                )
            )
        return runs


@dataclass(frozen=True)
class Verdict:
    """Statements of the report about one simulated sweep, compared with the truth."""

    # True if the report names a setting that is better than the baseline.
    named: bool
    # True if the named setting is not better in truth.
    falsely_named: bool
    # True if an interval, the named setting, or the list of possibly best settings is false.
    any_false: bool
    # Stated value of the headline result minus its true value.
    stated: float
    # Plain mean of the setting of the headline result minus its true value.
    plain: float
    # Stated difference from the baseline minus the true one; NaN if no setting is named.
    difference: float
    # 1 if the interval of the difference contains the true one, else 0; NaN if none is named.
    covered: float
    # 1 if the interval of the stated value contains the true one, else 0; NaN without an interval.
    value_covered: float
    # Share of the intervals of differences that contain the true difference; NaN without intervals.
    all_covered: float
    # Mean of all values of the sweep. It is computed only if the true value is estimated by the
    # mean over many sweeps, else it is 0.
    level: float


def judge(sweep: Sweep) -> Verdict:
    """Build the headline result and the comparisons of a simulated sweep with the functions that
    write reports. Return how they differ from the true values.
    """
    [group] = with_contrasts(setting_groups(sweep.records()))
    lead = recommend(group)
    truth = np.zeros(len(sweep.values)) if sweep.truth is None else sweep.truth

    def true(label: str) -> float:
        return float(truth[int(label.partition("=")[2])])

    false = False
    inside = []
    for contrast in group.contrasts:
        between = true(contrast.a) - true(contrast.b)
        low, high = contrast.interval
        false |= (low > 0 and between <= 0) or (high < 0 and between >= 0)
        if contrast.low is not None:
            inside.append(low <= between <= high)
    best_value = float(max(sweep.sign * truth))
    named = lead.point is not None and lead.point != group.baseline
    falsely = named and sweep.sign * (true(str(lead.point)) - true(group.baseline)) <= 0
    if lead.point == group.baseline:
        falsely |= best_value > sweep.sign * true(group.baseline)
    best = {s.label for s in group.alive if math.isclose(sweep.sign * true(s.label), best_value)}
    false |= not best & group.may_be_best
    chosen = lead.point or group.highest
    of_page, mean = true(chosen), group.named(chosen).mean
    assert mean is not None
    stated = math.nan if lead.value is None else lead.value - of_page
    difference = covered = math.nan
    if named and lead.contrast is not None and lead.contrast.effect is not None:
        of_pair = of_page - true(group.baseline)
        difference = sweep.sign * (lead.contrast.effect - of_pair) / sweep.error
        covered = float(lead.contrast.interval[0] <= of_pair <= lead.contrast.interval[1])
    scale = sweep.sign / sweep.error
    value_covered = math.nan
    if lead.value_interval is not None and sweep.truth is not None:
        value_covered = float(lead.value_interval[0] <= of_page <= lead.value_interval[1])
    level = float(sweep.values.mean()) * scale if sweep.truth is None else 0.0
    errors = (stated * scale, (mean - of_page) * scale, difference)
    all_covered = float(np.mean(inside)) if inside else math.nan
    return Verdict(
        named, falsely, false or falsely, *errors, covered, value_covered, all_covered, level
    )


# Functions that simulate a sweep from a random generator.
Make = Callable[[np.random.Generator], Sweep]


def blocks_of_seeds(
    draw: np.random.Generator,
    advantages: Sequence[float],
    seeds: int,
    spread: Sequence[float] | None = None,
    shared: float = SEED_NOISE,
    noise: Callable[..., Array] | None = None,
) -> Sweep:
    """Simulate the accuracy of settings in several seeds. All settings share the noise of a seed,
    and each run has its own noise.

    `advantages`: true advantage of each setting, in standard errors. `spread`: factor of each
    setting's noise.
    """
    count, error = len(advantages), NOISE / math.sqrt(seeds)
    truth = ACCURACY + np.array(advantages) * error
    common = draw.standard_normal(seeds) * shared
    # Subtract the mean of the shared noise, so that it does not change the distance of a setting
    # from its true value.
    own = (
        (noise or draw.standard_normal)((count, seeds))
        * NOISE
        * np.array(spread or [1] * count)[:, None]
    )
    values = truth[:, None] + (common - common.mean()) + own
    return Sweep(values[:, None, :], truth, error, {})


def unlike_noise(
    draw: np.random.Generator, spread: Sequence[float], seeds: int = 5, winner: float = 0
) -> Sweep:
    return blocks_of_seeds(draw, [0] * (len(spread) - 1) + [winner], seeds, spread)


def lost_runs(
    draw: np.random.Generator,
    share: float = 0,
    worst: int = 0,
    status: str = FAILED,
    shared: float = SEED_NOISE,
) -> Sweep:
    """Simulate a sweep of equally good settings in which some runs have no result. These runs are
    chosen at random, or they are the worst seeds of settings 0, 2, 4, 6 and 8.
    """
    sweep = blocks_of_seeds(draw, [0] * 10, 5, shared=shared)
    lost = {place for place in np.ndindex(sweep.values.shape) if draw.random() < share}
    for setting in range(0, 10, 2):
        lost |= {(setting, 0, int(seed)) for seed in np.argsort(sweep.values[setting, 0])[:worst]}
    return replace(sweep, status=dict.fromkeys(lost, status))


def few_seeds(draw: np.random.Generator, lost: Mapping[int, Sequence[int]]) -> Sweep:
    """Simulate a sweep of equally good settings of which some have fewer seeds. `lost`: dictionary
    from setting to the seeds that have not run.
    """
    places = [(setting, 0, seed) for setting, seeds in lost.items() for seed in seeds]
    return replace(blocks_of_seeds(draw, [0] * 10, 5), status=dict.fromkeys(places, MISSING))


def binomial(
    draw: np.random.Generator,
    count: int,
    seeds: int,
    images: int,
    accuracy: float,
    winner: float = 0,
    spread: float = 0,
) -> Sweep:
    """Simulate accuracies as binomial counts of correct images, on new images for each run.
    `spread`: standard deviation of the logit between seeds.
    """
    error = math.sqrt(accuracy * (1 - accuracy) / images / seeds)
    truth = np.full(count, accuracy)
    truth[-1] += winner * error
    logit = np.log(truth / (1 - truth))[:, None] + draw.standard_normal(seeds) * spread
    values = draw.binomial(images, 1 / (1 + np.exp(-logit)), (count, seeds)) / images
    return Sweep(values[:, None, :], None if spread else truth, error, {}, samples=images)


def rounded(
    draw: np.random.Generator, count: int, seeds: int, noise: float, images: int = 270
) -> Sweep:
    """Simulate accuracy on a few fixed images. `noise`: standard deviation of the number of images
    that a run gets right.
    """
    truth = np.full(count, 0.95)
    values = (
        np.round(truth[:, None] * images + noise * draw.standard_normal((count, seeds))) / images
    )
    return Sweep(values[:, None, :], None, noise / images / math.sqrt(seeds), {}, samples=images)


def losses(
    draw: np.random.Generator, winner: float = 0, diverged: Sequence[int] = (), rate: float = 0
) -> Sweep:
    """Simulate losses with relative noise. The last but one setting may be better than the others.
    A seed may diverge, in the given settings or at random.
    """
    error = LOSS * LOSS_NOISE / math.sqrt(5)
    truth = np.full(10, LOSS)
    truth[8] -= winner * error
    values = truth[:, None] * np.exp(LOSS_NOISE * draw.standard_normal((10, 5)) - LOSS_NOISE**2 / 2)
    for setting in diverged:
        values[setting, 2] = DIVERGED_LOSS
    if rate:
        values[draw.random((10, 5)) < rate] = DIVERGED_LOSS
        truth = (1 - rate) * truth + rate * DIVERGED_LOSS
        error = math.hypot(error, math.sqrt(rate * (1 - rate) / 5) * (DIVERGED_LOSS - LOSS))
    return Sweep(values[:, None, :], truth, error, {}, metric="val/loss")


def heavy_tailed(draw: np.random.Generator, rate: float = 0) -> Sweep:
    """Simulate a sweep of equally good settings with Student's t noise of 3 degrees of freedom, or
    with a share of runs that are 10 standard deviations off.
    """

    def noise(shape: tuple[int, ...]) -> Array:
        if rate:
            return draw.standard_normal(shape) + 10 * (draw.random(shape) < rate) * draw.choice(
                [-1, 1], shape
            )
        return draw.standard_t(3, shape) / math.sqrt(3)

    return blocks_of_seeds(draw, [0] * 10, 5, noise=noise)


def large(
    draw: np.random.Generator,
    means: Sequence[float],
    spread: Sequence[float],
    seeds: int = 5,
    images: int = 0,
    metric: str = "val/acc",
) -> Sweep:
    """Simulate settings with large differences and their own noise.

    `means`: true value of each setting. `spread`: standard deviation of a run of each setting,
    relative to the mean for a loss. `images`: if positive, the noise is that of new images instead.
    """
    truth = np.array(means)
    shape = len(truth), seeds
    noise = draw.standard_normal(shape) * np.array(spread)[:, None]
    if images:
        values = draw.binomial(images, truth[:, None], shape) / images
    elif metric == "val/loss":
        values = truth[:, None] * np.exp(noise - np.square(spread)[:, None] / 2)
    else:
        values = np.clip(truth[:, None] + noise, 0, 1)
    error = float(max(values.std(axis=1).mean(), 1e-3)) / math.sqrt(seeds)
    return Sweep(values[:, None, :], truth, error, {}, metric, samples=images or None)


def setting_by_fold(
    draw: np.random.Generator, count: int, folds: int, seeds: int, interaction: float
) -> Sweep:
    """Simulate a sweep of equally good settings in several folds and seeds. Each fold changes each
    setting differently, by a random interaction.
    """
    common = draw.standard_normal((1, folds, 1))
    common -= common.mean()
    own = interaction * draw.standard_normal((count, folds, 1))
    values = ACCURACY + NOISE * (common + own + draw.standard_normal((count, folds, seeds)))
    error = NOISE * math.sqrt(interaction**2 / folds + 1 / (folds * seeds))
    return Sweep(values, np.full(count, ACCURACY), error, {})


def correlated(draw: np.random.Generator) -> Sweep:
    """Simulate a sweep of equally good settings whose noise in a repeat correlates with that in the
    previous repeat (autoregressive, 0.5).
    """

    def noise(shape: tuple[int, ...]) -> Array:
        values = draw.standard_normal(shape)
        for block in range(1, shape[1]):
            values[:, block] = 0.5 * values[:, block - 1] + math.sqrt(0.75) * values[:, block]
        return values

    return blocks_of_seeds(draw, [0] * 10, 5, noise=noise)


def cross_validated(
    draw: np.random.Generator,
    count: int,
    folds: int,
    seeds: int,
    images: int = 300,
    validation: int = 0,
) -> Sweep:
    """Simulate cross-validation with linear discriminants. Each setting has 5 informative columns
    of its own, so all settings are equal on new data.

    Each seed trains on nine tenths of the training images. `validation`: number of images of a
    fixed validation split, used instead of folds.
    """
    size = images + validation
    labels = np.arange(size) % 2
    data = draw.standard_normal((size, count, 5)) + 0.5 * labels[:, None, None]
    fold_of = (
        np.where(np.arange(size) < images, -1, 0) if validation else draw.permutation(size) % folds
    )
    values = np.empty((count, folds, seeds))
    for fold in range(folds):
        train, test = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        for seed in range(seeds):
            kept = draw.choice(train, 9 * len(train) // 10, replace=False)
            for setting in range(count):
                values[setting, fold, seed] = _accuracy(data[:, setting], labels, kept, test)
    error = math.sqrt(0.75 * 0.25 / (validation or images))
    return Sweep(values, None, error, {}, samples=len(test))


def _accuracy(data: Array, labels: Array, train: Array, test: Array) -> float:
    """Fit a linear discriminant to the training images, and return its accuracy on the test
    images.
    """
    means = [data[train][labels[train] == label].mean(axis=0) for label in (0, 1)]
    centered = data[train] - np.where(labels[train][:, None], means[1], means[0])
    weights = np.linalg.solve(centered.T @ centered, means[1] - means[0])
    predicted = (data[test] - (means[0] + means[1]) / 2) @ weights > 0
    return float((predicted == labels[test]).mean())


def _all_but(size: int, usual: float, others: Mapping[int, float]) -> list[float]:
    """Return a list of the usual value, except at some places."""
    return [others.get(place, usual) for place in range(size)]


# Kinds of sweeps for which no analysis of one split can avoid false statements, see
# docs/dev/report_method.md.
UNDECIDABLE = ("270 fixed images", "AR(0.5)")
# True values and noise of nine settings at 60 % and one at 98 %.
NINE, NOISE_OF_NINE = [0.6] * 9 + [0.98], [0.03] * 9 + [0.003]
# Dictionary from the name of a table row to the function that simulates a sweep.
ROWS: dict[str, Make] = {
    # Ordinary noise.
    **{
        f"10x5 one better by {size} SE": partial(
            blocks_of_seeds, advantages=_all_but(10, 0, {5: size}), seeds=5
        )
        for size in (0, 1, 2, 3, 5)
    },
    **{
        f"2x3 better by {size} SE": partial(blocks_of_seeds, advantages=[0, size], seeds=3)
        for size in (0, 1, 2, 3, 5)
    },
    **{
        f"10x5 val/loss, one better by {size} SE": partial(losses, winner=size)
        for size in (0, 1, 2, 3, 5)
    },
    **{
        f"10x5 binomial n=1000 p=.99, one better {size} SE": partial(
            binomial, count=10, seeds=5, images=1000, accuracy=0.99, winner=size
        )
        for size in (1, 2, 3, 5)
    },
    "2x2 equal": partial(blocks_of_seeds, advantages=[0, 0], seeds=2),
    "10x5 slope": partial(blocks_of_seeds, advantages=[place / 2 for place in range(10)], seeds=5),
    "10x5 eight at +3 SE, last +4 SE": partial(
        blocks_of_seeds, advantages=[0, *[3.0] * 8, 4], seeds=5
    ),
    "10x5 baseline better by 3 SE": partial(
        blocks_of_seeds, advantages=_all_but(10, 0, {0: 3}), seeds=5
    ),
    "10x5 baseline better by 6 SE": partial(
        blocks_of_seeds, advantages=_all_but(10, 0, {0: 6}), seeds=5
    ),
    "5x5 baseline worse by 8 SE": partial(
        blocks_of_seeds, advantages=_all_but(5, 0, {0: -8}), seeds=5
    ),
    "40x5 equal": partial(blocks_of_seeds, advantages=[0] * 40, seeds=5),
    # Settings with unequal noise.
    **{
        f"10x5 baseline sd x{factor}": partial(unlike_noise, spread=_all_but(10, 1, {0: factor}))
        for factor in (5, 3, 2, 1.5)
    },
    **{
        f"10x5 one setting sd x{factor}": partial(unlike_noise, spread=_all_but(10, 1, {4: factor}))
        for factor in (5, 3, 2)
    },
    "10x5 3 settings sd x5": partial(unlike_noise, spread=_all_but(10, 1, {4: 5, 5: 5, 6: 5})),
    "10x5 sd 1:3 alternating": partial(unlike_noise, spread=[1, 3] * 5),
    "10x5 sd 3:1 alternating": partial(unlike_noise, spread=[3, 1] * 5),
    "10x5 baseline and 4 never learn (sd 1e-4), one sd .02": partial(
        unlike_noise, spread=_all_but(10, 1, dict.fromkeys(range(5), 0.01) | {5: 2})
    ),
    "2x5 sd 1:5": partial(unlike_noise, spread=[1, 5]),
    "4x5 baseline sd x3": partial(unlike_noise, spread=[3, 1, 1, 1]),
    "4x3 one setting sd x5": partial(unlike_noise, spread=[1, 5, 1, 1], seeds=3),
    "4x3 baseline sd x5": partial(unlike_noise, spread=[5, 1, 1, 1], seeds=3),
    "3x5 baseline sd x10": partial(unlike_noise, spread=[10, 1, 1]),
    "10x5 +7 SE, another setting sd x20": partial(
        unlike_noise, spread=_all_but(10, 1, {4: 20}), winner=7
    ),
    # Lost runs.
    **{
        f"10x5 equal, {share:.0%} of jobs missing": partial(lost_runs, share=share, status=MISSING)
        for share in (0.2, 0.4)
    },
    **{
        f"10x5 equal, {share:.0%} of jobs failed at random": partial(lost_runs, share=share)
        for share in (0.2, 0.4)
    },
    "10x5 equal, 40% missing, shared seed sd 3 points": partial(
        lost_runs, share=0.4, status=MISSING, shared=0.03
    ),
    **{
        f"10x5 equal, worst {worst} of 5 seeds of 5 settings failed": partial(
            lost_runs, worst=worst
        )
        for worst in (1, 2, 3)
    },
    **{
        f"10x5 equal, worst {worst} of 5 seeds of 5 settings not finite": partial(
            lost_runs, worst=worst, status=DIVERGED
        )
        for worst in (1, 2, 3)
    },
    "10x5 equal, one setting has 1 seed": partial(few_seeds, lost={3: range(1, 5)}),
    "10x5 equal, baseline has 1 seed": partial(few_seeds, lost={0: range(1, 5)}),
    "10x5, half of the settings other seeds": partial(
        few_seeds,
        lost={place: range(2) if place % 2 else range(2, 5) for place in range(10)},
    ),
    # Accuracies near a limit, or of few images.
    **{
        f"10x5 equal binomial n={images} p={accuracy}": partial(
            binomial, count=10, seeds=5, images=images, accuracy=accuracy
        )
        for images, accuracy in (
            *((270, p) for p in (0.996, 0.98, 0.9)),
            *((10_000, 0.999), (270, 0.02), (1000, 0.5), (50, 0.98)),
        )
    },
    **{
        f"{count}x{seeds} equal binomial n={images} p={accuracy}": partial(
            binomial, count=count, seeds=seeds, images=images, accuracy=accuracy
        )
        for count, seeds, images, accuracy in (
            *((2, 2, 270, p) for p in (0.996, 0.98, 0.9)),
            *((2, 3, 270, p) for p in (0.996, 0.98)),
            (3, 2, 270, 0.98),
            *((2, 3, 50, p) for p in (0.9, 0.98)),
        )
    },
    "5x3 binomial p=.99 n=1000, seed logit sd 1": partial(
        binomial, count=5, seeds=3, images=1000, accuracy=0.99, spread=1
    ),
    **{
        f"{count}x{seeds} equal, run noise {noise} image(s) of 270": partial(
            rounded, count=count, seeds=seeds, noise=noise
        )
        for count, seeds, noise in (
            *((2, 2, 0.5), (2, 2, 1), (2, 3, 0.5), (2, 3, 1)),
            *((3, 3, 1), (10, 5, 0.5)),
        )
    },
    # Diverged runs and heavy tails.
    "10x5 loss equal, 5% of all runs diverged to 2.3": partial(losses, rate=0.05),
    **{
        f"10x5 loss {effect}, one seed of {name} diverged": partial(
            losses, winner=winner, diverged=[setting]
        )
        for name, setting in (("another setting", 4), ("the winner", 8), ("the baseline", 0))
        for effect, winner in (("equal", 0), ("+5 SE", 5))
    },
    "10x5 loss .24 against .30, one seed of another diverged": partial(
        losses, winner=9, diverged=[4]
    ),
    "10x5 equal, t noise with 3 degrees of freedom": heavy_tailed,
    "10x5 equal, 5% of runs 10 sd off": partial(heavy_tailed, rate=0.05),
    # Folds, and few images that all runs share.
    **{
        f"{count} settings x {folds} folds x {seeds} seeds (CV, n=300)": partial(
            cross_validated, count=count, folds=folds, seeds=seeds
        )
        for count, folds, seeds in (
            *((2, 5, 1), (5, 5, 1), (10, 5, 1), (2, 10, 1)),
            *((2, 5, 3), (2, 5, 5), (5, 5, 5)),
        )
    },
    **{
        f"{count} x 5 seeds, 270 fixed images": partial(
            cross_validated, count=count, folds=1, seeds=5, images=300, validation=270
        )
        for count in (2, 10)
    },
    **{
        f"{count} x 5 folds x {seeds} seeds, setting-by-fold sd {interaction}": partial(
            setting_by_fold, count=count, folds=5, seeds=seeds, interaction=interaction
        )
        for count, seeds, interaction in (
            *((2, 5, 1.0), (2, 5, 0.5), (10, 5, 1.0)),
            *((10, 3, 0.5), (10, 1, 1.0)),
        )
    },
    "10x5 AR(0.5) over blocks": correlated,
    # Large differences.
    **{
        f"2x{seeds} 60 against 98 %": partial(
            large, means=[0.6, 0.98], spread=[0.03, 0.003], seeds=seeds
        )
        for seeds in (3, 5, 10)
    },
    "10x5 nine at 60, one at 98 %": partial(large, means=NINE, spread=NOISE_OF_NINE),
    "10x5 nine at 98, baseline at 60 %": partial(
        large, means=NINE[::-1], spread=NOISE_OF_NINE[::-1]
    ),
    "2x5 60 against 70 %": partial(large, means=[0.6, 0.7], spread=[0.02, 0.02]),
    "2x5 90 against 98 %": partial(large, means=[0.9, 0.98], spread=[0.01, 0.003]),
    "2x5 98 against 60 %": partial(large, means=[0.98, 0.6], spread=[0.003, 0.03]),
    **{
        f"2x5 binomial n=270 {baseline} against {other}": partial(
            large, means=[baseline, other], spread=[0, 0], images=270
        )
        for baseline, other in ((0.95, 0.99), (0.95, 1.0), (0.98, 1.0), (0.9, 0.95))
    },
    **{
        f"{count}x5 loss 1.0 against {other}": partial(
            large, means=[1.0] * (count - 1) + [other], spread=[0.1] * count, metric="val/loss"
        )
        for count, other in ((2, 0.5), (2, 0.1), (10, 0.1))
    },
}


def simulate(name: str, sweeps: int) -> list[Verdict]:
    """Simulate many sweeps of one kind, and return a verdict on each report. Each kind has its own
    random numbers.
    """
    draw = np.random.default_rng([37, sum(map(ord, name))])
    return [judge(ROWS[name](draw)) for _ in range(sweeps)]


COLUMNS = (
    *(
        "named",
        "wrongly named",
        "any false",
        "bound",
        "value bias",
        "plain bias",
        "value bias if named",
    ),
    *("difference bias if named", "covered if named", "value covered", "differences covered"),
)


def lower_bound(count: int, total: int) -> float:
    """Compute the lower end of the one-sided 99 % confidence interval of a share (Clopper and
    Pearson, 1934).
    """
    return float(beta.ppf(0.01, count, total - count + 1)) if count else 0.0


def line(name: str, sweeps: int) -> str:
    """Simulate sweeps of one kind, and format a row of the table: percentages of the sweeps, and
    biases in standard errors.
    """
    frame = pd.DataFrame(simulate(name, sweeps))
    named, level = frame[frame["named"]], frame["level"].mean()
    false = int(frame["any_false"].sum())
    shares = [frame["named"].mean(), frame["falsely_named"].mean(), false / sweeps]
    biases = [frame["stated"].mean() - level, frame["plain"].mean() - level]
    biases += [named["stated"].mean() - level, named["difference"].mean()]
    # The mean of a column leaves out sweeps without a value. It is NaN if none has one.
    covered = [named["covered"].mean(), frame["value_covered"].mean(), frame["all_covered"].mean()]
    cells = [
        *(f"{100 * share:.1f}" for share in (*shares, lower_bound(false, sweeps))),
        *(f"{bias:+.2f}" for bias in biases),
        *(f"{100 * share:.1f}" for share in covered),
    ]
    return f"| {name} | {' | '.join('—' if 'nan' in cell else cell for cell in cells)} |"


def main(argv: list[str]) -> None:
    """Print the table, and each row as soon as it is known."""
    sweeps, processes = (int(word) for word in (argv + ["1000", "2"][len(argv) :])[:2])
    part = argv[2] if len(argv) > 2 else ""
    names = [name for name in ROWS if part in name]
    print(f"| case | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}", flush=True)
    with Pool(processes) as pool:
        for text in pool.imap(partial(line, sweeps=sweeps), names):
            print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
