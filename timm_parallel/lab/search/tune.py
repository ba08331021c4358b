"""Settings to try for speed (`sweep.tune`). A sweep trains one configuration with each setting
alone, and its report names the settings that train fastest on this machine.
"""

from __future__ import annotations

import shlex

from timm_parallel.config.compose import Command
from timm_parallel.keys import ResolvedConfig
from timm_parallel.lab.search.space import trial_point
from timm_parallel.lab.sweep.points import Point
from timm_parallel.machine import hardware


def settings_to_try(command: Command, points: list[Point]) -> list[Point]:
    """Return the configuration of the command, and a copy with each setting of `sweep.tune` that
    differs from it on this machine.

    Raises ValueError if other keys contradict a measurement of speed on this machine.
    """
    config = points[0].config
    if len(points) > 1:
        raise ValueError(
            "sweep.tune: expects one configuration, but the command line gives several values for "
            "a key; give a single value for each key"
        )
    if config.cluster.scheduler != "local":
        raise ValueError(
            f"cluster={config.cluster.scheduler}: sweep.tune measures the machine on which it "
            "runs; use cluster=local on the node that will train"
        )
    if command.config.search.sampler is not None:
        raise ValueError(
            "sweep.tune: cannot be combined with a hyper-parameter search; leave out sweep.tune or "
            "search=…"
        )
    if config.sweep.jobs != 1:
        raise ValueError(
            f"sweep.jobs={config.sweep.jobs}: sweep.tune measures the speed of its jobs, so they "
            "must run one at a time; use sweep.jobs=1"
        )
    if config.train.max_steps is None or config.train.evaluate_every != 0:
        raise ValueError(
            "sweep.tune: measures the speed of short runs without evaluation; set train.max_steps, "
            "and train.evaluate_every=0"
        )
    if points[0].reason:
        raise ValueError(points[0].reason)
    tried = [points[0]]
    for number, text in enumerate(config.sweep.tune, 1):
        try:
            point = trial_point(points[0].tree, shlex.split(text), number)
        except ValueError as error:
            raise ValueError(f"sweep.tune: {text}: this setting is not valid: {error}") from error
        if point.reason or (_fits(point) and all(point.config != other.config for other in tried)):
            tried.append(point)
    if all(point.reason for point in tried[1:]):
        raise ValueError(
            f"sweep.tune={config.sweep.tune}: every setting of this list either equals the "
            "current settings or cannot run on this machine; give other settings"
        )
    return tried


def _fits(point: Point) -> bool:
    """Return False if a configuration on CPU uses more threads than the machine has cores, because
    such a configuration is never faster.
    """
    assert isinstance(point.config, ResolvedConfig)
    parallel = point.config.parallel
    return (
        parallel.accelerator != "cpu"
        or parallel.threads_per_device * parallel.devices <= hardware.cores()
    )
