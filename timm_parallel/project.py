"""The project that the library trains. The rest of the library imports this file, and a project
makes an `App` (timm_parallel/app.py), which adds methods that need the rest.

The library imports nothing of the project. It reads names and classes from the app, and imports
the project's functions by their dotted names when it calls them, so that a refused config and
`--help` need neither torch nor timm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from timm_parallel.class_source import use_classes_of
from timm_parallel.keys import STRATEGIES, Config, ResolvedConfig
from timm_parallel.machine.process import import_name, imports_without_gc
from timm_parallel.metric import Metric

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.machine.ranks import Ranks


DEFAULT = "src.app:app"
C = TypeVar("C", bound=Config)
R = TypeVar("R", bound=ResolvedConfig)


@dataclass(frozen=True)
class Project(Generic[C, R]):
    """A project that the library trains. Making one makes it that of this process."""

    name: str  # where a rank finds it: `src.app:app`
    root: Path  # folder of train.py, conf/ and src/
    config: type[C]
    resolved: type[R]
    # Dotted names of functions.
    run: str  # (config, folder, ranks, store): train as one rank
    rules: str  # (config): yield an error message for each key that does not fit the others
    metrics: Mapping[str, Metric]
    preload: tuple[str, ...]  # modules of a run, which the server that forks jobs imports
    trial: tuple[str, ...]  # overrides of a run of seconds, with which doctor tries a strategy
    # Name -> dotted name of the class. Without tasks, or datasets, their names are not checked.
    tasks: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    strategies: Mapping[str, str] = field(default_factory=STRATEGIES.copy)
    # (config): raise ValueError for data that cannot be read
    check_data: str = "timm_parallel.data.build.check_data"
    # (config): raise ValueError for more than a batch of the data
    check_batch: str = "timm_parallel.data.build.check_batch"
    # (config.data): number of training images, None if it takes long to count
    training_size: str = "timm_parallel.data.build.training_size"
    multirun: str | None = "timm_parallel.lab.multirun.main"  # None: no sweeps

    def __post_init__(self) -> None:
        global _current
        _current = self
        use_classes_of(self.package, self.strategies)

    @property
    def package(self) -> str:
        """Name of the project's package."""
        return self.name.partition(".")[0]

    def own(self, config: Config) -> C:
        """Return a config with the type that the project gave it."""
        assert isinstance(config, self.config)
        return config

    def own_resolved(self, config: ResolvedConfig) -> R:
        """Return a resolved config with the type that the project gave it."""
        assert isinstance(config, self.resolved)
        return config

    def call(self, function: str, *arguments: Any) -> Any:
        """Import a function of the project by its dotted name and call it."""
        return import_name(function)(*arguments)

    def train(
        self, config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None
    ) -> None:
        """Train as one rank of a run. Torch and the project's code are imported here, so that the
        rank records import errors.
        """
        with imports_without_gc():
            run = import_name(self.run)
        run(config, folder, ranks, store)

    def import_all(self) -> None:
        """Import the modules of a run, for the server process that forks jobs."""
        with imports_without_gc():
            for module in self.preload:
                import_module(module)


_current: Project[Any, Any] | None = None


def current() -> Project[Any, Any]:
    """Return the app of this process: the one that was made, or else DEFAULT."""
    return _current or find_app(DEFAULT)


def root() -> Path:
    """Return the folder of the project."""
    return current().root


def as_resolved(config: Config) -> ResolvedConfig:
    """Convert a config without `auto` values to the project's class of a resolved one. Raises
    ValueError if one is left.
    """
    default = current().resolved()
    parallel = type(default.parallel)(**vars(config.parallel))
    train = type(default.train)(**vars(config.train))
    for key, value in (
        ("parallel.devices", parallel.devices),
        ("parallel.threads_per_device", parallel.threads_per_device),
        ("train.accumulate", train.accumulate),
    ):
        if not isinstance(value, int):
            raise ValueError(f"{key}=auto: expected an integer in the config of a run")
    return current().resolved(**{**vars(config), "parallel": parallel, "train": train})


def code_files() -> dict[str, Path]:
    """Return the files of code that a run uses, by their name below the project or the library."""
    project, library = root(), Path(__file__).parent
    package = project / current().package
    own = [project / "train.py", *sorted(package.rglob("*.py"))]
    files = {path.relative_to(project).as_posix(): path for path in own}
    for path in sorted(library.rglob("*.py")):
        if path.relative_to(library).parts[0] not in ("tests", "testing"):
            files[path.relative_to(library.parent).as_posix()] = path
    return files


def code_hashes() -> dict[str, str]:
    """Return a hash of each file of code that a run uses."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        for name, path in code_files().items()
    }


def find_app(name: str) -> Project[Any, Any]:
    """Import the app `<module>:<attribute>`. Raises ValueError if there is none."""
    module, _, attribute = name.partition(":")
    app = getattr(import_module(module), attribute, None)
    if not isinstance(app, Project):
        raise ValueError(f"{name}: no App; expected <module>:<attribute>, e.g. src.app:app")
    return app
