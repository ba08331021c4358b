"""Keys that a fork does not edit: cluster, sweep, search, trackers and paths; and the functions
that declare a key.

src/schema.py adds the groups that a fork may edit, and puts all groups together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Built-in trackers: name of the package, and of the file in timm_parallel/trackers/ -> class.
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "Wandb", "mlflow": "Mlflow"}
Bound = float | None


def key(default: Any, *, help: str, only: str = "", **rules: Any) -> Any:
    """Declare a config key. `help` is one sentence; `only`: the strategy or tracker that reads the
    key; empty: all.
    """
    metadata = {"help": help, "only": only, **rules}
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: Any, *allowed: Any, help: str, only: str = "") -> Any:
    """Declare a config key whose value must be one of `allowed`."""
    return key(default, help=help, choices=allowed, only=only)


def number(
    default: Any, *, help: str, ge: Bound = None, gt: Bound = None, le: Bound = None, only: str = ""
) -> Any:
    """Declare a config key for a finite number, >= `ge`, > `gt` and <= `le`. The only allowed text
    is `auto`.
    """
    return key(default, help=help, ge=ge, gt=gt, le=le, only=only)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, field) of every leaf of a config dataclass."""
    for entry in dataclasses.fields(tree):
        value = getattr(tree, entry.name)
        key = f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, entry


def is_own_class(name: str) -> bool:
    """Return True for `src.<module>.<Class>`, a class of this project. A config may name no other
    classes.
    """
    return re.fullmatch(r"src(\.[A-Za-z_]\w*){2,}", name) is not None


def is_regular_expression(text: str) -> bool:
    """Return True if `re` can compile the text."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@dataclass
class ClusterConfig:
    """Scheduler of a run, and the resources to request per node; null leaves a resource to the
    scheduler.
    """

    scheduler: str = choice(
        "local", "local", "slurm", "kubernetes", help="Job scheduler; local: none."
    )
    nodes: int = number(1, ge=1, help="Number of nodes.")
    gpus: int | None = number(None, ge=0, help="GPUs per node; null: a run on CPU.")
    cpus: int | None = number(None, ge=1, help="CPU cores per node.")
    memory: str | None = key(None, help="Memory per node, e.g. 64G.")
    time: str | None = key(
        None, help="Time limit, hh:mm:ss or d-hh:mm:ss, after which the scheduler stops the job."
    )
    submit: bool = key(True, help="false: write the job's file and do not submit it.")
    wait: bool = key(False, help="Wait until the job has ended, and exit with its code.")
    partition: str | None = key(None, help="Slurm: partition of the job.")
    account: str | None = key(None, help="Slurm: account of the job.")
    gres: str | None = key(None, help="Slurm: generic resources instead of gpus, e.g. gpu:a100:4.")
    signal_seconds: int = number(
        90, ge=10, help="Slurm: seconds before cluster.time to save and requeue."
    )
    image: str | None = key(None, help="Kubernetes: container image.")
    namespace: str | None = key(None, help="Kubernetes: namespace of the job.")
    claim: str | None = key(
        None, help="Kubernetes: volume claim for the run folder, which all nodes can mount."
    )


@dataclass
class SweepConfig:
    """Sweeps, read with --multirun only."""

    repeats: int = number(1, ge=1, help="Blocks that run every point once, with new seeds.")
    smallest_difference: float = number(
        0.03, gt=0, le=1, help="Smallest relative difference that matters, see docs/report.md."
    )
    baseline: str | None = key(
        None, help="Settings that the report compares with, as optim.lr=1e-3; null: the first."
    )
    shuffle: bool | None = key(
        None, help="Draw a new order of points in each block; null: if repeats > 1."
    )
    resume: str | None = key(None, help="A sweep folder: run its missing and failed jobs.")
    dry_run: bool = key(False, help="Print the jobs with their derived values, and exit.")
    jobs: int | str = number(
        1, ge=1, help="Concurrent jobs, each on other devices or cores; auto: as many as fit."
    )
    timed: bool = key(False, help="The sweep compares speed, so its jobs run one at a time.")
    tune: list[str] = key(
        [], help="Settings to try for speed, each as overrides; see experiment=tune."
    )


@dataclass
class SearchConfig:
    """Hyper-parameter search with Optuna, read with --multirun only; the names are those of Hydra's
    Optuna sweeper.
    """

    sampler: str | None = choice(
        None, "tpe", "random", help="Sampler of the trials; null: no search."
    )
    n_trials: int = number(20, ge=1, help="Trials in total, those before a resume included.")
    n_jobs: int | str = number(1, ge=1, help="Concurrent trials, as sweep.jobs.")
    confirm: int | None = number(
        None, ge=2, help="Train the best trial and the default settings with N new seeds."
    )
    direction: str | None = choice(
        None, "maximize", "minimize", help="Direction of optimized_metric; null: its own."
    )
    storage: str | None = key(
        None, help="Database URL; null: study.db in the sweep folder; passwords: ${oc.env:…}."
    )
    study_name: str | None = key(
        None, help="Name of the study; null: task_name and the name of the sweep folder."
    )
    params: dict[str, Any] = key(
        {}, help="Key: interval(a,b), tag(log,interval(a,b)), choice(a,b), range(a,b) or a,b."
    )
    max_failure_rate: float = number(
        0.5, ge=0, le=1, help="Share of n_trials; more failed trials end the search."
    )
    seed: int | None = number(None, ge=0, help="Seed of the sampler; null: the key seed.")
    pruner: str = choice(
        "median",
        "median",
        "none",
        help="median stops a trial that is worse than the median of the others at the same "
        "evaluation.",
    )
    n_startup_trials: int = number(5, ge=0, help="Finished trials before the pruner stops any.")
    n_warmup_steps: int = number(
        0, ge=0, help="Evaluations of a trial before the pruner may stop it."
    )


@dataclass
class TrackerConfig:
    """Trackers, which show numbers and images of runs: tracker=<name>, or several with
    tracker=[<name>,<name>].
    """

    use: dict[str, Any] | None = key(
        None, help="Name: true, or `src.<module>.<Class>`; null: tensorboard alone."
    )
    project: str | None = key(None, help="Project of wandb, experiment of mlflow; null: task_name.")
    entity: str | None = key(None, only="wandb", help="User or team; null: your default one.")
    mode: str | None = choice(
        None, "online", "offline", only="wandb", help="null: the variable WANDB_MODE, or online."
    )
    uri: str | None = key(
        None, only="mlflow", help="Server; null: MLFLOW_TRACKING_URI, or <output_dir>/mlflow.db."
    )

    def classes(self) -> dict[str, str]:
        """Map the name of each chosen tracker to the dotted name of its class."""
        use = {"tensorboard": True} if self.use is None else self.use
        built_in = {name: f"timm_parallel.trackers.{name}.{TRACKERS.get(name)}" for name in use}
        return {
            name: built_in[name] if value is True else str(value) for name, value in use.items()
        }

    def problems(self, whole: object) -> Iterator[str]:
        for key, value, entry in leaves(self, "tracker."):
            tracker = entry.metadata.get("only")
            if value is not None and tracker and tracker not in self.classes():
                yield f"{key}={value}: has no effect without tracker={tracker}"


@dataclass
class PathsConfig:
    """Folders of data sets and of outputs."""

    output_dir: str = key("outputs", help="Folder for runs and sweeps.")
